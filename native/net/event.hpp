// What ranks of different hosts tell each other beside their data: who is dead or has left,
// and what has become of a communicator. An event travels as it lies in memory.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "memory/layout.hpp"

namespace unisono {

// How it shows that somebody is dead.
enum class Cause : std::uint32_t {
  none,
  gone,          // its connection ended
  silent,        // nothing was heard of it for the limit
  slow,          // it did not take in what it was told
  corrupted,     // what came from it was damaged
  not_authentic, // what came in its name was not made with its key
};
constexpr std::size_t num_causes = 6;
const char *cause_name(Cause cause);

struct Event {
  enum class Kind : std::uint32_t {
    beat,
    dead,
    left,
    verdict, // a communicator is broken
    called,  // what a rank had called, told before the verdict that it was something else
    closed,  // a rank has closed its end of a communicator
    waits,   // a rank has waited for another for some time, or does no longer
  };
  Kind kind = Kind::beat;
  std::uint32_t rank = 0; // who is dead, has left, closed, called, waits, or speaks the verdict
  Cause cause = Cause::none;
  std::uint32_t reporter = 0; // who found out
  std::uint64_t comm = 0;     // of which communicator, where it is about one
  std::uint64_t word = 0;     // see Verdict, and RankBlock::waits_for, in memory/layout.hpp
  std::array<std::byte, sizeof(Note)> note{}; // of called and waits: which call

  // Whether somebody is no longer there.
  bool parts() const { return kind == Kind::dead || kind == Kind::left; }
  // How much of it travels.
  std::size_t bytes() const;
};
constexpr std::size_t num_event_kinds = 7;
static_assert(std::has_unique_object_representations_v<Event>);
const char *event_name(Event::Kind kind);

} // namespace unisono

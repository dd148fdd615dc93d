// Control messages between ranks of different hosts: deaths, and the state of
// communicators. An event is sent as it is in memory.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "memory/layout.hpp"

namespace unisono {

// Why a rank is considered dead.
enum class Cause : std::uint32_t {
  none,
  gone,          // its connection ended
  silent, // no message for the time limit
  slow, // it did not read what it was sent
  corrupted, // a frame from it was damaged
  not_authentic, // a frame was not made with its key
};
constexpr std::size_t num_causes = 6;
const char *cause_name(Cause cause);

struct Event {
  enum class Kind : std::uint32_t {
    beat,
    dead,
    left,
    failure, // a communicator is aborted
    called, // what a rank called; sent before the failure that reports a mismatch
    closed, // a rank has closed a communicator
    waits, // a rank has waited for another for some time, or no longer waits
  };
  Kind kind = Kind::beat;
  // the rank that is dead, left, closed, called, waits, or reports the failure
  std::uint32_t rank = 0;
  Cause cause = Cause::none;
  std::uint32_t reporter = 0; // the rank that detected it
  std::uint64_t comm = 0; // the shared id of the communicator, if it is about one
  std::uint64_t word = 0;     // see Failure, and RankBlock::waits_for, in memory/layout.hpp
  std::array<std::byte, sizeof(Note)> note{}; // of called and waits: which call

  // Whether it reports that a rank is dead or has left.
  bool ends_rank() const { return kind == Kind::dead || kind == Kind::left; }
  // How many of its bytes are sent.
  std::size_t bytes() const;
};
constexpr std::size_t num_event_kinds = 7;
static_assert(std::has_unique_object_representations_v<Event>);
const char *event_name(Event::Kind kind);

} // namespace unisono

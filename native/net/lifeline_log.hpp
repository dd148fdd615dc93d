// What was told on a lifeline, until all have been sent it, each from its own place on.
//
// A ring of a fixed size, so that nothing is allocated when somebody has died.

#pragma once

#include <cstring>
#include <memory>

#include "net/lifeline.hpp"

namespace unisono {

struct Lifeline::Log {
  static constexpr std::size_t size = 65536; // so many events unsent is slow at once
  struct Entry {
    Event event;
    std::size_t source; // whence it came, where it need not go
  };
  static_assert(std::is_trivially_copyable_v<Entry>);
  Entry at(std::uint64_t i) const {
    Entry entry;
    std::memcpy(&entry, &ring[i % size * sizeof entry], sizeof entry);
    return entry;
  }
  void add(const Entry &entry) {
    std::memcpy(&ring[end++ % size * sizeof entry], &entry, sizeof entry);
  }
  bool full() const { return end - begin == size; }

  std::uint64_t begin = 0, end = 0;

private:
  // Not touched before it is needed, so it costs nothing while nothing happens.
  std::unique_ptr<std::byte[]> ring =
      std::make_unique_for_overwrite<std::byte[]>(size * sizeof(Entry));
};

} // namespace unisono

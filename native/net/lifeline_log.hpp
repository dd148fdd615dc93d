// The events of a lifeline that are still to be sent, with a position for each peer.
//
// A ring of fixed size, so that nothing is allocated after a failure.

#pragma once

#include <cstring>
#include <memory>

#include "net/lifeline.hpp"

namespace unisono {

struct Lifeline::Log {
  static constexpr std::size_t size = 65536; // a peer that is so many events behind is slow
  struct Entry {
    Event event;
    std::size_t source; // the rank it came from, which it need not be sent to
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
  // The kernel allocates its pages on first use.
  std::unique_ptr<std::byte[]> ring =
      std::make_unique_for_overwrite<std::byte[]>(size * sizeof(Entry));
};

} // namespace unisono

// A ring of bytes in one direction between two ranks, and the head of a message in it.
//
// The bytes lie behind the ring. Sender and receiver each count those that have passed, since
// the beginning; what lies between the two counts is in the ring.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "memory/layout.hpp"

namespace unisono {

struct MessageHead {
  std::uint64_t bytes;
  std::int64_t tag;
  std::uint64_t type; // fingerprint of the element type
};
// More than any machine holds: who announces a longer one has not made that head.
constexpr std::uint64_t most_message_bytes = std::uint64_t(1) << 48;

struct Ring {
  alignas(line_size) Word sent;
  Word cut; // 1: a message was given up half sent, and nothing can follow it
  alignas(line_size) Word taken;
};

inline std::byte *bytes_of(Ring *ring) {
  return reinterpret_cast<std::byte *>(ring) + sizeof(Ring);
}

// Smaller where there are many ranks, so that an outbox stays within bounds.
inline std::size_t ring_capacity(std::size_t n) {
  constexpr std::size_t most_outbox = std::size_t(8) << 20;
  std::size_t capacity = std::size_t(256) << 10;
  while (capacity > 4096 && capacity * n > most_outbox)
    capacity /= 2;
  return capacity;
}

// What is empty may lie nowhere, and memcpy is not to be given that.
inline void copy_in(std::byte *ring, std::size_t capacity, std::uint64_t at,
                    const std::byte *from, std::size_t bytes) {
  if (bytes == 0)
    return;
  const std::size_t first = std::min(bytes, capacity - at % capacity);
  std::memcpy(ring + at % capacity, from, first);
  std::memcpy(ring, from + first, bytes - first);
}

inline void copy_out(std::byte *to, const std::byte *ring, std::size_t capacity,
                     std::uint64_t at, std::size_t bytes) {
  if (bytes == 0)
    return;
  const std::size_t first = std::min(bytes, capacity - at % capacity);
  std::memcpy(to, ring + at % capacity, first);
  std::memcpy(to + first, ring, bytes - first);
}

} // namespace unisono

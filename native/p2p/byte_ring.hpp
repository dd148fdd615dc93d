// A ring of bytes in one direction between two ranks, and the header of a message in it.
//
// The bytes follow the ring's words. Sender and receiver each count the bytes that they
// have written or read since the beginning; the bytes between the two counts are in the
// ring.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "memory/layout.hpp"

namespace unisono {

struct MessageHeader {
  std::uint64_t bytes;
  std::int64_t tag;
  std::uint64_t type; // fingerprint of the element type
};
// More than any machine holds: a longer message means a corrupted header.
constexpr std::uint64_t max_message_bytes = std::uint64_t(1) << 48;

struct ByteRing {
  alignas(line_size) Word sent;
  Word truncated; // 1: a message was abandoned half sent, and nothing can follow it
  alignas(line_size) Word taken;
};

inline std::byte *bytes_of(ByteRing *ring) {
  return reinterpret_cast<std::byte *>(ring) + sizeof(ByteRing);
}

// Smaller if there are many ranks, so that the size of an outbox is bounded.
inline std::size_t ring_capacity(std::size_t n) {
  constexpr std::size_t most_outbox = std::size_t(8) << 20;
  std::size_t capacity = std::size_t(256) << 10;
  while (capacity > 4096 && capacity * n > most_outbox)
    capacity /= 2;
  return capacity;
}

// An empty buffer may be null, which memcpy must not be given.
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

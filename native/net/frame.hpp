// Frames, the unit of transfer between hosts: a header of one cache line, and a payload.
//
// A connection has two directions, each with its own key from the handshake. Every header
// has a keyed checksum of itself (its mac), the epoch of the communicators, its number in
// its direction, and a checksum of the payload. So a frame is accepted only if it was made
// by a holder of the key, for this epoch, directly after the one before, and arrived
// unchanged. The checksum of the payload protects against accidents, not against an
// attacker who can modify the connection: for that there is TLS.
//
// Nothing here allocates, and no size that a peer sends is used before it is checked. After
// the first wrong frame nothing more is read: its end cannot be known.

#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "kernels/crc32c.hpp"

namespace unisono {

enum class FrameKind : std::uint16_t { data = 1, note = 2, control = 3 };

// Little endian, on the wire as in memory; tests/transports/reference_wire.py is the
// reference.
struct FrameHeader {
  static constexpr std::uint32_t right_magic = 0x314e5355; // "USN1"
  std::uint32_t magic = right_magic;
  FrameKind kind = FrameKind::data;
  std::uint16_t flags = 0;
  std::uint32_t epoch = 0;
  std::uint32_t length = 0; // of the payload
  std::uint64_t number = 0; // of this frame in its direction of the connection, from 0
  std::uint64_t call = 0;   // sequence number of the collective it belongs to
  std::uint64_t fingerprint = 0;
  std::uint32_t piece = 0;
  std::uint32_t message = 0;
  std::uint32_t crc = 0; // of the payload
  std::uint32_t place = 0; // in a stream whose lanes are taken by room (stream.hpp), or 0
  std::uint64_t mac = 0; // of all before it
};
static_assert(sizeof(FrameHeader) == 64 && offsetof(FrameHeader, mac) == 56);
static_assert(std::is_trivially_copyable_v<FrameHeader>);
static_assert(std::has_unique_object_representations_v<FrameHeader>);
static_assert(std::endian::native == std::endian::little);

// What is wrong with a frame: the first that applies, in this order.
enum class Flaw : std::uint8_t {
  none,
  magic, // not frames of this protocol, or out of step
  mac, // not made with the key, or changed in transit
  epoch,   // genuine, but of another epoch
  number, // genuine, but not the next: repeated, lost or out of order
  kind, // genuine, but of no known kind
  length, // genuine, but longer than expected
  payload, // the payload does not match its checksum
};
constexpr std::size_t num_flaws = 8;
const char *flaw_name(Flaw flaw);

using Key = std::array<std::uint8_t, 16>;

// SipHash-2-4: a keyed checksum that cannot be made without the key.
std::uint64_t siphash(const Key &key, const void *data, std::size_t bytes);

// One direction of one connection: the sender seals frames, the receiver checks them in
// order.
class Seal {
public:
  Seal(const Key &key, std::uint32_t epoch) : key_(key), epoch_(epoch) {}

  // Completes the header of the next frame; the caller sets kind, length and the fields of
  // the call. `payload` has header.length bytes.
  void seal(FrameHeader &header, const void *payload) {
    seal(header, crc32c(payload, header.length));
  }
  // The same for a payload in several parts, whose checksum is known.
  void seal(FrameHeader &header, std::uint32_t crc);
  // Whether this is the header of the next frame, with a payload of at most `limit` bytes.
  // After any result but `none` the connection cannot be read any further.
  Flaw check(const FrameHeader &header, std::size_t limit);
  // Whether the payload of a checked header matches its checksum.
  static bool check_payload(const FrameHeader &header, const void *payload) {
    return crc32c(payload, header.length) == header.crc;
  }
  // The number of frames so far.
  std::uint64_t count() const { return next_; }

private:
  std::uint64_t mac(const FrameHeader &header) const {
    return siphash(key_, &header, offsetof(FrameHeader, mac));
  }
  Key key_;
  std::uint32_t epoch_;
  std::uint64_t next_ = 0;
};

// Reads small frames from a stream that arrives in arbitrary parts. Payloads are stored in
// a buffer of the owner, whose size is the limit.
class FrameReader {
public:
  FrameReader(Seal seal, std::span<std::byte> place) : seal_(seal), place_(place) {}

  // Consumes bytes from the front of `bytes` until a frame is complete (true; the next call
  // begins another), or none are left, or there is a flaw.
  bool take(std::span<const std::byte> &bytes);
  const FrameHeader &header() const { return header_; }
  std::span<const std::byte> payload() const { return place_.first(header_.length); }
  Flaw flaw() const { return flaw_; }
  // Whether the stream is inside a frame: if it ends here, it is truncated.
  bool inside() const { return filled_ != 0 && !whole_; }

private:
  bool fill(std::span<const std::byte> &bytes, void *to, std::size_t done, std::size_t size);
  Seal seal_;
  std::span<std::byte> place_;
  FrameHeader header_;
  std::size_t filled_ = 0; // of header and payload together
  bool whole_ = false;
  Flaw flaw_ = Flaw::none;
};

} // namespace unisono

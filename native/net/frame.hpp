// What travels between hosts: frames, each a header of one line and its payload.
//
// A connection has two directions, each with a key of its own that the handshake has made.
// Every header carries a keyed checksum of itself (its mac), the epoch of the communicators
// and its number in its direction; and a checksum of the payload. So a frame is believed
// only if it was made by who holds the key, for this epoch, right after the one before, and
// came as it was sent. Whoever can change what travels can still forge a payload, since
// that is guarded against accidents alone: against him there is TLS.
//
// Nothing here allocates, and no size that a peer names is used before it is checked. The
// first frame that is wrong is the last: where it ends cannot be known, so what comes after
// it cannot be read.

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

// On the wire as in memory, little endian; tests/transports/reference_wire.py says it again.
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
  std::uint32_t spare = 0;
  std::uint64_t mac = 0; // of all before it
};
static_assert(sizeof(FrameHeader) == 64 && offsetof(FrameHeader, mac) == 56);
static_assert(std::is_trivially_copyable_v<FrameHeader>);
static_assert(std::has_unique_object_representations_v<FrameHeader>);
static_assert(std::endian::native == std::endian::little);

// What is wrong with a frame, the first that is found in this order.
enum class Flaw : std::uint8_t {
  none,
  magic,   // these are not frames of ours, or they are out of step
  mac,     // not made with the key, or changed on its way
  epoch,   // genuine, but of another epoch
  number,  // genuine, but not the next: repeated, lost or out of order
  kind,    // genuine, but of no kind that is known
  length,  // genuine, but longer than what is expected
  payload, // the payload is not what its checksum speaks of
};
constexpr std::size_t num_flaws = 8;
const char *flaw_name(Flaw flaw);

using Key = std::array<std::uint8_t, 16>;

// SipHash-2-4: a keyed checksum that nobody without the key can make.
std::uint64_t siphash(const Key &key, const void *data, std::size_t bytes);

// One direction of one connection: its sender seals, its receiver checks, in order.
class Seal {
public:
  Seal(const Key &key, std::uint32_t epoch) : key_(key), epoch_(epoch) {}

  // Completes the header of the next frame; kind, length and the fields of the call are
  // the caller's, all else is set. `payload` has header.length bytes.
  void seal(FrameHeader &header, const void *payload) {
    seal(header, crc32c(payload, header.length));
  }
  // The same for a payload in parts, whose checksum is known.
  void seal(FrameHeader &header, std::uint32_t crc);
  // Whether this is the header of the next frame, with at most `limit` bytes to come.
  // After anything but `none` nothing that comes can be believed.
  Flaw check(const FrameHeader &header, std::size_t limit);
  // Whether the payload of a header that was found right is right too.
  static bool check_payload(const FrameHeader &header, const void *payload) {
    return crc32c(payload, header.length) == header.crc;
  }
  // How many frames went by.
  std::uint64_t count() const { return next_; }

private:
  std::uint64_t mac(const FrameHeader &header) const {
    return siphash(key_, &header, offsetof(FrameHeader, mac));
  }
  Key key_;
  std::uint32_t epoch_;
  std::uint64_t next_ = 0;
};

// Small frames out of a stream that arrives in any cuts. Payloads are put in a place that
// the owner gives, whose size is the limit.
class FrameReader {
public:
  FrameReader(Seal seal, std::span<std::byte> place) : seal_(seal), place_(place) {}

  // Takes bytes from the front of `bytes` until one frame is whole (true; the next call
  // begins another), or none are left, or there is a flaw.
  bool take(std::span<const std::byte> &bytes);
  const FrameHeader &header() const { return header_; }
  std::span<const std::byte> payload() const { return place_.first(header_.length); }
  Flaw flaw() const { return flaw_; }
  // Whether the stream stands inside a frame: if it ends here, it was cut off.
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

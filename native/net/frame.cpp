#include "net/frame.hpp"

#include <algorithm>
#include <cstring>

namespace unisono {

namespace {

// The state of SipHash: four words, mixed twice per word of data and four times at the end.
struct Stirred {
  std::uint64_t a, b, c, d;

  void stir(int times) {
    for (; times > 0; --times) {
      a += b;
      c += d;
      b = std::rotl(b, 13) ^ a;
      d = std::rotl(d, 16) ^ c;
      a = std::rotl(a, 32) + d;
      c += b;
      d = std::rotl(d, 21) ^ a;
      b = std::rotl(b, 17) ^ c;
      c = std::rotl(c, 32);
    }
  }
  void take(std::uint64_t word) {
    d ^= word;
    stir(2);
    a ^= word;
  }
};

} // namespace

const char *flaw_name(Flaw flaw) {
  constexpr const char *names[num_flaws] = {"none",   "magic", "mac",    "epoch",
                                            "number", "kind",  "length", "payload"};
  return names[std::size_t(flaw)];
}

std::uint64_t siphash(const Key &key, const void *data, std::size_t bytes) {
  std::uint64_t half[2], word;
  std::memcpy(half, key.data(), sizeof half);
  Stirred state{half[0] ^ 0x736f6d6570736575, half[1] ^ 0x646f72616e646f6d,
                half[0] ^ 0x6c7967656e657261, half[1] ^ 0x7465646279746573};
  const auto *p = static_cast<const unsigned char *>(data);
  std::uint64_t last = std::uint64_t(bytes) << 56;
  for (; bytes >= sizeof word; bytes -= sizeof word, p += sizeof word) {
    std::memcpy(&word, p, sizeof word);
    state.take(word);
  }
  for (std::size_t i = 0; i < bytes; ++i)
    last |= std::uint64_t(p[i]) << 8 * i;
  state.take(last);
  state.c ^= 0xff;
  state.stir(4);
  return state.a ^ state.b ^ state.c ^ state.d;
}

void Seal::seal(FrameHeader &header, std::uint32_t crc) {
  header.magic = FrameHeader::right_magic;
  header.epoch = epoch_;
  header.number = next_++;
  header.crc = crc;
  header.mac = mac(header);
}

Flaw Seal::check(const FrameHeader &header, std::size_t limit) {
  if (header.magic != FrameHeader::right_magic)
    return Flaw::magic;
  // Compares whole words, so that the time does not depend on where they differ.
  if ((header.mac ^ mac(header)) != 0)
    return Flaw::mac;
  if (header.epoch != epoch_)
    return Flaw::epoch;
  if (header.number != next_)
    return Flaw::number;
  if (header.kind < FrameKind::data || header.kind > FrameKind::control)
    return Flaw::kind;
  if (header.length > limit)
    return Flaw::length;
  ++next_;
  return Flaw::none;
}

// Copies what is available of `size` bytes, of which `done` are complete; whether all are.
bool FrameReader::fill(std::span<const std::byte> &bytes, void *to, std::size_t done,
                       std::size_t size) {
  const std::size_t taken = std::min(size - done, bytes.size());
  if (taken > 0)
    std::memcpy(static_cast<std::byte *>(to) + done, bytes.data(), taken);
  bytes = bytes.subspan(taken);
  filled_ += taken;
  return done + taken == size;
}

bool FrameReader::take(std::span<const std::byte> &bytes) {
  if (flaw_ != Flaw::none)
    return false;
  if (whole_) {
    whole_ = false;
    filled_ = 0;
  }
  if (filled_ < sizeof header_) {
    if (!fill(bytes, &header_, filled_, sizeof header_))
      return false;
    flaw_ = seal_.check(header_, place_.size());
    if (flaw_ != Flaw::none)
      return false;
  }
  if (!fill(bytes, place_.data(), filled_ - sizeof header_, header_.length))
    return false;
  if (!Seal::check_payload(header_, place_.data())) {
    flaw_ = Flaw::payload;
    return false;
  }
  whole_ = true;
  return true;
}

} // namespace unisono

// One stream: a few frames as an honest sender makes them; then damage; then a reader that
// gets it in random cuts. What must come out is known from the bytes alone: exactly the
// frames that end before the first byte that differs, and nothing after them.

#include "test/frame_fuzz.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace unisono {

namespace {

constexpr std::size_t max_payload = 96;
constexpr std::size_t max_frames = 5;

// Small and the same everywhere: a counter, well mixed.
struct Dice {
  std::uint64_t state;
  std::uint64_t word() {
    std::uint64_t z = state += 0x9e3779b97f4a7c15;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
  }
  std::size_t below(std::size_t n) { return std::size_t(word() % n); }
  void fill(void *data, std::size_t bytes) {
    for (auto *p = static_cast<std::byte *>(data); bytes > 0;) {
      const std::uint64_t some = word();
      const std::size_t part = std::min(bytes, sizeof some);
      std::memcpy(p, &some, part);
      p += part;
      bytes -= part;
    }
  }
  Key key() {
    Key key;
    fill(key.data(), key.size());
    return key;
  }
};

using Bytes = std::vector<std::byte>;

class Stream {
public:
  explicit Stream(Dice &dice) : dice_(dice), key_(dice.key()), epoch_(dice.below(1000)) {
    Seal seal(key_, epoch_);
    starts_.reserve(max_frames + 1);
    sent_.reserve(max_frames * (sizeof(FrameHeader) + max_payload));
    const std::size_t frames = 1 + dice_.below(max_frames);
    for (std::size_t i = 0; i < frames; ++i) {
      starts_.push_back(sent_.size());
      append(sent_, seal, dice_.below(max_payload + 1));
    }
    starts_.push_back(sent_.size());
    got_ = sent_;
  }

  void damage() {
    const std::size_t first = dice_.below(frames()), second = dice_.below(frames());
    switch (dice_.below(12)) {
    case 0: return flip(first, 1);
    case 1: return flip(first, 2 + dice_.below(8));
    case 2: return erase(dice_.below(got_.size()), 1 + dice_.below(80));
    case 3: return got_.resize(dice_.below(got_.size()));
    case 4: return insert(starts_[dice_.below(frames() + 1)], frame(first));
    case 5: return swap(first, second);
    case 6: return insert(dice_.below(got_.size() + 1), garbage());
    case 7: return set_length(first);
    case 8: return forge(first);
    case 9: return erase(starts_[first], starts_[first + 1] - starts_[first]);
    case 10: return swap_bytes();
    default: got_ = garbage();
    }
  }

  // Reads it, and compares what is believed with what must be.
  void read(FuzzCounts &counts) {
    std::size_t intact = 0;
    while (intact < frames() && came(intact))
      ++intact;
    const bool damaged = intact < frames() || got_.size() != sent_.size();
    Bytes place(max_payload);
    FrameReader reader(Seal(key_, epoch_), place);
    std::size_t validated = 0;
    bool right = true;
    for (std::size_t at = 0; at < got_.size() && reader.flaw() == Flaw::none;) {
      // On the heap and of just this size, so that a byte too far is seen by ASan.
      const std::size_t cut = std::min(got_.size() - at, 1 + dice_.below(200));
      const Bytes part(got_.begin() + long(at), got_.begin() + long(at + cut));
      std::span<const std::byte> left(part);
      while (reader.take(left)) {
        right = right && validated < intact && same_frame(reader, validated);
        ++validated;
      }
      at += cut;
    }
    ++counts.streams;
    counts.undamaged += !damaged;
    counts.frames += validated;
    counts.wrong += !right || validated != intact;
    const bool over = reader.flaw() == Flaw::none;
    counts.cut_off += damaged && over;
    // Without a flaw the stream must be one that simply ended too soon.
    counts.wrong += damaged && over && !reader.inside() && validated >= frames();
    counts.flaws[std::size_t(reader.flaw())] += !(damaged && over);
  }

private:
  std::size_t frames() const { return starts_.size() - 1; }

  // Whether a frame stands in its place as it was sent.
  bool came(std::size_t i) const {
    const std::size_t begin = starts_[i], end = starts_[i + 1];
    return got_.size() >= end &&
           std::memcmp(got_.data() + begin, sent_.data() + begin, end - begin) == 0;
  }

  void append(Bytes &to, Seal &seal, std::size_t length) {
    std::byte payload[max_payload];
    dice_.fill(payload, length);
    FrameHeader header;
    header.kind = FrameKind(1 + dice_.below(3));
    header.length = std::uint32_t(length);
    header.call = dice_.word();
    header.fingerprint = dice_.word();
    seal.seal(header, payload);
    const auto *bytes = reinterpret_cast<const std::byte *>(&header);
    to.insert(to.end(), bytes, bytes + sizeof header);
    to.insert(to.end(), payload, payload + length);
  }

  bool same_frame(const FrameReader &reader, std::size_t i) const {
    const std::byte *at = sent_.data() + starts_[i];
    const auto payload = reader.payload();
    return std::memcmp(at, &reader.header(), sizeof(FrameHeader)) == 0 &&
           (payload.empty() || std::memcmp(payload.data(), at + sizeof(FrameHeader),
                                           payload.size()) == 0);
  }

  Bytes frame(std::size_t i) const {
    return {sent_.begin() + long(starts_[i]), sent_.begin() + long(starts_[i + 1])};
  }
  Bytes garbage() {
    Bytes bytes(1 + dice_.below(300));
    dice_.fill(bytes.data(), bytes.size());
    return bytes;
  }

  void flip(std::size_t i, std::size_t times) {
    for (; times > 0; --times)
      got_[starts_[i] + dice_.below(starts_[i + 1] - starts_[i])] ^=
          std::byte(1u << dice_.below(8));
  }
  void erase(std::size_t at, std::size_t bytes) {
    got_.erase(got_.begin() + long(at),
               got_.begin() + long(std::min(got_.size(), at + bytes)));
  }
  void insert(std::size_t at, const Bytes &bytes) {
    got_.insert(got_.begin() + long(at), bytes.begin(), bytes.end());
  }
  void swap(std::size_t i, std::size_t k) {
    got_.clear();
    for (std::size_t f = 0; f < frames(); ++f) {
      const Bytes one = frame(f == i ? k : f == k ? i : f);
      got_.insert(got_.end(), one.begin(), one.end());
    }
  }
  void swap_bytes() {
    std::swap(got_[dice_.below(got_.size())], got_[dice_.below(got_.size())]);
  }

  // A header that speaks of more than came, or of very much; half of them sealed by one who
  // holds the key, so that nothing but the limit stands against it.
  void set_length(std::size_t i) {
    FrameHeader header;
    std::byte *at = got_.data() + starts_[i];
    std::memcpy(&header, at, sizeof header);
    const std::uint32_t huge[] = {max_payload + 1, 1u << 16, 1u << 31, ~0u};
    header.length = huge[dice_.below(4)];
    if (dice_.below(2) == 0)
      header.mac = siphash(key_, &header, offsetof(FrameHeader, mac));
    std::memcpy(at, &header, sizeof header);
  }

  // A whole frame, right in all but one thing: the key, the epoch, the number or the kind.
  void forge(std::size_t i) {
    FrameHeader header;
    std::byte *at = got_.data() + starts_[i];
    std::memcpy(&header, at, sizeof header);
    Key key = key_;
    switch (dice_.below(4)) {
    case 0: key = dice_.key(); break;
    case 1: header.epoch += 1 + std::uint32_t(dice_.below(9)); break;
    case 2: header.number += 1 + dice_.below(9); break;
    default: header.kind = FrameKind(4 + dice_.below(60000)); break;
    }
    header.mac = siphash(key, &header, offsetof(FrameHeader, mac));
    std::memcpy(at, &header, sizeof header);
  }

  Dice &dice_;
  Key key_;
  std::uint32_t epoch_;
  Bytes sent_, got_;
  std::vector<std::size_t> starts_; // of each frame, and the end
};

} // namespace

FuzzCounts fuzz_frames(std::uint64_t seed, std::uint64_t count) {
  FuzzCounts counts;
  Dice dice{seed};
  for (std::uint64_t i = 0; i < count; ++i) {
    Stream stream(dice);
    stream.damage();
    stream.read(counts);
  }
  return counts;
}

} // namespace unisono

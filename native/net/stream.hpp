// One direction between two ranks of different hosts.
//
// What travels are frames (frame.hpp): a message is cut at every `frame_bytes`, and the
// frames go over one or more wires (wire.hpp), the lanes, in turn. So the lanes carry a
// message together, and whoever receives knows which lane the next frame comes from. Nothing
// is queued but what is leaving: bytes go from the caller's memory to the wire and from the
// wire to where the caller wants them, as far as that goes without waiting. A frame is
// believed when its checksum is right.
//
// Lanes are attached by other threads than those that move bytes, which look at none before
// all are there.

#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include <poll.h>

#include "memory/layout.hpp"
#include "net/frame.hpp"
#include "net/wire.hpp"

namespace unisono {

constexpr std::size_t frame_bytes = 128 << 10;
constexpr std::size_t read_ahead = 16 << 10;
constexpr std::size_t most_lanes = 64;

enum class Io { done, blocked, lost, corrupt, mismatch, left, cut };

// Which frame is meant: of which call, with which payload.
struct Mark {
  std::uint64_t call = 0;
  std::uint64_t fingerprint = 0;
  std::uint32_t piece = 0;
  std::uint32_t message = 0;
};

// What a lane has at either end.
struct LaneEnd {
  std::unique_ptr<Wire> wire; // null until it is attached
  Seal seal{Key{}, 0};
};

// The lanes of a stream at one end, and whose turn it is. It is open when all are there.
template <class Lane> class Lanes {
public:
  Lanes() = default;
  Lanes(const Lanes &) = delete;
  Lanes &operator=(const Lanes &) = delete;

  // False if the peer has named lanes that cannot be; then the wire stays the caller's.
  // While some are missing, one that comes again takes the place of the one before, which
  // its sender has given up; once all are there, they are in use and none is taken.
  bool attach(std::size_t lane, std::size_t lanes, std::unique_ptr<Wire> &wire,
              const Key &key, std::uint32_t epoch) {
    std::lock_guard lock(attaching_);
    const bool others = !lanes_.empty() && lanes_.size() != lanes;
    if (open() || others || lanes > most_lanes || lane >= lanes)
      return false;
    lanes_.resize(lanes);
    attached_ += lanes_[lane].wire == nullptr;
    lanes_[lane].wire = std::move(wire);
    lanes_[lane].seal = Seal(key, epoch);
    if (attached_ == lanes)
      open_.store(true, std::memory_order_release);
    return true;
  }
  bool open() const { return open_.load(std::memory_order_acquire); }

protected:
  void next() { turn_ = turn_ + 1 == lanes_.size() ? 0 : turn_ + 1; }

  std::vector<Lane> lanes_;
  std::size_t turn_ = 0;

private:
  std::mutex attaching_;
  std::size_t attached_ = 0;
  std::atomic<bool> open_ = false;
};

struct Leaving : LaneEnd { // a frame that leaves by a lane, if it is busy
  bool busy = false;
  FrameHeader head{};
  Note note{};
  const std::byte *data = nullptr;
  std::size_t bytes = 0, noted = 0, sent = 0; // of head, note and data together
  std::uint64_t ordinal = 0;
};

struct Arriving : LaneEnd { // a frame that comes by a lane
  std::vector<std::byte> ahead = std::vector<std::byte>(read_ahead); // read, but not yet asked for
  std::size_t first = 0, end = 0;
  bool headed = false;  // `head` is there, and sound
  bool strange = false; // but of another call than is expected
  FrameHeader head{};
  std::size_t noted = 0, filled = 0;
  std::uint32_t crc = 0;
};

class Outlet : public Lanes<Leaving> {
public:
  // Takes a frame if the lane whose turn it is has none; it leaves as `pump` is called. The
  // payload must stay where it is until then. `note` rides along, if there is one.
  bool offer(const Mark &mark, const Note *note, const std::byte *data, std::size_t bytes,
             std::uint64_t ordinal);
  // Moves what can be moved; lost when the other end is gone.
  Io pump();
  bool idle() const;
  // The lowest ordinal of a frame that has not left entirely, or `next` if all have.
  std::uint64_t left(std::uint64_t next) const;
  // Says that nothing more will come, and by what verdict, if there is one.
  void leave(std::uint64_t verdict);
  // Says that what was sent last is all there will be of it; false if the lane is busy. It
  // leaves as a frame does.
  bool cut();
  void interests(std::vector<pollfd> &into) const;

private:
  bool say(std::uint16_t flag, std::uint64_t word);
  static Io pump(Leaving &lane);
};

class Inlet : public Lanes<Arriving> {
public:
  // Takes in what has come of the next frame, to `into`; done when it is there and sound.
  // To be called again with the same until then.
  Io take(const Mark &mark, std::byte *into, std::size_t bytes);
  // The same for one of a size that is not known before, up to `room` bytes.
  Io take_any(std::byte *into, std::size_t room, std::size_t *bytes);
  // What the other end said last that it was called with.
  const Note &note() const { return note_; }
  // When it has left: by what verdict, or 0.
  std::uint64_t verdict() const { return lanes_[turn_].head.fingerprint; }
  void interests(std::vector<pollfd> &into);

private:
  Io header(Arriving &lane, std::size_t room);
  Io payload(Arriving &lane, std::byte *into);
  static Io fill(Arriving &lane);
  static Io read(Arriving &lane, std::byte *into, std::size_t bytes, std::size_t *count);
  static std::size_t drain(Arriving &lane, void *into, std::size_t bytes);

  Note note_{};
};

} // namespace unisono

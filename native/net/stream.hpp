// One direction of the data path between two ranks of different hosts.
//
// A message is cut into frames (frame.hpp) of `frame_bytes`, which are sent over one or
// more wires (wire.hpp), the lanes, in turn. So the lanes share a message, and the receiver
// knows which lane the next frame comes from. Only the frame being sent is held: bytes go
// from the caller's memory to the wire, and from the wire to their destination, as far as
// that is possible without waiting. A frame is accepted if its checksum is right.
//
// Lanes are attached by other threads than those that transfer data, which use none before
// all are attached. Lanes are independent: several threads may use one each, by its number
// (the functions that take a lane), while the owner of the stream uses none of these.

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

enum class Io { done, blocked, lost, corrupt, mismatch, closed, truncated };

// Identifies a frame: its call, piece and message.
struct FrameId {
  std::uint64_t call = 0;
  std::uint64_t fingerprint = 0;
  std::uint32_t piece = 0;
  std::uint32_t message = 0;
};

// What a lane has on either side.
struct LaneEnd {
  std::unique_ptr<Wire> wire; // null until it is attached
  Seal seal{Key{}, 0};
};

// The lanes of a stream on one side, and whose turn it is. It is open when all are
// attached.
template <class Lane> class Lanes {
public:
  Lanes() = default;
  Lanes(const Lanes &) = delete;
  Lanes &operator=(const Lanes &) = delete;

  // False if the peer has named impossible lanes; then the caller keeps the wire. While
  // some are missing, a lane that is attached again replaces the one before, which its
  // client has abandoned; once all are attached, none is replaced.
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
  // Once it is open: the number of lanes, and the lane of the frame after `frames` others.
  std::size_t num_lanes() const { return lanes_.size(); }
  std::size_t lane_after(std::size_t frames) const {
    return (turn_ + frames) % lanes_.size();
  }
  // So many frames have been transferred by the lanes themselves.
  void skip(std::size_t frames) { turn_ = lane_after(frames); }
  void turn_to(std::size_t lane) { turn_ = lane; }

protected:
  void next() { turn_ = turn_ + 1 == lanes_.size() ? 0 : turn_ + 1; }

  std::vector<Lane> lanes_;
  std::size_t turn_ = 0;

private:
  std::mutex attaching_;
  std::size_t attached_ = 0;
  std::atomic<bool> open_ = false;
};

struct SendLane : LaneEnd { // a lane, and the frame that it sends, if busy
  bool busy = false;
  FrameHeader head{};
  Note note{};
  const std::byte *data = nullptr;
  std::size_t bytes = 0, note_bytes = 0, sent = 0; // of head, note and data together
  std::uint64_t ordinal = 0;
};

struct ReceiveLane : LaneEnd { // a lane, and the frame that it receives
  std::vector<std::byte> read_buffer =
      std::vector<std::byte>(read_ahead); // read, but not consumed
  std::size_t first = 0, end = 0;
  bool has_header = false; // `head` is complete and valid
  bool mismatched = false; // but of another call than expected
  FrameHeader head{};
  Note note{};
  bool noted = false; // `note` is complete, and the stream does not have it
  std::size_t note_bytes = 0, filled = 0;
  std::uint32_t crc = 0;
};

class SendStream : public Lanes<SendLane> {
public:
  // Accepts a frame if the lane whose turn it is has none; it is sent by calls of `flush`.
  // The payload must stay valid until then. `note` is sent along, if given.
  bool offer(const FrameId &frame_id, const Note *note, const std::byte *data,
             std::size_t bytes, std::uint64_t ordinal);
  // Sends what can be sent; lost when the connection has ended.
  Io flush();
  // The same for one lane, which must be free for `offer_on`. The caller counts the frames
  // (`skip`).
  void offer_on(std::size_t lane, const FrameId &frame_id, const Note *note,
                const std::byte *data, std::size_t bytes);
  bool busy(std::size_t lane) const { return lanes_[lane].busy; }
  Io flush(std::size_t lane) { return flush(lanes_[lane]); }
  void poll_fds(std::size_t lane, std::vector<pollfd> &into) const {
    lanes_[lane].wire->await_send(into);
  }
  bool idle() const;
  // The lowest ordinal of a frame that is not sent in full, or `next` if all are.
  std::uint64_t first_unsent(std::uint64_t next) const;
  // Sends that nothing more will follow, and the failure, if there is one.
  void send_close(std::uint64_t failure);
  // Sends that the last message is incomplete and will remain so; false if the lane is
  // busy.
  bool send_truncated();
  void poll_fds(std::vector<pollfd> &into) const;

private:
  bool send_control(std::uint16_t flag, std::uint64_t word);
  static void fill(SendLane &lane, const FrameId &frame_id, const Note *note,
                   const std::byte *data, std::size_t bytes, std::uint64_t ordinal);
  static Io flush(SendLane &lane);
};

class ReceiveStream : public Lanes<ReceiveLane> {
public:
  // Receives what has arrived of the next frame into `into`; done when it is complete and
  // valid. Until then it is called again with the same arguments.
  Io take(const FrameId &frame_id, std::byte *into, std::size_t bytes);
  // The same for the next frame of one lane. The caller counts the frames (`skip`), and
  // calls `collect_notes` when no other thread uses a lane.
  Io take_on(std::size_t lane, const FrameId &frame_id, std::byte *into, std::size_t bytes);
  void poll_fds(std::size_t lane, std::vector<pollfd> &into);
  void collect_notes();
  // The same for a frame of unknown size, up to `room` bytes.
  Io take_any(std::byte *into, std::size_t room, std::size_t *bytes);
  // The last call that the other side has described.
  const Note &note() const { return note_; }
  // After a close: the failure that was sent, or 0.
  std::uint64_t failure() const { return lanes_[turn_].head.fingerprint; }
  void poll_fds(std::vector<pollfd> &into);

private:
  Io counted(Io result);
  static Io take(ReceiveLane &lane, const FrameId &frame_id, std::byte *into,
                 std::size_t bytes);
  static Io header(ReceiveLane &lane, std::size_t room);
  static Io payload(ReceiveLane &lane, std::byte *into);
  static Io read_more(ReceiveLane &lane);
  static Io read(ReceiveLane &lane, std::byte *into, std::size_t bytes, std::size_t *count);
  static std::size_t take_buffered(ReceiveLane &lane, void *into, std::size_t bytes);

  Note note_{};
};

} // namespace unisono

// One direction of the data path between two ranks of different hosts.
//
// A message is cut into frames (frame.hpp) of `frame_bytes`, which are sent over one or
// more wires (wire.hpp), the lanes. So the lanes share a message. Only the frame being sent
// is held: bytes go from the caller's memory to the wire, and from the wire to their
// destination, as far as that is possible without waiting. A frame is accepted if its
// checksum is right.
//
// Which lane a frame takes: the lanes take turns, and the receiver knows which lane the next
// frame comes from. Where lanes may be of different speed (the label of the stream says so),
// a frame takes a *free* lane, one that has sent its last frame, and only the one that is
// expected to deliver it first: what waits in its wire and the frame, at the rate that is
// measured while the lane is in use. So each lane carries what it can, and frames arrive
// about in their order. A wire accepts no more than it sends in some milliseconds
// (Wire::limit_unsent). A slow lane gets smaller frames, which take as long as those of the
// fastest: while a lane waits for the frame of another, its receiver reads nothing from it,
// the kernel acknowledges less, and its sender stops. Each frame has its place in the
// stream in its header. The receiver reads a header ahead on every lane, and takes the frame
// whose place is next; what else has come waits in the wires.
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
              const Key &key, std::uint32_t epoch, bool takes_free_lane = false) {
    std::lock_guard lock(attaching_);
    const bool others = !lanes_.empty() && (lanes_.size() != lanes ||
                                            takes_free_lane_ != takes_free_lane);
    if (open() || others || lanes > most_lanes || lane >= lanes)
      return false;
    lanes_.resize(lanes);
    takes_free_lane_ = takes_free_lane;
    attached_ += lanes_[lane].wire == nullptr;
    lanes_[lane].wire = std::move(wire);
    lanes_[lane].seal = Seal(key, epoch);
    if (attached_ == lanes)
      open_.store(true, std::memory_order_release);
    return true;
  }
  bool open() const { return open_.load(std::memory_order_acquire); }
  // Once it is open: the number of lanes, whether a frame takes a free one or they take
  // turns, and then the lane of the frame after `frames` others.
  std::size_t num_lanes() const { return lanes_.size(); }
  bool takes_free_lane() const { return takes_free_lane_; }
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
  std::uint32_t place_ = 0; // of the next frame, if frames take free lanes
  bool takes_free_lane_ = false;

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
  std::int64_t looked = 0; // when it was last asked whether its wire has failed
  // If frames take free lanes: what it is expected to deliver in a second while it is never
  // empty, 0 if that is not known, and what was measured last; what was queued in its wire
  // when that was last looked at; and since when it is measured, or 0, how much was queued
  // then, and how much was accepted since. If it is empty while others are not, `since` is
  // negative: since when it is.
  bool measured = false;
  double rate = 0, measured_rate = 0;
  std::size_t queued = 0, queued_since = 0, accepted_since = 0;
  std::int64_t since = 0;
  std::int64_t chosen = 0; // when a frame was given to it last
};

struct ReceiveLane : LaneEnd { // a lane, and the frame that it receives
  std::vector<std::byte> read_buffer =
      std::vector<std::byte>(read_ahead); // read, but not consumed
  std::size_t first = 0, end = 0;
  bool ended = false;      // the other side has closed it, and all was read
  bool broken = false;     // by an error
  bool has_header = false; // `head` is complete and valid
  bool compared = false;   // with what is expected
  bool mismatched = false; // of another call than expected
  FrameHeader head{};
  Note note{};
  bool noted = false; // `note` is complete, and the stream does not have it
  std::size_t note_bytes = 0, filled = 0;
  std::uint32_t crc = 0;
};

class SendStream : public Lanes<SendLane> {
public:
  // Accepts a frame if the lane that it would take has none; it is sent by calls of `flush`.
  // The payload must stay valid until then. `note` is sent along, if given. Where frames take
  // free lanes, a frame may be smaller than what was offered: `bytes` is then its size, and
  // the rest is offered next.
  bool offer(const FrameId &frame_id, const Note *note, const std::byte *data,
             std::size_t &bytes, std::uint64_t ordinal);
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
  // Sends that nothing more will follow, and the failure, if there is one; if a lane is busy,
  // only that, by the end of its wire.
  void send_close(std::uint64_t failure);
  // Ends the wires behind what was sent. Another thread may be using them.
  void finish_sending();
  // Sends that the last message is incomplete and will remain so; false if the lane is
  // busy.
  bool send_truncated();
  void poll_fds(std::vector<pollfd> &into) const;

private:
  bool send_control(std::uint16_t flag, std::uint64_t word);
  bool find_lane(std::size_t bytes);
  bool some_failed();
  static bool failed(SendLane &lane, std::int64_t now);
  std::size_t frame_on(const SendLane &lane, std::size_t bytes) const;
  static double seconds_for(const SendLane &lane, std::size_t bytes);
  static void at_least(SendLane &lane, double rate);
  static void expect_more(SendLane &lane, std::int64_t now);
  static void measure(SendLane &lane, std::int64_t now);
  static void fill(SendLane &lane, const FrameId &frame_id, const Note *note,
                   const std::byte *data, std::size_t bytes, std::uint64_t ordinal,
                   std::uint32_t place);
  static Io flush(SendLane &lane);

  bool lost_ = false;
};

class ReceiveStream : public Lanes<ReceiveLane> {
public:
  // Receives what has arrived of the next frame into `into`; done when it is complete and
  // valid. Until then it is called again with the same arguments. Where frames take free
  // lanes, it may have been sent as several smaller ones.
  Io take(const FrameId &frame_id, std::byte *into, std::size_t bytes);
  // The same for the next frame of one lane. The caller counts the frames (`skip`), and
  // calls `collect_notes` when no other thread uses a lane.
  Io take_on(std::size_t lane, const FrameId &frame_id, std::byte *into, std::size_t bytes);
  void poll_fds(std::size_t lane, std::vector<pollfd> &into);
  void collect_notes();
  // The same for a frame of unknown size, up to `room` bytes.
  Io take_any(std::byte *into, std::size_t room, std::size_t *bytes);
  // Closes all lanes, so that the sender learns that nothing more is received. Nothing else
  // is called afterwards.
  void reject();
  // The last call that the other side has described.
  const Note &note() const { return note_; }
  // After a close: the failure that was sent, or 0.
  std::uint64_t failure() const { return lanes_[turn_].head.fingerprint; }
  void poll_fds(std::vector<pollfd> &into);

private:
  Io find_lane(std::size_t room);
  Io counted(Io result);
  static Io take(ReceiveLane &lane, const FrameId &frame_id, std::byte *into,
                 std::size_t bytes, bool may_be_less = false);
  static Io header(ReceiveLane &lane, std::size_t room);
  static Io ending(ReceiveLane &lane);
  static Io payload(ReceiveLane &lane, std::byte *into);
  static Io read_more(ReceiveLane &lane);
  static Io read(ReceiveLane &lane, std::byte *into, std::size_t bytes, std::size_t *count);
  static std::size_t take_buffered(ReceiveLane &lane, void *into, std::size_t bytes);

  Note note_{};
  std::size_t taken_ = 0; // of the bytes of `take`, by frames before the next
};

} // namespace unisono

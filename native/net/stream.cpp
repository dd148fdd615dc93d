#include "net/stream.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include <sys/uio.h>

#include "net/socket_error.hpp"
#include "support/clock.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

enum Flag : std::uint16_t { has_note = 1, closing = 2, truncated = 4 };
constexpr std::uint16_t all_flags = has_note | closing | truncated;

// How fast a lane is: measured over so many nanoseconds and bytes.
constexpr std::int64_t shortest_measurement = 10'000'000;
constexpr std::size_t least_measured = 64 << 10;
constexpr double more_if_empty = 1.0 / 16, more_if_long_empty = 0.5;
constexpr double most_expected = 8; // times as fast as it was measured last
// A lane that was not chosen for so long, while others are in use, is tried again.
constexpr std::int64_t longest_unused = 100'000'000;
// What waits in a wire to be sent: at first so much, then what it sends in this time.
constexpr double unsent_s = 12e-3;
constexpr std::size_t initial_unsent = 256 << 10;
constexpr std::size_t least_unsent = 64 << 10, most_unsent = 4 << 20;
// How long a frame takes on its lane at most, but for the smallest.
constexpr double frame_s = 3e-3;
constexpr std::size_t least_frame = 16 << 10;
// How often lanes are looked at while they cannot go on.
constexpr std::int64_t look_again = 50'000'000;

} // namespace

bool SendStream::offer(const FrameId &frame_id, const Note *note, const std::byte *data,
                   std::size_t &bytes, std::uint64_t ordinal) {
  if (!find_lane(bytes))
    return false;
  bytes = frame_on(lanes_[turn_], bytes);
  if (takes_free_lane_ && bytes > 0)
    bytes = std::max<std::size_t>(allowed("stream.part", bytes), 1);
  if (takes_free_lane_)
    lanes_[turn_].chosen = now_ns();
  fill(lanes_[turn_], frame_id, note, data, bytes, ordinal, takes_free_lane_ ? place_++ : 0);
  if (!takes_free_lane_)
    next();
  return true;
}

// Whether there is a lane for the next frame: the one whose turn it is, if it is free, or
// the one that is expected to deliver it first, if it is free. A lane whose rate is not known,
// or was not seen for long, comes first, so that it is measured; while it is busy, it does not
// count.
bool SendStream::find_lane(std::size_t bytes) {
  if (!takes_free_lane_)
    return !lanes_[turn_].busy;
  const std::int64_t now = now_ns();
  bool found = false, some_queued = false;
  double least = 0;
  for (SendLane &lane : lanes_) {
    lane.queued = lane.wire->queued();
    some_queued = some_queued || lane.queued > 0;
    if (lane.queued == 0 && !lane.busy && lane.rate > 0)
      at_least(lane, double(lane.bytes) * 1e9 / double(now - lane.chosen + 1));
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    SendLane &lane = lanes_[i];
    if (lane.queued > 0)
      measure(lane, now);
    if (lane.busy && lane.rate == 0)
      continue;
    const bool unused = some_queued && lane.queued == 0 && !lane.busy &&
                        now - lane.chosen > longest_unused;
    const double seconds = unused ? 0 : seconds_for(lane, frame_on(lane, bytes));
    if (found && seconds >= least)
      continue;
    turn_ = i;
    found = true;
    least = seconds;
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (lanes_[i].queued == 0 && some_queued && i != turn_)
      expect_more(lanes_[i], now);
    else if (lanes_[i].queued == 0)
      measure(lanes_[i], now);
  return found && !lanes_[turn_].busy;
}

// Until a lane has delivered what it has accepted, and so many bytes more; 0 if that is not
// known.
double SendStream::seconds_for(const SendLane &lane, std::size_t bytes) {
  if (lane.rate == 0)
    return 0;
  const std::size_t frame = sizeof lane.head + lane.note_bytes + lane.bytes;
  return double(lane.queued + (lane.busy ? frame - lane.sent : 0) + bytes) / lane.rate;
}

// How much of `bytes` a frame of this lane carries: what takes no longer than a frame on the
// fastest lane, and not long at all. No small rest is left over.
std::size_t SendStream::frame_on(const SendLane &lane, std::size_t bytes) const {
  if (!takes_free_lane_ || lane.rate == 0)
    return bytes;
  double fastest = lane.rate;
  for (const SendLane &other : lanes_)
    fastest = std::max(fastest, other.rate);
  const double most = std::min(double(frame_bytes) * lane.rate / fastest, lane.rate * frame_s);
  const std::size_t size = std::max(least_frame, std::size_t(most));
  return bytes <= size + size / 2 ? bytes : size;
}

// A lane that has delivered a frame in some time is no slower than that. But a single frame
// may have passed a queue that more of them would fill.
void SendStream::at_least(SendLane &lane, double rate) {
  rate = std::min(rate, lane.measured_rate * most_expected);
  lane.measured_rate = std::max(lane.measured_rate, rate);
  lane.rate = std::max(lane.rate, rate);
}

// A lane that is empty while others are not, and is not chosen, gets too little, and cannot be
// measured. It may have been measured while its receiver read nothing.
void SendStream::expect_more(SendLane &lane, std::int64_t now) {
  double more = 0;
  if (lane.since > 0)
    more = more_if_empty;
  else if (lane.since < 0 && now + lane.since > shortest_measurement)
    more = more_if_long_empty;
  else if (lane.since < 0)
    return;
  lane.rate = std::min(lane.rate * (1 + more), lane.measured_rate * most_expected);
  lane.since = -now;
}

// A lane delivers what it has accepted, less what is still queued. As long as something is,
// it delivers as fast as it can.
void SendStream::measure(SendLane &lane, std::int64_t now) {
  if (!lane.measured)
    lane.wire->limit_unsent(initial_unsent);
  lane.measured = true;
  if (lane.queued == 0)
    lane.since = 0;
  else if (lane.since <= 0)
    lane.since = now;
  else {
    const std::size_t in = lane.queued_since + lane.accepted_since;
    const std::size_t delivered = in - std::min(in, lane.queued);
    const std::int64_t took = now - lane.since;
    if (took < shortest_measurement || delivered < least_measured)
      return;
    const double rate = double(delivered) * 1e9 / double(took);
    lane.measured_rate = rate;
    lane.rate = lane.rate == 0 ? rate : (lane.rate + rate) / 2;
    lane.wire->limit_unsent(std::clamp(std::size_t(lane.rate * unsent_s), least_unsent,
                                       most_unsent));
    lane.since = now;
  }
  lane.queued_since = lane.queued;
  lane.accepted_since = 0;
}

void SendStream::offer_on(std::size_t lane, const FrameId &frame_id, const Note *note,
                          const std::byte *data, std::size_t bytes) {
  fill(lanes_[lane], frame_id, note, data, bytes, 0, 0);
}

void SendStream::fill(SendLane &lane, const FrameId &frame_id, const Note *note,
                      const std::byte *data, std::size_t bytes, std::uint64_t ordinal,
                      std::uint32_t place) {
  lane.head = {};
  lane.head.place = place;
  lane.head.call = frame_id.call;
  lane.head.fingerprint = frame_id.fingerprint;
  lane.head.piece = frame_id.piece;
  lane.head.message = frame_id.message;
  lane.note_bytes = note != nullptr ? sizeof *note : 0;
  if (note != nullptr) {
    lane.note = *note;
    lane.head.flags = Flag::has_note;
  }
  lane.head.length = std::uint32_t(lane.note_bytes + bytes);
  lane.data = data;
  lane.bytes = bytes;
  lane.sent = 0;
  lane.ordinal = ordinal;
  lane.busy = true;
  lane.seal.seal(lane.head, crc32c(data, bytes, crc32c(&lane.note, lane.note_bytes)));
}

Io SendStream::flush() {
  if (!open())
    return Io::blocked;
  for (SendLane &lane : lanes_)
    lost_ = lost_ || (lane.busy && flush(lane) == Io::lost);
  if (!lost_ && idle())
    return Io::done;
  if (!lost_ && !some_failed())
    return Io::blocked;
  lost_ = true;
  // The receiver would await over the others what a lane has lost: it learns of it.
  if (takes_free_lane_)
    finish_sending();
  return Io::lost;
}

// Whether a lane has failed, also if it sends nothing now. What it has accepted may be lost,
// and the receiver, which waits for that, reads nothing from the lanes that are busy.
bool SendStream::some_failed() {
  const std::int64_t now = now_ns();
  return std::any_of(lanes_.begin(), lanes_.end(),
                     [now](SendLane &lane) { return failed(lane, now); });
}

bool SendStream::failed(SendLane &lane, std::int64_t now) {
  if (now - lane.looked < look_again)
    return false;
  lane.looked = now;
  return lane.wire->failed();
}

Io SendStream::flush(SendLane &lane) {
  const std::size_t total = sizeof lane.head + lane.note_bytes + lane.bytes;
  while (lane.sent < total) {
    iovec parts[3] = {{&lane.head, sizeof lane.head},
                      {&lane.note, lane.note_bytes},
                      {const_cast<std::byte *>(lane.data), lane.bytes}};
    std::size_t skip = lane.sent, first = 0;
    for (; first < 2 && skip >= parts[first].iov_len; ++first)
      skip -= parts[first].iov_len;
    parts[first].iov_base = static_cast<std::byte *>(parts[first].iov_base) + skip;
    parts[first].iov_len -= skip;
    failpoint("stream.send");
    const ssize_t count = lane.wire->send(parts + first, 3 - first);
    if (count < 0 && !passes(socket_error(errno)))
      return Io::lost;
    if (count < 0)
      return failed(lane, now_ns()) ? Io::lost : Io::blocked;
    lane.sent += std::size_t(count);
    lane.accepted_since += std::size_t(count);
  }
  lane.busy = false;
  return Io::done;
}

bool SendStream::idle() const {
  return !open() || std::none_of(lanes_.begin(), lanes_.end(),
                                 [](const SendLane &l) { return l.busy; });
}

std::uint64_t SendStream::first_unsent(std::uint64_t next) const {
  if (!open())
    return next;
  for (const SendLane &lane : lanes_)
    if (lane.busy)
      next = std::min(next, lane.ordinal);
  return next;
}

// A frame without a payload; false while the frame before it is not sent in full.
bool SendStream::send_control(std::uint16_t flag, std::uint64_t word) {
  if (!open())
    return false;
  if (!find_lane(0)) { // of free lanes any will do: nothing waits for a faster one
    const auto is_free = [](const SendLane &lane) { return !lane.busy; };
    const auto at = std::find_if(lanes_.begin(), lanes_.end(), is_free);
    if (!takes_free_lane_ || at == lanes_.end())
      return false;
    turn_ = std::size_t(at - lanes_.begin());
  }
  SendLane &lane = lanes_[turn_];
  lane.head = {};
  lane.head.place = takes_free_lane_ ? place_++ : 0;
  lane.head.flags = flag;
  lane.head.fingerprint = word;
  lane.note_bytes = lane.bytes = lane.sent = 0;
  lane.ordinal = ~std::uint64_t(0);
  lane.seal.seal(lane.head, 0u);
  lane.busy = true;
  return true;
}

void SendStream::send_close(std::uint64_t failure) {
  if (send_control(Flag::closing, failure))
    (void)flush(lanes_[turn_]);
  finish_sending();
}

void SendStream::finish_sending() {
  if (open())
    for (SendLane &lane : lanes_)
      lane.wire->finish_sending();
}

bool SendStream::send_truncated() { return send_control(Flag::truncated, 0); }

void SendStream::poll_fds(std::vector<pollfd> &into) const {
  if (!open())
    return;
  for (const SendLane &lane : lanes_)
    if (lane.busy)
      lane.wire->await_send(into);
}

Io ReceiveStream::take(const FrameId &frame_id, std::byte *into, std::size_t bytes) {
  for (;;) {
    if (const Io found = find_lane(frame_bytes); found != Io::done)
      return found;
    ReceiveLane &lane = lanes_[turn_];
    const Io io = counted(
        take(lane, frame_id, into + taken_, bytes - taken_, takes_free_lane_));
    if (io != Io::done)
      return io;
    taken_ += lane.head.length - lane.note_bytes;
    if (taken_ == bytes)
      break;
  }
  taken_ = 0;
  return Io::done;
}

Io ReceiveStream::take_on(std::size_t lane, const FrameId &frame_id, std::byte *into,
                          std::size_t bytes) {
  return take(lanes_[lane], frame_id, into, bytes);
}

Io ReceiveStream::take(ReceiveLane &lane, const FrameId &frame_id, std::byte *into,
                       std::size_t bytes, bool may_be_less) {
  if (!lane.has_header) {
    const Io found = header(lane, frame_bytes);
    if (found != Io::done)
      return found;
  }
  if (!lane.compared) {
    if (const Io ends = ending(lane); ends != Io::done)
      return ends;
    const FrameHeader &head = lane.head;
    const std::size_t length = head.length - lane.note_bytes;
    const bool fits = length == bytes || (may_be_less && length > 0 && length < bytes);
    lane.compared = true;
    lane.mismatched = head.call != frame_id.call ||
                      head.fingerprint != frame_id.fingerprint ||
                      head.piece != frame_id.piece || head.message != frame_id.message ||
                      !fits;
    // The frame is of another call: its note follows, if it is the call's first frame.
    if (lane.mismatched && lane.note_bytes == 0)
      return Io::mismatch;
  }
  return payload(lane, into);
}

Io ReceiveStream::take_any(std::byte *into, std::size_t room, std::size_t *bytes) {
  if (const Io found = find_lane(room); found != Io::done)
    return found;
  ReceiveLane &lane = lanes_[turn_];
  if (!lane.has_header) {
    const Io found = header(lane, room);
    if (found != Io::done)
      return found;
  }
  if (const Io ends = ending(lane); ends != Io::done)
    return counted(ends);
  lane.mismatched = false;
  *bytes = lane.head.length - lane.note_bytes;
  return counted(payload(lane, into));
}

void ReceiveStream::reject() {
  for (ReceiveLane &lane : lanes_)
    lane.wire->abort();
}

// Done if the next frame is to be read from the lane whose turn it is. Where frames take a
// free lane, it is the one whose header has the next place. A lane that has ended is no
// failure while the frame may come over another: the lanes of a stream are closed one after
// the other.
Io ReceiveStream::find_lane(std::size_t room) {
  if (!open() || !takes_free_lane_)
    return open() ? Io::done : Io::blocked;
  bool failed = false, may_come = false, some_ended = false;
  for (std::size_t i = 0; i < lanes_.size(); ++i) {
    ReceiveLane &lane = lanes_[i];
    if (!lane.has_header && !lane.ended && !lane.broken) {
      const Io found = header(lane, room);
      if (found == Io::corrupt)
        return found;
      may_come = may_come || found == Io::blocked;
    }
    failed = failed || lane.broken;
    some_ended = some_ended || lane.ended;
    if (lane.has_header && lane.head.place == place_) {
      turn_ = i;
      return Io::done;
    }
  }
  if (failed || !may_come)
    return failed || some_ended ? Io::lost : Io::corrupt;
  return Io::blocked;
}

// After a frame of the lane whose turn it is, or a part of one.
Io ReceiveStream::counted(Io result) {
  if (ReceiveLane &lane = lanes_[turn_]; lane.noted) {
    note_ = lane.note;
    lane.noted = false;
  }
  if (takes_free_lane_)
    place_ += result == Io::done || result == Io::truncated;
  else if (result == Io::done)
    next();
  return result;
}

// Of several notes the latest call's counts.
void ReceiveStream::collect_notes() {
  for (ReceiveLane &lane : lanes_) {
    if (lane.noted && lane.note.seq >= note_.seq)
      note_ = lane.note;
    lane.noted = false;
  }
}

Io ReceiveStream::header(ReceiveLane &lane, std::size_t room) {
  while (lane.end - lane.first < sizeof lane.head) {
    const Io found = read_more(lane);
    if (found != Io::done)
      return found;
  }
  (void)take_buffered(lane, &lane.head, sizeof lane.head);
  const FrameHeader &head = lane.head;
  lane.note_bytes = (head.flags & Flag::has_note) != 0 ? sizeof(Note) : 0;
  if (lane.seal.check(head, room + lane.note_bytes) != Flaw::none ||
      head.kind != FrameKind::data || head.length < lane.note_bytes ||
      (head.flags & ~all_flags) != 0)
    return Io::corrupt;
  lane.filled = 0;
  lane.crc = 0;
  lane.has_header = true;
  lane.compared = false;
  return Io::done;
}

// Done if the frame whose header was read has a payload; otherwise what it says.
Io ReceiveStream::ending(ReceiveLane &lane) {
  if ((lane.head.flags & (Flag::truncated | Flag::closing)) == 0)
    return Io::done;
  lane.has_header = false;
  return (lane.head.flags & Flag::truncated) != 0 ? Io::truncated : Io::closed;
}

Io ReceiveStream::payload(ReceiveLane &lane, std::byte *into) {
  const std::size_t total = lane.head.length;
  while (lane.filled < lane.note_bytes) { // the note is small, and goes through the buffer
    if (lane.first == lane.end) {
      const Io found = read_more(lane);
      if (found != Io::done)
        return found;
    }
    auto *to = reinterpret_cast<std::byte *>(&lane.note) + lane.filled;
    const std::size_t count = take_buffered(lane, to, lane.note_bytes - lane.filled);
    lane.crc = crc32c(to, count, lane.crc);
    lane.filled += count;
    lane.noted = lane.filled == lane.note_bytes;
  }
  if (lane.mismatched)
    return Io::mismatch;
  while (lane.filled < total) {
    std::byte *to = into + (lane.filled - lane.note_bytes);
    std::size_t count = take_buffered(lane, to, total - lane.filled);
    if (count == 0 && total - lane.filled < read_ahead / 2) {
      const Io found = read_more(lane); // a small rest: read more along with it
      if (found != Io::done)
        return found;
      continue;
    }
    if (count == 0) {
      const Io found = read(lane, to, total - lane.filled, &count);
      if (found != Io::done)
        return found;
    }
    lane.crc = crc32c(to, count, lane.crc);
    lane.filled += count;
  }
  lane.has_header = false;
  return lane.crc == lane.head.crc ? Io::done : Io::corrupt;
}

// Reads what has arrived into the buffer.
Io ReceiveStream::read_more(ReceiveLane &lane) {
  if (lane.first == lane.end)
    lane.first = lane.end = 0;
  if (lane.first > 0) {
    std::memmove(lane.read_buffer.data(), lane.read_buffer.data() + lane.first,
                 lane.end - lane.first);
    lane.end -= lane.first;
    lane.first = 0;
  }
  std::size_t count = 0;
  const Io found = read(lane, lane.read_buffer.data() + lane.end,
                        lane.read_buffer.size() - lane.end, &count);
  lane.end += count;
  return found;
}

Io ReceiveStream::read(ReceiveLane &lane, std::byte *into, std::size_t bytes,
                       std::size_t *count) {
  failpoint("stream.receive");
  bytes = allowed("stream.receive", bytes);
  if (bytes == 0) // a test wants nothing to have come
    return Io::blocked;
  const ssize_t got = lane.wire->receive(into, bytes);
  if (got > 0) {
    *count = std::size_t(got);
    return Io::done;
  }
  if (got == 0) {
    lane.ended = true;
    return Io::lost;
  }
  const SocketError why = socket_error(errno);
  if (why == SocketError::forged)
    return Io::corrupt;
  lane.broken = !passes(why); // the kernel tells it once
  return lane.broken ? Io::lost : Io::blocked;
}

std::size_t ReceiveStream::take_buffered(ReceiveLane &lane, void *into, std::size_t bytes) {
  const std::size_t count = std::min(bytes, lane.end - lane.first);
  if (count > 0)
    std::memcpy(into, lane.read_buffer.data() + lane.first, count);
  lane.first += count;
  return count;
}

void ReceiveStream::poll_fds(std::vector<pollfd> &into) {
  if (!open())
    return;
  const ReceiveLane &last = lanes_[turn_];
  const bool in_frame = last.has_header && last.head.place == place_;
  if (!takes_free_lane_ || in_frame) {
    poll_fds(turn_, into);
    return;
  }
  for (std::size_t i = 0; i < lanes_.size(); ++i)
    if (!lanes_[i].has_header && !lanes_[i].ended && !lanes_[i].broken)
      poll_fds(i, into);
}

void ReceiveStream::poll_fds(std::size_t lane, std::vector<pollfd> &into) {
  const ReceiveLane &of = lanes_[lane];
  of.wire->await_receive(of.has_header ? of.head.length - of.filled : 1, into);
}

} // namespace unisono

#include "net/stream.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include <sys/uio.h>

#include "net/socket_error.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

enum Flag : std::uint16_t { has_note = 1, closing = 2, truncated = 4 };
constexpr std::uint16_t all_flags = has_note | closing | truncated;

} // namespace

bool SendStream::offer(const FrameId &frame_id, const Note *note, const std::byte *data,
                   std::size_t bytes, std::uint64_t ordinal) {
  SendLane &lane = lanes_[turn_];
  if (lane.busy)
    return false;
  fill(lane, frame_id, note, data, bytes, ordinal);
  next();
  return true;
}

void SendStream::offer_on(std::size_t lane, const FrameId &frame_id, const Note *note,
                          const std::byte *data, std::size_t bytes) {
  fill(lanes_[lane], frame_id, note, data, bytes, 0);
}

void SendStream::fill(SendLane &lane, const FrameId &frame_id, const Note *note,
                      const std::byte *data, std::size_t bytes, std::uint64_t ordinal) {
  lane.head = {};
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
    if (lane.busy && flush(lane) == Io::lost)
      return Io::lost;
  return idle() ? Io::done : Io::blocked;
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
    if (count < 0)
      return passes(socket_error(errno)) ? Io::blocked : Io::lost;
    lane.sent += std::size_t(count);
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
  if (!open() || lanes_[turn_].busy)
    return false;
  SendLane &lane = lanes_[turn_];
  lane.head = {};
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
  return open() ? counted(take(lanes_[turn_], frame_id, into, bytes)) : Io::blocked;
}

Io ReceiveStream::take_on(std::size_t lane, const FrameId &frame_id, std::byte *into,
                          std::size_t bytes) {
  return take(lanes_[lane], frame_id, into, bytes);
}

Io ReceiveStream::take(ReceiveLane &lane, const FrameId &frame_id, std::byte *into,
                       std::size_t bytes) {
  if (!lane.has_header) {
    const Io found = header(lane, frame_bytes);
    if (found != Io::done)
      return found;
    const FrameHeader &head = lane.head;
    lane.mismatched = head.call != frame_id.call ||
                      head.fingerprint != frame_id.fingerprint ||
                      head.piece != frame_id.piece || head.message != frame_id.message ||
                      head.length != lane.note_bytes + bytes;
    // The frame is of another call: its note follows, if it is the call's first frame.
    if (lane.mismatched && lane.note_bytes == 0)
      return Io::mismatch;
  }
  return payload(lane, into);
}

Io ReceiveStream::take_any(std::byte *into, std::size_t room, std::size_t *bytes) {
  if (!open())
    return Io::blocked;
  ReceiveLane &lane = lanes_[turn_];
  if (!lane.has_header) {
    const Io found = header(lane, room);
    if (found != Io::done)
      return found;
    lane.mismatched = false;
  }
  *bytes = lane.head.length - lane.note_bytes;
  return counted(payload(lane, into));
}

// After a frame of the lane whose turn it is, or a part of one.
Io ReceiveStream::counted(Io result) {
  if (ReceiveLane &lane = lanes_[turn_]; lane.noted) {
    note_ = lane.note;
    lane.noted = false;
  }
  if (result == Io::done)
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
  if ((head.flags & Flag::truncated) != 0)
    return Io::truncated;
  if ((head.flags & Flag::closing) != 0)
    return Io::closed;
  lane.filled = 0;
  lane.crc = 0;
  lane.has_header = true;
  return Io::done;
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
  if (got == 0)
    return Io::lost;
  const SocketError why = socket_error(errno);
  if (why == SocketError::forged)
    return Io::corrupt;
  return passes(why) ? Io::blocked : Io::lost;
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
  poll_fds(turn_, into);
}

void ReceiveStream::poll_fds(std::size_t lane, std::vector<pollfd> &into) {
  const ReceiveLane &of = lanes_[lane];
  of.wire->await_receive(of.has_header ? of.head.length - of.filled : 1, into);
}

} // namespace unisono

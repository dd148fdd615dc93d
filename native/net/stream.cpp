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

enum Flag : std::uint16_t { noted = 1, leaving = 2, cut_off = 4 };
constexpr std::uint16_t all_flags = noted | leaving | cut_off;

} // namespace

bool Outlet::offer(const Mark &mark, const Note *note, const std::byte *data,
                   std::size_t bytes, std::uint64_t ordinal) {
  Leaving &lane = lanes_[turn_];
  if (lane.busy)
    return false;
  lane.head = {};
  lane.head.call = mark.call;
  lane.head.fingerprint = mark.fingerprint;
  lane.head.piece = mark.piece;
  lane.head.message = mark.message;
  lane.noted = note != nullptr ? sizeof *note : 0;
  if (note != nullptr) {
    lane.note = *note;
    lane.head.flags = Flag::noted;
  }
  lane.head.length = std::uint32_t(lane.noted + bytes);
  lane.data = data;
  lane.bytes = bytes;
  lane.sent = 0;
  lane.ordinal = ordinal;
  lane.busy = true;
  lane.seal.seal(lane.head, crc32c(data, bytes, crc32c(&lane.note, lane.noted)));
  next();
  return true;
}

Io Outlet::pump() {
  if (!open())
    return Io::blocked;
  for (Leaving &lane : lanes_)
    if (lane.busy && pump(lane) == Io::lost)
      return Io::lost;
  return idle() ? Io::done : Io::blocked;
}

Io Outlet::pump(Leaving &lane) {
  const std::size_t total = sizeof lane.head + lane.noted + lane.bytes;
  while (lane.sent < total) {
    iovec parts[3] = {{&lane.head, sizeof lane.head},
                      {&lane.note, lane.noted},
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

bool Outlet::idle() const {
  return !open() || std::none_of(lanes_.begin(), lanes_.end(), [](const Leaving &l) { return l.busy; });
}

std::uint64_t Outlet::left(std::uint64_t next) const {
  if (!open())
    return next;
  for (const Leaving &lane : lanes_)
    if (lane.busy)
      next = std::min(next, lane.ordinal);
  return next;
}

// A frame without a payload. Behind one that has not left entirely nothing can be said.
bool Outlet::say(std::uint16_t flag, std::uint64_t word) {
  if (!open() || lanes_[turn_].busy)
    return false;
  Leaving &lane = lanes_[turn_];
  lane.head = {};
  lane.head.flags = flag;
  lane.head.fingerprint = word;
  lane.noted = lane.bytes = lane.sent = 0;
  lane.ordinal = ~std::uint64_t(0);
  lane.seal.seal(lane.head, 0u);
  lane.busy = true;
  return true;
}

void Outlet::leave(std::uint64_t verdict) {
  if (say(Flag::leaving, verdict))
    (void)pump(lanes_[turn_]);
}

bool Outlet::cut() { return say(Flag::cut_off, 0); }

void Outlet::interests(std::vector<pollfd> &into) const {
  if (!open())
    return;
  for (const Leaving &lane : lanes_)
    if (lane.busy)
      lane.wire->await_send(into);
}

Io Inlet::take(const Mark &mark, std::byte *into, std::size_t bytes) {
  if (!open())
    return Io::blocked;
  Arriving &lane = lanes_[turn_];
  if (!lane.headed) {
    const Io found = header(lane, frame_bytes);
    if (found != Io::done)
      return found;
    const FrameHeader &head = lane.head;
    lane.strange = head.call != mark.call || head.fingerprint != mark.fingerprint ||
                   head.piece != mark.piece || head.message != mark.message ||
                   head.length != lane.noted + bytes;
    // Another call than ours: what it was comes next, if this is its first frame.
    if (lane.strange && lane.noted == 0)
      return Io::mismatch;
  }
  return payload(lane, into);
}

Io Inlet::take_any(std::byte *into, std::size_t room, std::size_t *bytes) {
  if (!open())
    return Io::blocked;
  Arriving &lane = lanes_[turn_];
  if (!lane.headed) {
    const Io found = header(lane, room);
    if (found != Io::done)
      return found;
    lane.strange = false;
  }
  *bytes = lane.head.length - lane.noted;
  return payload(lane, into);
}

Io Inlet::header(Arriving &lane, std::size_t room) {
  while (lane.end - lane.first < sizeof lane.head) {
    const Io found = fill(lane);
    if (found != Io::done)
      return found;
  }
  (void)drain(lane, &lane.head, sizeof lane.head);
  const FrameHeader &head = lane.head;
  lane.noted = (head.flags & Flag::noted) != 0 ? sizeof(Note) : 0;
  if (lane.seal.check(head, room + lane.noted) != Flaw::none ||
      head.kind != FrameKind::data || head.length < lane.noted ||
      (head.flags & ~all_flags) != 0)
    return Io::corrupt;
  if ((head.flags & Flag::cut_off) != 0)
    return Io::cut;
  if ((head.flags & Flag::leaving) != 0)
    return Io::left;
  lane.filled = 0;
  lane.crc = 0;
  lane.headed = true;
  return Io::done;
}

Io Inlet::payload(Arriving &lane, std::byte *into) {
  const std::size_t total = lane.head.length;
  while (lane.filled < lane.noted) { // the note is small, and read ahead
    if (lane.first == lane.end) {
      const Io found = fill(lane);
      if (found != Io::done)
        return found;
    }
    auto *to = reinterpret_cast<std::byte *>(&note_) + lane.filled;
    const std::size_t count = drain(lane, to, lane.noted - lane.filled);
    lane.crc = crc32c(to, count, lane.crc);
    lane.filled += count;
  }
  if (lane.strange)
    return Io::mismatch;
  while (lane.filled < total) {
    std::byte *to = into + (lane.filled - lane.noted);
    std::size_t count = drain(lane, to, total - lane.filled);
    if (count == 0 && total - lane.filled < read_ahead / 2) {
      const Io found = fill(lane); // a small rest: take more with it
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
  lane.headed = false;
  next();
  return lane.crc == lane.head.crc ? Io::done : Io::corrupt;
}

// Reads what has come into the room ahead.
Io Inlet::fill(Arriving &lane) {
  if (lane.first == lane.end)
    lane.first = lane.end = 0;
  if (lane.first > 0) {
    std::memmove(lane.ahead.data(), lane.ahead.data() + lane.first, lane.end - lane.first);
    lane.end -= lane.first;
    lane.first = 0;
  }
  std::size_t count = 0;
  const Io found =
      read(lane, lane.ahead.data() + lane.end, lane.ahead.size() - lane.end, &count);
  lane.end += count;
  return found;
}

Io Inlet::read(Arriving &lane, std::byte *into, std::size_t bytes, std::size_t *count) {
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

std::size_t Inlet::drain(Arriving &lane, void *into, std::size_t bytes) {
  const std::size_t count = std::min(bytes, lane.end - lane.first);
  if (count > 0)
    std::memcpy(into, lane.ahead.data() + lane.first, count);
  lane.first += count;
  return count;
}

void Inlet::interests(std::vector<pollfd> &into) {
  if (!open())
    return;
  const Arriving &lane = lanes_[turn_];
  lane.wire->await_receive(lane.headed ? lane.head.length - lane.filled : 1, into);
}

} // namespace unisono

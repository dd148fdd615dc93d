#include "net/lifeline_peer.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include "net/socket_error.hpp"
#include "support/clock.hpp"
#include "support/fail.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

// Socket options that detect a dead peer early. If a socket or a kernel does not support
// one, the heartbeats detect it a little later.
void prepare(int fd, std::int64_t limit) {
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  const auto set = [fd](int option, int value) {
    ::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
  };
  set(TCP_NODELAY, 1);
  set(TCP_USER_TIMEOUT, int(std::min<std::int64_t>(limit / 1'000'000, 1 << 30)));
  // The connection must survive a partition that ends shortly before the limit: so lost
  // segments are sent again after at most a second, without exponential backoff.
#if defined(TCP_THIN_LINEAR_TIMEOUTS)
  set(TCP_THIN_LINEAR_TIMEOUTS, 1);
#endif
  constexpr int rto_max_ms = 44; // TCP_RTO_MAX_MS: Linux 6.15, not in headers yet
  set(rto_max_ms, 1000);
}

} // namespace

Lifeline::Peer::Peer(std::size_t r, Connection &c, const Options &options, int e)
    : rank(r), wire(std::move(c.wire)), heard(now_ns()),
      reader(Seal(c.incoming, options.epoch), place), epoll(e),
      outgoing(c.outgoing, options.epoch) {
  prepare(wire->descriptor(), options.limit);
  epoll_event ready{EPOLLIN, {}};
  ready.data.ptr = this;
  if (::epoll_ctl(epoll, EPOLL_CTL_ADD, wire->descriptor(), &ready) != 0)
    fail("a lifeline: waiting for a connection");
}

ssize_t Lifeline::Peer::recv(void *into, std::size_t bytes) {
  bytes = allowed("life.receive", bytes);
  if (wire->has_pending()) // no event would be raised again for these
    bytes = std::max<std::size_t>(bytes, 1);
  if (bytes == 0) { // as if no data had arrived
    errno = EAGAIN;
    return -1;
  }
  return wire->receive(into, bytes);
}

ssize_t Lifeline::Peer::discard_input() {
  std::byte bytes[4096];
  ssize_t got = 1;
  for (int i = 0; i < reads_at_once && got > 0; ++i)
    got = recv(bytes, sizeof bytes);
  return got;
}

bool Lifeline::Peer::put(const Event &event) {
  if (begin > 0) {
    std::memmove(out.data(), out.data() + begin, queued());
    end = queued();
    begin = 0;
  }
  if (out.size() - end < frame_bytes)
    return false;
  FrameHeader header;
  header.kind = FrameKind::control;
  header.length = std::uint32_t(event.bytes());
  outgoing.seal(header, &event);
  std::memcpy(out.data() + end, &header, sizeof header);
  std::memcpy(out.data() + end + sizeof header, &event, header.length);
  end += sizeof header + header.length;
  return true;
}

// The reader finds the error, after what the peer may have sent before: perhaps that it
// leaves.
void Lifeline::Peer::write() {
  while (queued() > 0) {
    const ssize_t sent = send();
    if (sent >= 0) {
      begin += std::size_t(sent);
    } else if (errno == EINTR) {
      continue;
    } else if (passes(socket_error(errno))) {
      return want_writable(true);
    } else {
      error = errno;
      begin = end;
    }
  }
  want_writable(false);
}

ssize_t Lifeline::Peer::send() {
  const iovec part{out.data() + begin, queued()};
  return wire->send(&part, 1);
}

void Lifeline::Peer::want_writable(bool wanted) {
  if (wants_writable == wanted)
    return;
  wants_writable = wanted;
  epoll_event ready{EPOLLIN | (wanted ? std::uint32_t(EPOLLOUT) : 0), {}};
  ready.data.ptr = this;
  ::epoll_ctl(epoll, EPOLL_CTL_MOD, wire->descriptor(), &ready);
}

void Lifeline::Peer::drop() {
  if (!open())
    return;
  // Explicitly, since a duplicate of the descriptor may still be open somewhere.
  ::epoll_ctl(epoll, EPOLL_CTL_DEL, wire->descriptor(), nullptr);
  close_wire();
}

void Lifeline::Peer::close_wire() {
  open_.store(false, std::memory_order_relaxed);
  wire->close();
}

} // namespace unisono

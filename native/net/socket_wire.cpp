#include "net/socket_wire.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/socket_error.hpp"
#include "support/clock.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

constexpr std::size_t most_awaited = 64 << 10;
constexpr std::size_t most_parts = 8;
constexpr std::int64_t longest_pause = 1'000'000'000;

// A copy of the parts with at most `bytes` in all, for tests that cut what is sent.
std::size_t shortened(const iovec *parts, std::size_t count, std::size_t bytes, iovec *into) {
  count = std::min(count, most_parts);
  for (std::size_t i = 0; i < count; ++i) {
    into[i] = {parts[i].iov_base, std::min(parts[i].iov_len, bytes)};
    bytes -= into[i].iov_len;
  }
  return count;
}

} // namespace

SocketWire::SocketWire(int fd) : fd_(fd) {
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
}

ssize_t SocketWire::send(const iovec *parts, std::size_t count) {
  iovec fewer[most_parts];
  const std::size_t most = allowed("socket.send", SIZE_MAX);
  if (most == 0) {
    errno = EAGAIN;
    return -1;
  }
  if (most < SIZE_MAX) [[unlikely]] {
    count = shortened(parts, count, most, fewer);
    parts = fewer;
  }
  msghdr message{};
  message.msg_iov = const_cast<iovec *>(parts);
  message.msg_iovlen = count;
  return ::sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

ssize_t SocketWire::receive(void *into, std::size_t bytes) {
  return ::recv(fd_, into, bytes, MSG_DONTWAIT);
}

void SocketWire::await_send(std::vector<pollfd> &into) {
  into.push_back({fd_, POLLOUT, 0});
}

// Of many bytes a good part is waited for: to be woken for every packet takes longer than to
// copy it.
void SocketWire::await_receive(std::size_t bytes, std::vector<pollfd> &into) {
  const int low_water = int(std::clamp(bytes, std::size_t(1), most_awaited));
  if (low_water != low_water_) {
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVLOWAT, &low_water, sizeof low_water);
    low_water_ = low_water;
  }
  into.push_back({fd_, POLLIN, 0});
}

void SocketWire::limit_unsent(std::size_t bytes) {
  const int most = int(bytes);
  ::setsockopt(fd_, IPPROTO_TCP, TCP_NOTSENT_LOWAT, &most, sizeof most);
}

std::size_t SocketWire::queued() const {
  int bytes = 0;
  return ::ioctl(fd_, SIOCOUTQ, &bytes) == 0 && bytes > 0 ? std::size_t(bytes) : 0;
}

bool SocketWire::peer_closed() const {
  char byte;
  const ssize_t got = ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && !passes(socket_error(errno)));
}

// A poll leaves the error for the call that reports it.
bool SocketWire::failed() const {
  pollfd socket{fd_, 0, 0};
  return ::poll(&socket, 1, 0) == 1 || is_silent();
}

// Whether the peer's host has acknowledged nothing for as long as the keepalive allows, though
// something was queued all the time. The kernel sends no keepalive then; and its own limit,
// TCP_USER_TIMEOUT, would end the connection of a receiver that reads nothing, but is well.
bool SocketWire::is_silent() const {
  const std::int64_t now = now_ns();
  if (queued() == 0 || now - watched_last_ > longest_pause)
    watched_since_ = now;
  watched_last_ = now;
  const auto option = [this](int name) {
    int value = 0;
    socklen_t size = sizeof value;
    return ::getsockopt(fd_, IPPROTO_TCP, name, &value, &size) == 0 ? std::int64_t(value) : 0;
  };
  const std::int64_t seconds =
      option(TCP_KEEPIDLE) + option(TCP_KEEPINTVL) * option(TCP_KEEPCNT);
  if (seconds == 0 || now - watched_since_ < seconds * 1'000'000'000)
    return false;
  tcp_info info{};
  socklen_t size = sizeof info;
  return ::getsockopt(fd_, IPPROTO_TCP, TCP_INFO, &info, &size) == 0 &&
         std::int64_t(info.tcpi_last_ack_recv) >= seconds * 1000;
}

void SocketWire::finish_sending() { ::shutdown(fd_, SHUT_WR); }

// To connect a TCP socket to no address resets its connection; a Unix socket refuses that.
void SocketWire::abort() {
  const sockaddr nowhere{};
  if (fd_ >= 0 && ::connect(fd_, &nowhere, sizeof nowhere) != 0)
    ::shutdown(fd_, SHUT_RDWR);
  close();
}

void SocketWire::close() {
  if (const int was = std::exchange(fd_, -1); was >= 0)
    ::close(was);
}

} // namespace unisono

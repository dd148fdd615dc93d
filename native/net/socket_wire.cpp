#include "net/socket_wire.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <utility>

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/socket_error.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

constexpr std::size_t most_awaited = 64 << 10;
constexpr std::size_t most_parts = 8;

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

bool SocketWire::peer_closed() const {
  char byte;
  const ssize_t got = ::recv(fd_, &byte, 1, MSG_PEEK | MSG_DONTWAIT);
  return got == 0 || (got < 0 && !passes(socket_error(errno)));
}

void SocketWire::finish_sending() { ::shutdown(fd_, SHUT_WR); }

void SocketWire::close() {
  if (const int was = std::exchange(fd_, -1); was >= 0)
    ::close(was);
}

} // namespace unisono

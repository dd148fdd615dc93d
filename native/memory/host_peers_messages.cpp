// How segments are announced and taken in. Nothing here waits: what cannot be sent stays in
// a queue, and what cannot be taken in stays in the socket, until the thread tries again.

#include "memory/host_peers_messages.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "support/clock.hpp"

namespace unisono {

namespace {

constexpr std::int64_t shortage_ns = 1'000'000'000; // a shorter one is nobody's failure

// Room for one descriptor beside a message.
struct Packet {
  explicit Packet(void *message, std::size_t bytes) : part{message, bytes} {
    head.msg_iov = &part;
    head.msg_iovlen = 1;
  }
  Packet(const Packet &) = delete;
  Packet &operator=(const Packet &) = delete;
  void make_room() {
    head.msg_control = space;
    head.msg_controllen = sizeof space;
  }
  void put(int fd) {
    make_room();
    cmsghdr *rights = CMSG_FIRSTHDR(&head);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof fd);
    std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
  }
  int take() {
    int fd = -1;
    cmsghdr *rights = CMSG_FIRSTHDR(&head);
    if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS)
      std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
    return fd;
  }

  iovec part;
  msghdr head{};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
};

} // namespace

// Tells every other rank, now or as soon as it can be told.
void Mesh::announce(const Announcement &announcement) {
  bool waits = false;
  std::lock_guard lock(sending_); // nobody closes the descriptors meanwhile
  for (std::size_t r = 0; r < sockets_.size(); ++r)
    waits = (sockets_[r] >= 0 && !tell(r, announcement)) || waits;
  if (waits)
    wake();
}

// Whether nothing of it has to wait. Who is gone needs it no more.
bool Mesh::tell(std::size_t rank, const Announcement &announcement) {
  Outgoing &to = outgoing_[rank];
  if (to.gone || dead(rank))
    return true;
  const bool ends = announcement.message.kind == Message::drop;
  if (ends && to.unsent.erase(announcement.message.id) != 0)
    return true; // it never knew of it
  if (to.unsent.empty() && send(rank, announcement) == Sent::yes)
    return true;
  if (!to.gone)
    to.unsent.emplace(announcement.message.id, announcement);
  return to.gone;
}

Mesh::Sent Mesh::send(std::size_t rank, const Announcement &announcement) {
  Message message = announcement.message;
  Packet packet(&message, sizeof message);
  if (announcement.fd)
    packet.put(announcement.fd->number());
  while (::sendmsg(sockets_[rank], &packet.head, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
    switch (errno) {
    case EINTR:
      continue;
    case EAGAIN: // it is behind
      return Sent::full;
    case ETOOMANYREFS: // more descriptors of this user are on their way than it may have
    case ENOBUFS:
    case ENOMEM:
      outgoing_[rank].later = true;
      return Sent::later;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
      outgoing_[rank].gone = true;
      return Sent::gone;
    default: // nothing that should happen: said aloud, and whoever waits here fails by it
      std::fprintf(stderr, "unisono: announcing shared memory to rank %zu: %s\n", rank,
                   std::strerror(errno));
      refused_.store(true, std::memory_order_release);
      outgoing_[rank].gone = true;
      return Sent::gone;
    }
  return Sent::yes;
}

// Sends what a rank has still to be told, as far as it goes.
Mesh::Sent Mesh::flush(std::size_t rank) {
  std::lock_guard lock(sending_);
  Outgoing &to = outgoing_[rank];
  to.later = false;
  if (to.gone || dead(rank))
    to.unsent.clear();
  for (auto next = to.unsent.begin(); next != to.unsent.end();) {
    const Sent sent = send(rank, next->second);
    if (sent == Sent::gone)
      to.unsent.clear();
    if (sent != Sent::yes)
      return sent;
    next = to.unsent.erase(next);
  }
  return Sent::yes;
}

bool Mesh::unsent() {
  std::lock_guard lock(sending_);
  return std::any_of(outgoing_.begin(), outgoing_.end(),
                     [](const Outgoing &to) { return !to.unsent.empty(); });
}

// Takes in one message; false when the socket has ended. One that cannot be taken in for want
// of memory or descriptors is left where it is: so it is looked at first, and read after.
bool Mesh::receive(std::size_t from) {
  Message message{};
  Packet packet(&message, sizeof message);
  packet.make_room();
  const ssize_t got =
      ::recvmsg(sockets_[from], &packet.head, MSG_CMSG_CLOEXEC | MSG_PEEK | MSG_DONTWAIT);
  // A reset, because it did not read all that it was sent, is told once and before what it
  // has sent itself: that is still there.
  if (got < 0)
    return errno == EAGAIN || errno == EINTR || errno == ECONNRESET;
  if (got == 0)
    return false;
  std::shared_ptr<Memory> memory;
  if (message.kind == Message::segment) {
    const Descriptor fd(packet.take());
    try {
      if (fd.number() >= 0)
        memory = Memory::from(fd.number(), message.bytes);
    } catch (const std::exception &) { // memory stays null
    }
  }
  note_shortage(from, message.kind == Message::segment && !memory);
  if (short_[from])
    return true;
  while (::recv(sockets_[from], &message, sizeof message, MSG_DONTWAIT) < 0 && errno == EINTR)
    ;
  take_in(from, message, std::move(memory));
  return true;
}

void Mesh::take_in(std::size_t from, const Message &message, std::shared_ptr<Memory> memory) {
  std::lock_guard lock(hub_->mutex);
  auto &known = hub_->segments[from];
  if (message.kind == Message::segment) {
    known[message.id] = std::move(memory);
    return;
  }
  const auto found = known.find(message.id);
  if (found == known.end())
    return;
  memory = std::move(found->second); // unmapped after the lock is released
  known.erase(found);
}

// Takes in all that has come from one rank; false when its socket has ended.
bool Mesh::drain(std::size_t from) {
  short_[from] = false;
  for (pollfd more{sockets_[from], POLLIN, 0}; ::poll(&more, 1, 0) > 0 && !short_[from];)
    if (!receive(from))
      return false;
  return true;
}

void Mesh::note_shortage(std::size_t rank, bool is_short) {
  short_[rank] = is_short;
  if (std::find(short_.begin(), short_.end(), true) == short_.end())
    short_since_.store(0, std::memory_order_release);
  else if (short_since_.load(std::memory_order_relaxed) == 0)
    short_since_.store(now_ns(), std::memory_order_release);
}

bool Mesh::starved() const {
  const std::int64_t since = short_since_.load(std::memory_order_acquire);
  return refused_.load(std::memory_order_acquire) ||
         (since != 0 && now_ns() - since >= shortage_ns);
}

} // namespace unisono

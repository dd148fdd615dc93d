// Announcing and receiving segments. Nothing here waits: what cannot be sent is queued, and
// what cannot be received stays in the socket, until the thread tries again.

#include "memory/host_peers_messages.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <numeric>

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "support/clock.hpp"

namespace unisono {

namespace {

constexpr std::int64_t shortage_ns = 1'000'000'000; // a shorter shortage is not a failure

// A message with space for one descriptor.
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

// Announces a segment to every other rank, now or as soon as possible.
void HostPeers::announce(const Announcement &announcement) {
  std::vector<std::size_t> all(sockets_.size());
  std::iota(all.begin(), all.end(), std::size_t(0));
  announce(announcement, all);
}

void HostPeers::announce(const Announcement &announcement,
                         const std::vector<std::size_t> &ranks) {
  bool waits = false;
  std::lock_guard lock(sending_); // keeps the descriptors open meanwhile
  for (const std::size_t r : ranks)
    waits = (sockets_[r] >= 0 && !announce_to(r, announcement)) || waits;
  if (waits)
    wake();
}

// Whether nothing has to wait. A rank that is gone needs no announcement.
bool HostPeers::announce_to(std::size_t rank, const Announcement &announcement) {
  Outgoing &to = outgoing_[rank];
  if (to.gone || dead(rank))
    return true;
  const bool ends = announcement.message.kind == Message::drop;
  if (ends && to.unsent.erase(announcement.message.id) != 0)
    return true; // it was never announced to that rank
  if (to.unsent.empty() && send(rank, announcement) == Sent::yes)
    return true;
  if (!to.gone)
    to.unsent.emplace(announcement.message.id, announcement);
  return to.gone;
}

HostPeers::Sent HostPeers::send(std::size_t rank, const Announcement &announcement) {
  Message message = announcement.message;
  Packet packet(&message, sizeof message);
  if (announcement.fd)
    packet.put(announcement.fd->number());
  while (::sendmsg(sockets_[rank], &packet.head, MSG_NOSIGNAL | MSG_DONTWAIT) < 0)
    switch (errno) {
    case EINTR:
      continue;
    case EAGAIN: // the rank is behind
      return Sent::full;
    case ETOOMANYREFS: // more descriptors of this user are in flight than allowed
    case ENOBUFS:
    case ENOMEM:
      outgoing_[rank].later = true;
      return Sent::later;
    case EPIPE:
    case ECONNRESET:
    case ENOTCONN:
      outgoing_[rank].gone = true;
      return Sent::gone;
    default: // unexpected: reported, and calls that wait for it fail
      std::fprintf(stderr, "unisono: announcing shared memory to rank %zu: %s\n", rank,
                   std::strerror(errno));
      refused_.store(true, std::memory_order_release);
      outgoing_[rank].gone = true;
      return Sent::gone;
    }
  return Sent::yes;
}

// Sends the queued announcements to a rank, as far as possible.
HostPeers::Sent HostPeers::flush(std::size_t rank) {
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

bool HostPeers::unsent() {
  std::lock_guard lock(sending_);
  return std::any_of(outgoing_.begin(), outgoing_.end(),
                     [](const Outgoing &to) { return !to.unsent.empty(); });
}

// Receives one message; false when the socket has ended. A message that cannot be received
// for lack of memory or descriptors stays in the socket: so it is peeked at first.
bool HostPeers::receive(std::size_t from) {
  Message message{};
  Packet packet(&message, sizeof message);
  packet.make_room();
  const ssize_t got =
      ::recvmsg(sockets_[from], &packet.head, MSG_CMSG_CLOEXEC | MSG_PEEK | MSG_DONTWAIT);
  // A reset, sent because the peer did not read everything, is reported once and before the
  // data that the peer has sent, which can still be read.
  if (got < 0)
    return errno == EAGAIN || errno == EINTR || errno == ECONNRESET;
  if (got == 0)
    return false;
  std::shared_ptr<Memory> memory;
  std::shared_ptr<Descriptor> fd;
  if (const int given = packet.take(); given >= 0)
    try {
      fd = Descriptor::owning(given);
      if (message.kind == Message::segment)
        memory = Memory::from(given, message.bytes);
    } catch (const std::exception &) { // what could not be made stays null
    }
  note_shortage(from, (message.kind == Message::segment && !memory) ||
                          (message.kind == Message::descriptor && !fd));
  if (short_[from])
    return true;
  while (::recv(sockets_[from], &message, sizeof message, MSG_DONTWAIT) < 0 && errno == EINTR)
    ;
  store(from, message, std::move(memory), std::move(fd));
  return true;
}

void HostPeers::store(std::size_t from, const Message &message,
                      std::shared_ptr<Memory> memory, std::shared_ptr<Descriptor> fd) {
  std::lock_guard lock(table_->mutex);
  auto &known = table_->segments[from];
  auto &descriptors = table_->descriptors[from];
  if (message.kind == Message::segment) {
    known[message.id] = std::move(memory);
    return;
  }
  if (message.kind == Message::descriptor) {
    descriptors[message.id] = std::move(fd);
    return;
  }
  descriptors.erase(message.id);
  const auto found = known.find(message.id);
  if (found == known.end())
    return;
  memory = std::move(found->second); // unmapped after the lock is released
  known.erase(found);
}

// Receives all messages of one rank; false when its socket has ended.
bool HostPeers::drain(std::size_t from) {
  short_[from] = false;
  for (pollfd more{sockets_[from], POLLIN, 0}; ::poll(&more, 1, 0) > 0 && !short_[from];)
    if (!receive(from))
      return false;
  return true;
}

void HostPeers::note_shortage(std::size_t rank, bool is_short) {
  short_[rank] = is_short;
  if (std::find(short_.begin(), short_.end(), true) == short_.end())
    short_since_.store(0, std::memory_order_release);
  else if (short_since_.load(std::memory_order_relaxed) == 0)
    short_since_.store(now_ns(), std::memory_order_release);
}

bool HostPeers::out_of_resources() const {
  const std::int64_t since = short_since_.load(std::memory_order_acquire);
  return refused_.load(std::memory_order_acquire) ||
         (since != 0 && now_ns() - since >= shortage_ns);
}

} // namespace unisono

#include "mesh.hpp"

#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include "fail.hpp"
#include "failpoint.hpp"
#include "no_signals.hpp"

namespace unisono {

namespace {

std::atomic<std::uint64_t> forks = 0;

int open_pidfd(int pid) {
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
}

std::byte *map(int fd, std::size_t bytes) {
  void *at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, 0);
  if (at == MAP_FAILED)
    fail("mapping shared memory");
  return static_cast<std::byte *>(at);
}

} // namespace

std::uint64_t fork_epoch() {
  static const int registered = ::pthread_atfork(
      nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  (void)registered;
  return forks.load(std::memory_order_relaxed);
}

std::shared_ptr<Memory> Memory::make(std::size_t bytes, int *fd) {
  failpoint("segment.make");
  const int made = ::memfd_create("unisono", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0)
    fail("making shared memory");
  try {
    // All of it now: a page that cannot be had later would be a SIGBUS.
    int error;
    do
      error = ::posix_fallocate(made, 0, static_cast<off_t>(bytes));
    while (error == EINTR);
    if (error != 0) {
      errno = error;
      fail("reserving shared memory");
    }
    if (::fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
      fail("sealing shared memory");
    auto memory = std::shared_ptr<Memory>(new Memory(map(made, bytes), bytes));
    *fd = made;
    return memory;
  } catch (...) {
    ::close(made);
    throw;
  }
}

std::shared_ptr<Memory> Memory::from(int fd, std::size_t bytes) {
  return std::shared_ptr<Memory>(new Memory(map(fd, bytes), bytes));
}

Memory::~Memory() { ::munmap(data_, size_); }

// What travels over the sockets: a segment with its descriptor, or the end of one.
struct Mesh::Message {
  enum Kind : std::uint64_t { segment = 1, drop = 2 };
  std::uint64_t kind;
  std::uint64_t id;
  std::uint64_t bytes;
};

Mesh::Mesh(std::size_t rank, std::shared_ptr<Hub> hub)
    : rank_(rank), hub_(std::move(hub)), fork_epoch_(unisono::fork_epoch()) {}

Mesh::Mesh(std::size_t rank, std::vector<int> sockets, std::vector<int> pids)
    : rank_(rank), hub_(std::make_shared<Hub>(sockets.size())),
      sockets_(std::move(sockets)), pids_(std::move(pids)),
      fork_epoch_(unisono::fork_epoch()) {
  for (std::size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r] >= 0)
      ::fcntl(sockets_[r], F_SETFL, ::fcntl(sockets_[r], F_GETFL) | O_NONBLOCK);
    pidfds_.push_back(r == rank_ || pids_[r] <= 0 ? -1 : open_pidfd(pids_[r]));
    // Gone before we could watch it; where pidfds are unknown, the socket's end tells.
    gone_.push_back(r != rank_ && pids_[r] > 0 && pidfds_.back() < 0 && errno == ESRCH);
  }
  stop_ = ::eventfd(0, EFD_CLOEXEC);
  if (stop_ < 0)
    fail("making an event descriptor");
  NoSignals while_it_begins;
  watcher_ = std::thread([this] { watch(); });
}

Mesh::~Mesh() { close(); }

bool Mesh::forked() const { return fork_epoch_ != unisono::fork_epoch(); }

void Mesh::close() {
  if (closed_.exchange(true))
    return;
  if (between_threads())
    return; // what it has lent or sent lives as long as the others
  if (forked()) {
    watcher_.detach(); // it belongs to the parent
  } else {
    const std::uint64_t one = 1;
    (void)!::write(stop_, &one, sizeof one);
    watcher_.join();
  }
  for (auto *fds : {&sockets_, &pidfds_})
    for (int &fd : *fds)
      if (fd >= 0)
        ::close(std::exchange(fd, -1));
  ::close(stop_);
  if (forked())
    return; // another thread of the parent may have held the lock
  std::lock_guard lock(hub_->mutex);
  for (auto &segments : hub_->segments)
    segments.clear();
}

std::uint64_t Mesh::create(std::size_t bytes) {
  int fd = -1;
  auto memory = Memory::make(bytes, &fd);
  std::uint64_t id;
  {
    std::lock_guard lock(own_mutex_);
    id = next_id_++;
    own_[reinterpret_cast<std::uintptr_t>(memory->data())] = {bytes, id};
    owns_.store(true, std::memory_order_relaxed);
  }
  {
    std::lock_guard lock(hub_->mutex);
    hub_->segments[rank_][id] = memory;
  }
  failpoint("segment.announce");
  announce({Message::segment, id, bytes}, fd);
  ::close(fd);
  return id;
}

std::shared_ptr<Memory> Mesh::find(std::size_t owner, std::uint64_t id) const {
  std::lock_guard lock(hub_->mutex);
  const auto &of = hub_->segments[owner];
  const auto found = of.find(id);
  return found == of.end() ? nullptr : found->second;
}

void Mesh::drop(std::uint64_t id) {
  if (closed_ || forked())
    return;
  std::shared_ptr<Memory> memory;
  {
    std::lock_guard lock(hub_->mutex);
    auto &mine = hub_->segments[rank_];
    const auto found = mine.find(id);
    if (found == mine.end())
      return;
    memory = std::move(found->second);
    mine.erase(found);
  }
  {
    std::lock_guard lock(own_mutex_);
    own_.erase(reinterpret_cast<std::uintptr_t>(memory->data()));
    owns_.store(!own_.empty(), std::memory_order_relaxed);
  }
  announce({Message::drop, id, 0}, -1);
}

std::optional<Lent> Mesh::locate(const void *data, std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (between_threads())
    return Lent{Lent::anywhere, at};
  if (!owns_.load(std::memory_order_relaxed))
    return std::nullopt;
  std::lock_guard lock(own_mutex_);
  auto after = own_.upper_bound(at);
  if (after == own_.begin())
    return std::nullopt;
  const auto &[start, segment] = *--after;
  if (at + bytes > start + segment.first)
    return std::nullopt;
  return Lent{segment.second, at - start};
}

Reach Mesh::resolve(std::size_t owner, Lent lent,
                    std::vector<std::shared_ptr<Memory>> &hold) const {
  if (lent.segment == Lent::anywhere || lent.segment == Lent::own)
    return {reinterpret_cast<std::byte *>(lent.offset),
            lent.segment == Lent::own ? pids_[owner] : 0};
  auto memory = find(owner, lent.segment);
  if (!memory || lent.offset > memory->size())
    return {};
  std::byte *at = memory->data() + lent.offset;
  hold.push_back(std::move(memory));
  return {at};
}

// Sends one message to every other rank; one that is gone needs it no more.
void Mesh::announce(const Message &message, int fd) {
  for (std::size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r] < 0)
      continue;
    iovec part{const_cast<Message *>(&message), sizeof message};
    alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
    msghdr packet{};
    packet.msg_iov = &part;
    packet.msg_iovlen = 1;
    if (fd >= 0) {
      packet.msg_control = space;
      packet.msg_controllen = sizeof space;
      cmsghdr *rights = CMSG_FIRSTHDR(&packet);
      rights->cmsg_level = SOL_SOCKET;
      rights->cmsg_type = SCM_RIGHTS;
      rights->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    while (::sendmsg(sockets_[r], &packet, MSG_NOSIGNAL) < 0) {
      if (errno == EAGAIN && !dead(r)) { // its watcher is behind
        pollfd writable{sockets_[r], POLLOUT, 0};
        ::poll(&writable, 1, 10);
      } else if (errno != EINTR) {
        break;
      }
    }
  }
}

// Takes in one message; false when the socket has ended.
bool Mesh::receive(std::size_t from) {
  Message message{};
  iovec part{&message, sizeof message};
  alignas(cmsghdr) char space[CMSG_SPACE(sizeof(int))] = {};
  msghdr packet{};
  packet.msg_iov = &part;
  packet.msg_iovlen = 1;
  packet.msg_control = space;
  packet.msg_controllen = sizeof space;
  const ssize_t got = ::recvmsg(sockets_[from], &packet, MSG_CMSG_CLOEXEC);
  // A reset, because it did not read all that it was sent, is told once and before what it
  // has sent itself: that is still there.
  if (got < 0)
    return errno == EAGAIN || errno == EINTR || errno == ECONNRESET;
  if (got == 0)
    return false;
  int fd = -1;
  cmsghdr *rights = CMSG_FIRSTHDR(&packet);
  if (rights != nullptr && rights->cmsg_type == SCM_RIGHTS)
    std::memcpy(&fd, CMSG_DATA(rights), sizeof fd);
  if (message.kind == Message::segment && fd < 0)
    starved_.store(true, std::memory_order_release);
  if (message.kind == Message::segment && fd >= 0) {
    std::shared_ptr<Memory> memory;
    try {
      memory = Memory::from(fd, message.bytes);
    } catch (const std::system_error &) {
      starved_.store(true, std::memory_order_release);
    }
    std::lock_guard lock(hub_->mutex);
    if (memory)
      hub_->segments[from][message.id] = std::move(memory);
  } else if (message.kind == Message::drop) {
    std::shared_ptr<Memory> last; // unmapped after the lock is released
    std::lock_guard lock(hub_->mutex);
    const auto found = hub_->segments[from].find(message.id);
    if (found != hub_->segments[from].end()) {
      last = std::move(found->second);
      hub_->segments[from].erase(found);
    }
  }
  if (fd >= 0)
    ::close(fd);
  return true;
}

// Takes in all that has come from one rank; false when its socket has ended.
bool Mesh::drain(std::size_t from) {
  for (pollfd more{sockets_[from], POLLIN, 0}; ::poll(&more, 1, 0) > 0;)
    if (!receive(from))
      return false;
  return true;
}

void Mesh::watch() {
  const std::size_t n = sockets_.size();
  for (std::size_t r = 0; r < n; ++r)
    if (gone_[r]) {
      drain(r);
      bury(r);
    }
  std::vector<pollfd> polled(2 * n + 1);
  for (std::size_t r = 0; r < n; ++r) {
    polled[2 * r] = {sockets_[r], POLLIN, 0};
    polled[2 * r + 1] = {pidfds_[r], POLLIN, 0};
  }
  polled[2 * n] = {stop_, POLLIN, 0};
  while (true) {
    if (::poll(polled.data(), polled.size(), -1) < 0 && errno != EINTR)
      return;
    if (polled[2 * n].revents != 0)
      return;
    for (std::size_t r = 0; r < n; ++r) {
      // What it sent before it died comes first, then the news of its death.
      const bool died = polled[2 * r + 1].revents != 0;
      const bool speaks = polled[2 * r].fd >= 0 && (died || polled[2 * r].revents != 0);
      const bool ended = speaks && !drain(r);
      if (ended)
        polled[2 * r].fd = -1;
      if (died) {
        polled[2 * r + 1].fd = -1;
        hub_->ended[r].store(true, std::memory_order_release);
      }
      if (ended || died)
        bury(r);
    }
  }
}

} // namespace unisono

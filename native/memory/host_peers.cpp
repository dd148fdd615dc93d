#include "memory/host_peers.hpp"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "memory/host_peers_messages.hpp"
#include "memory/shared_pages.hpp"
#include "support/fail.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

int open_pidfd(int pid) {
#if !defined(SYS_pidfd_open)
  constexpr long SYS_pidfd_open = 434; // Linux 5.3, on every architecture
#endif
  return static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
}

std::byte *map(int fd, std::size_t bytes, int flags) {
  void *at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | flags, fd, 0);
  if (at == MAP_FAILED)
    fail("mapping shared memory");
  return static_cast<std::byte *>(at);
}

// Reserves all pages now: a page that cannot be allocated later would be a SIGBUS.
void reserve(int fd, std::size_t bytes) {
  int error;
  do
    error = ::posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  while (error == EINTR);
  if (error != 0) {
    errno = error;
    fail("reserving shared memory");
  }
}

// The kernel queues messages until they are received. A stopped rank receives nothing, and
// descriptors in flight are limited per user: so only a few messages are queued for each.
void prepare(int socket) {
  constexpr int bytes = 4096; // about ten messages
  ::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &bytes, sizeof bytes);
  ::fcntl(socket, F_SETFL, ::fcntl(socket, F_GETFL) | O_NONBLOCK);
}

} // namespace

std::shared_ptr<Descriptor> Descriptor::owning(int fd) {
  try {
    return std::make_shared<Descriptor>(fd);
  } catch (const std::bad_alloc &) {
    ::close(fd);
    throw;
  }
}

Descriptor::~Descriptor() {
  if (fd_ >= 0)
    ::close(fd_);
}

std::shared_ptr<Memory> Memory::make(std::size_t bytes, std::shared_ptr<Descriptor> &fd) {
  failpoint("segment.make");
  const int made = ::memfd_create("unisono", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  if (made < 0)
    fail(errno == EMFILE || errno == ENFILE
             ? "making shared memory: all file descriptors are in use (ulimit -n)"
             : "making shared memory");
  fd = std::make_shared<Descriptor>(made);
  reserve(made, bytes);
  if (::fcntl(made, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    fail("sealing shared memory");
  return std::shared_ptr<Memory>(new Memory(map(made, bytes, MAP_POPULATE), bytes));
}

std::shared_ptr<Memory> Memory::from(int fd, std::size_t bytes) {
  return std::shared_ptr<Memory>(new Memory(map(fd, bytes, 0), bytes));
}

Memory::~Memory() { ::munmap(data_, size_); }

void Memory::populate() const {
#if !defined(MADV_POPULATE_WRITE)
  constexpr int MADV_POPULATE_WRITE = 23; // Linux 5.14
#endif
  // If the kernel does not support it, pages are mapped on first use.
  (void)::madvise(data_, size_, MADV_POPULATE_WRITE);
}

HostPeers::HostPeers(std::size_t rank, std::shared_ptr<PeerTable> table)
    : rank_(rank), table_(std::move(table)) {}

HostPeers::HostPeers(std::size_t rank, std::vector<int> sockets, std::vector<int> pids)
    : rank_(rank), table_(std::make_shared<PeerTable>(sockets.size())),
      sockets_(std::move(sockets)), pids_(std::move(pids)), outgoing_(sockets_.size()),
      short_(sockets_.size()) {
  for (std::size_t r = 0; r < sockets_.size(); ++r) {
    if (sockets_[r] >= 0)
      prepare(sockets_[r]);
    pidfds_.push_back(r == rank_ || pids_[r] <= 0 ? -1 : open_pidfd(pids_[r]));
    // It ended before this; without pidfds the end of the socket shows it.
    gone_at_start_.push_back(r != rank_ && pids_[r] > 0 && pidfds_.back() < 0 &&
                             errno == ESRCH);
  }
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (wake_ < 0) {
    const int why = errno;
    close_descriptors();
    errno = why;
    fail("watching the other ranks");
  }
  const auto no_fork = block_forks();
  register_fork_handler();
  watcher_.start("unisono-peers", [this] { watch(); });
}

HostPeers::~HostPeers() { end(false); }

void HostPeers::close() { end(true); }

void HostPeers::in_child() { close_descriptors(); }

void HostPeers::close_descriptors() {
  for (auto *fds : {&sockets_, &pidfds_})
    for (int &fd : *fds)
      if (fd >= 0)
        ::close(std::exchange(fd, -1));
  ::close(std::exchange(wake_, -1));
}

// With `flushes`, waits for a limited time until other ranks have received all
// announcements.
void HostPeers::end(bool flushes) {
  immediate_.store(!flushes, std::memory_order_relaxed);
  if (closed_.exchange(true))
    return;
  if (between_threads() || forked())
    return; // between threads, segments live as long as any rank uses them
  wake();
  watcher_.join();
  {
    const auto no_fork = block_forks();
    unregister_fork_handler();
    std::lock_guard lock(sending_);
    close_descriptors();
  }
  std::scoped_lock lock(dropped_later_mutex_, table_->mutex);
  dropped_later_.clear();
  for (auto &segments : table_->segments)
    segments.clear();
  for (auto &descriptors : table_->descriptors)
    descriptors.clear();
}

std::uint64_t HostPeers::create(std::size_t bytes) {
  if (forked())
    throw std::runtime_error("a forked child has no part in its parent's shared memory");
  drop_unwanted();
  std::shared_ptr<Descriptor> fd;
  auto memory = Memory::make(bytes, fd);
  std::uint64_t id;
  {
    std::lock_guard lock(own_mutex_);
    id = next_id_++;
  }
  remember(id, memory);
  failpoint("segment.announce");
  try {
    announce({{Message::segment, id, bytes}, std::move(fd)});
  } catch (...) {
    drop(id);
    throw;
  }
  return id;
}

void HostPeers::remember(std::uint64_t id, const std::shared_ptr<Memory> &memory) {
  {
    std::lock_guard lock(own_mutex_);
    own_[reinterpret_cast<std::uintptr_t>(memory->data())] = {memory->size(), id, nullptr};
    owns_.store(true, std::memory_order_relaxed);
  }
  std::lock_guard lock(table_->mutex);
  table_->segments[rank_][id] = memory;
}

std::shared_ptr<Memory> HostPeers::forget(std::uint64_t id) {
  std::shared_ptr<Memory> memory;
  {
    std::lock_guard lock(table_->mutex);
    auto &mine = table_->segments[rank_];
    const auto found = mine.find(id);
    if (found == mine.end())
      return nullptr;
    memory = std::move(found->second);
    mine.erase(found);
  }
  std::lock_guard lock(own_mutex_);
  own_.erase(reinterpret_cast<std::uintptr_t>(memory->data()));
  owns_.store(!own_.empty(), std::memory_order_relaxed);
  return memory;
}

std::shared_ptr<Memory> HostPeers::find(std::size_t owner, std::uint64_t id) const {
  if (forked())
    return nullptr; // another thread may have held the lock at the fork
  std::lock_guard lock(table_->mutex);
  const auto &of = table_->segments[owner];
  const auto found = of.find(id);
  return found == of.end() ? nullptr : found->second;
}

void HostPeers::drop(std::uint64_t id) noexcept {
  if (closed_ || forked())
    return;
  if (!forget(id))
    return;
  try {
    announce({{Message::drop, id, 0}, nullptr});
  } catch (const std::bad_alloc &) {
    // Another rank keeps it mapped until this rank ends, which is better than to end here.
  }
}

std::uint64_t HostPeers::send_descriptor(std::shared_ptr<Descriptor> fd,
                                         const std::vector<std::size_t> &ranks) {
  std::uint64_t id;
  {
    std::lock_guard lock(own_mutex_);
    id = next_id_++;
  }
  announce({{Message::descriptor, id, 0}, std::move(fd)}, ranks);
  return id;
}

std::shared_ptr<Descriptor> HostPeers::take_descriptor(std::size_t owner, std::uint64_t id) {
  if (forked())
    return nullptr;
  std::lock_guard lock(table_->mutex);
  const auto node = table_->descriptors[owner].extract(id);
  return node.empty() ? nullptr : node.mapped();
}

void HostPeers::drop_descriptor(std::uint64_t id,
                                const std::vector<std::size_t> &ranks) noexcept {
  if (closed_ || forked())
    return;
  try {
    announce({{Message::drop, id, 0}, nullptr}, ranks);
  } catch (const std::bad_alloc &) {
    // Another rank keeps it until this rank ends.
  }
}

void HostPeers::drop_later(std::uint64_t id,
                           std::function<bool(const HostPeers &)> wanted) {
  {
    std::lock_guard lock(dropped_later_mutex_);
    dropped_later_.emplace_back(id, std::move(wanted));
  }
  std::lock_guard lock(sending_);
  wake();
}

// Whether any segment is left that another rank still needs.
bool HostPeers::drop_unwanted() {
  decltype(dropped_later_)
      over; // destroyed, with what they hold, after the lock is released
  bool left;
  {
    std::lock_guard lock(dropped_later_mutex_);
    const auto first = std::partition(dropped_later_.begin(), dropped_later_.end(),
                                      [&](const auto &one) { return one.second(*this); });
    over.assign(std::make_move_iterator(first),
                std::make_move_iterator(dropped_later_.end()));
    dropped_later_.erase(first, dropped_later_.end());
    left = !dropped_later_.empty();
  }
  for (const auto &one : over)
    drop(one.first);
  return left;
}

std::optional<HostPeers::Located> HostPeers::locate(const void *data,
                                                    std::size_t bytes) const {
  const auto at = reinterpret_cast<std::uintptr_t>(data);
  if (between_threads())
    return Located{{ExposedBuffer::anywhere, at}, nullptr};
  if (!owns_.load(std::memory_order_relaxed))
    return std::nullopt;
  std::lock_guard lock(own_mutex_);
  auto after = own_.upper_bound(at);
  if (after == own_.begin())
    return std::nullopt;
  const auto &[start, segment] = *--after;
  if (at + bytes > start + segment.bytes)
    return std::nullopt;
  const auto *const from = static_cast<const std::byte *>(data);
  const std::size_t offset = segment.pages ? segment.pages->offset(from) : at - start;
  return Located{{segment.id, offset}, segment.pages};
}

PeerAddress HostPeers::resolve(std::size_t owner, ExposedBuffer exposed,
                    std::vector<std::shared_ptr<Memory>> &hold) const {
  if (exposed.segment == ExposedBuffer::anywhere || exposed.segment == ExposedBuffer::own)
    return {reinterpret_cast<std::byte *>(exposed.offset),
            exposed.segment == ExposedBuffer::own ? pids_[owner] : 0};
  auto memory = find(owner, exposed.segment);
  if (!memory || exposed.offset > memory->size())
    return {};
  std::byte *at = memory->data() + exposed.offset;
  hold.push_back(std::move(memory));
  return {at};
}

} // namespace unisono

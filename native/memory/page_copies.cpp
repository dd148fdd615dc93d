#include "memory/page_copies.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include "support/fail.hpp"

namespace unisono {

namespace {

constexpr std::size_t most_bytes = 1 << 20; // a pipe of a user without privileges

// Gives each page a frame of this process alone: one that was never written to, or that is
// shared with a forked child, would get another with the first write.
void claim(std::byte *from, std::size_t bytes) {
#if !defined(MADV_POPULATE_WRITE)
  constexpr int MADV_POPULATE_WRITE = 23; // Linux 5.14
#endif
  if (::madvise(from, bytes, MADV_POPULATE_WRITE) == 0)
    return;
  for (std::byte *at = from; at < from + bytes; at += PageCopies::page())
    std::atomic_ref(*reinterpret_cast<unsigned char *>(at)).fetch_or(0);
}

} // namespace

std::size_t PageCopies::page() {
  static const auto bytes = std::size_t(::sysconf(_SC_PAGESIZE));
  return bytes;
}

PageCopies::PageCopies(bool keeps) : most_(most_bytes) {
  if (keeps && ::pipe2(pipe_, O_CLOEXEC | O_NONBLOCK) != 0)
    fail(errno == EMFILE || errno == ENFILE
             ? "sharing memory: all file descriptors are in use (ulimit -n)"
             : "sharing memory");
  ::fcntl(pipe_[1], F_SETPIPE_SZ, most_bytes); // without a pipe an error, as the next one
  if (const int bytes = ::fcntl(pipe_[1], F_GETPIPE_SZ); bytes > 0)
    most_ = std::min(most_, std::size_t(bytes));
  most_ = std::max(most_ / page() * page(), page());
  copied_.resize(most_);
  old_.resize(most_);
}

PageCopies::~PageCopies() { empty(); }

void PageCopies::empty() {
  for (int &end : pipe_)
    if (end >= 0) {
      ::close(end);
      end = -1;
    }
}

bool PageCopies::keep(std::byte *from, std::size_t bytes) {
  while (bytes > 0) {
    const iovec part{from, bytes};
    const ssize_t kept = ::vmsplice(pipe_[1], &part, 1, SPLICE_F_NONBLOCK);
    if (kept < 0 && errno == EINTR)
      continue;
    if (kept <= 0)
      return false;
    from += kept;
    bytes -= std::size_t(kept);
  }
  return true;
}

void PageCopies::copy(std::byte *from, std::size_t bytes) {
  bytes_ = bytes;
  claim(from, bytes);
  kept_ = pipe_[1] >= 0 && keep(from, bytes);
  if (!kept_)
    empty(); // the system has no vmsplice: what is in the pipe is of no use
  do
    std::memcpy(copied_.data(), from, bytes);
  // Without the old pages, all that can be seen is what was written during the copy.
  while (!kept_ && std::memcmp(copied_.data(), from, bytes) != 0);
}

void PageCopies::copy_accessible(const std::byte *from, std::size_t bytes) {
  bytes_ = bytes;
  std::memcpy(copied_.data(), from, bytes);
}

bool PageCopies::read_kept() {
  for (std::size_t at = 0; at < bytes_;) {
    const ssize_t got = ::read(pipe_[0], old_.data() + at, bytes_ - at);
    if (got < 0 && errno == EINTR)
      continue;
    if (got <= 0)
      return false;
    at += std::size_t(got);
  }
  return true;
}

bool PageCopies::repair(std::byte *to) {
  return kept_ && read_kept() && repair(to, old_.data());
}

bool PageCopies::repair(std::byte *to, const std::byte *old) {
  if (std::memcmp(old, copied_.data(), bytes_) == 0)
    return false;
  for (std::size_t i = 0; i < bytes_; ++i)
    if (old[i] != copied_[i]) {
      auto expected = static_cast<unsigned char>(copied_[i]);
      std::atomic_ref(*reinterpret_cast<unsigned char *>(to + i))
          .compare_exchange_strong(expected, static_cast<unsigned char>(old[i]));
    }
  return true;
}

} // namespace unisono

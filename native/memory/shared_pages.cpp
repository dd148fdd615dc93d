#include "memory/shared_pages.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "memory/page_copies.hpp"
#include "support/fail.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

// All shared pages of the process by the end of their range. The lock is `block_forks()`, so
// that a child finds the table as it was between two changes. Never destroyed.
struct Entry {
  std::uintptr_t begin;
  std::weak_ptr<SharedPages> pages;
};
using Table = std::map<std::uintptr_t, Entry>;

Table &table() {
  static auto *const made = new Table;
  return *made;
}

// The first entry that shares a byte with a range, or the end.
Table::iterator overlapping(std::uintptr_t begin, std::uintptr_t end) {
  const auto found = table().upper_bound(begin);
  return found != table().end() && found->second.begin < end ? found : table().end();
}

std::uintptr_t number(const std::byte *at) { return reinterpret_cast<std::uintptr_t>(at); }

std::byte *rounded_down(std::byte *at) { return at - number(at) % PageCopies::page(); }

std::byte *rounded_up(std::byte *at) { return rounded_down(at + PageCopies::page() - 1); }

[[noreturn]] void fail_mapping() {
  fail(errno == EAGAIN ? "sharing memory: more would be locked than allowed (ulimit -l)"
       : errno == ENOMEM ? "sharing memory: no memory, or too many mappings (vm.max_map_count)"
                         : "sharing memory");
}

} // namespace

std::shared_ptr<SharedPages> SharedPages::find(const std::byte *data, std::size_t bytes) {
  const auto no_fork = block_forks();
  const auto found = overlapping(number(data), number(data) + bytes);
  const bool inside = found != table().end() && found->second.begin <= number(data) &&
                      number(data) + bytes <= found->first;
  return inside ? found->second.pages.lock() : nullptr;
}

bool SharedPages::any(const std::byte *data, std::size_t bytes) {
  const auto no_fork = block_forks();
  return overlapping(number(data), number(data) + bytes) != table().end();
}

std::shared_ptr<SharedPages> SharedPages::make(std::byte *data, std::size_t bytes) {
  while (true) {
    if (auto pages = find(data, bytes))
      return pages;
    auto no_fork = block_forks();
    const auto found = overlapping(number(data), number(data) + bytes);
    if (found == table().end()) {
      std::shared_ptr<SharedPages> made(new SharedPages(data, bytes));
      Entry &entry = table()[number(data) + bytes];
      entry = {number(data), made};
      try {
        made->replace();
        made->register_fork_handler();
      } catch (...) {
        made->restore_locked();
        table().erase(number(data) + bytes);
        no_fork.unlock(); // the destructor takes it
        throw;
      }
      return made;
    }
    if (found->second.pages.lock())
      throw std::invalid_argument("a part of it is registered already");
    no_fork.unlock();
    ::sched_yield(); // another thread is making it private again
  }
}

SharedPages::SharedPages(std::byte *data, std::size_t bytes)
    : data_(data), size_(bytes), outer_(rounded_down(data)), inner_(rounded_up(data)),
      inner_end_(rounded_down(data + bytes)), replaced_end_(inner_) {
  if (inner_ >= inner_end_)
    throw std::invalid_argument("it fills no page of memory");
  memory_ = Memory::make(std::size_t(rounded_up(data + bytes) - outer_), fd_);
}

SharedPages::~SharedPages() {
  const auto no_fork = block_forks();
  restore_locked();
  unregister_fork_handler();
  if (const auto found = table().find(number(data_) + size_);
      found != table().end() && found->second.begin == number(data_))
    table().erase(found);
}

// Replaces the pages, some at a time.
void SharedPages::replace() {
  PageCopies copies(true);
  bool written = false;
  while (replaced_end_ < inner_end_ && !written) {
    std::byte *const at = replaced_end_;
    const std::size_t bytes = std::min(copies.most(), std::size_t(inner_end_ - at));
    copies.copy(at, bytes);
    std::memcpy(alias(at), copies.copied(), bytes);
    failpoint("pages.copied");
    if (allowed("pages.map", bytes) == 0) {
      errno = ENOMEM;
      fail_mapping();
    }
    if (::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_POPULATE,
               fd_->number(), off_t(offset(at))) == MAP_FAILED)
      fail_mapping();
    replaced_end_ = at + bytes;
    written = copies.repair(at);
  }
  if (written) {
    // Threads may still write: a private mapping takes the place of the shared one at once.
    if (map_privately())
      replaced_end_ = inner_;
    throw std::runtime_error("another thread wrote to it meanwhile");
  }
}

void SharedPages::restore() noexcept {
  const auto no_fork = block_forks();
  restore_locked();
}

void SharedPages::abandon() noexcept {
  const auto no_fork = block_forks();
  struct stat file;
  std::byte *const first = std::exchange(inner_, replaced_end_);
  std::byte *const last = replaced_end_;
  if (::fstat(fd_->number(), &file) != 0)
    return;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    unsigned long begin, end, node;
    if (std::sscanf(line.c_str(), "%lx-%lx %*s %*s %*s %lu", &begin, &end, &node) != 3 ||
        node != file.st_ino)
      continue;
    inner_ = std::max(first, reinterpret_cast<std::byte *>(begin));
    replaced_end_ = std::min(last, reinterpret_cast<std::byte *>(end));
    if (inner_ < replaced_end_)
      (void)map_privately();
  }
  inner_ = replaced_end_ = last;
}

void SharedPages::restore_locked() noexcept {
  if (replaced_end_ == inner_)
    return;
  // A child has a private mapping, where its own pages are the truth.
  if (!make_anonymous(origin_.forked() ? inner_ : alias(inner_)))
    (void)map_privately(); // more memory than necessary, or the shared pages as they are
  replaced_end_ = inner_;
}

// New pages of this process alone, with the content at `from`.
bool SharedPages::make_anonymous(const std::byte *from) noexcept {
  const auto all = std::size_t(replaced_end_ - inner_);
  void *const room =
      ::mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (room == MAP_FAILED)
    return false;
  auto *const fresh = static_cast<std::byte *>(room);
  std::size_t at = 0;
  try {
    PageCopies copies(false);
    for (std::size_t bytes; at < all; at += bytes) {
      bytes = std::min(copies.most(), all - at);
      copies.copy_accessible(from + at, bytes);
      std::memcpy(fresh + at, copies.copied(), bytes);
      if (::mremap(fresh + at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, inner_ + at) ==
          MAP_FAILED)
        break;
      if (from != inner_)
        (void)copies.repair(inner_ + at, from + at);
    }
  } catch (const std::bad_alloc &) {
  }
  if (at == all)
    return true;
  ::munmap(fresh + at, all - at);
  inner_ += at; // the rest is still shared
  return false;
}

// A private mapping of the segment: pages are copied as they are written to.
bool SharedPages::map_privately() noexcept {
  return ::mmap(inner_, std::size_t(replaced_end_ - inner_), PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_FIXED, fd_->number(), off_t(offset(inner_))) != MAP_FAILED;
}

void SharedPages::in_child() {
  if (replaced_end_ != inner_ && !map_privately()) // rather none than the parent's
    ::munmap(inner_, std::size_t(replaced_end_ - inner_));
}

template <class Copy>
void SharedPages::each_end(const std::byte *data, std::size_t bytes, Copy copy) const {
  const std::byte *const end = data + bytes;
  const auto part = [&](const std::byte *first, const std::byte *last) {
    if (first < last)
      copy(first, std::size_t(last - first));
  };
  part(data, std::min<const std::byte *>(end, inner_));
  part(std::max<const std::byte *>(data, inner_end_), end);
}

void SharedPages::copy_ends_in(const std::byte *data, std::size_t bytes) const {
  each_end(data, bytes, [this](const std::byte *at, std::size_t count) {
    std::memcpy(alias(at), at, count);
  });
}

void SharedPages::copy_ends_out(std::byte *data, std::size_t bytes) const {
  each_end(data, bytes, [this](const std::byte *at, std::size_t count) {
    std::memcpy(const_cast<std::byte *>(at), alias(at), count);
  });
}

} // namespace unisono

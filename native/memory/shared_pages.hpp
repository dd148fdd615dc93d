// Memory that exists already, made accessible to other processes at the same addresses.
//
// The pages that a range fills are replaced by shared ones with the same content. The pages
// at its ends may hold other data of the process, and stay. The segment has pages for them
// too, so that other ranks see the range without gaps: a call works on the second mapping of
// the segment (`alias`), and copies what is at the ends before and after it.
//
// When the last reference goes, the pages are private again. A forked child has a private
// mapping of them: what it writes does not change its parent's, but what the parent writes
// shows in pages that the child has not written to.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "memory/host_peers.hpp"
#include "support/fork.hpp"

namespace unisono {

class SharedPages final : ForkAware {
public:
  // Throws if there is no whole page in it, if it overlaps other shared pages, if a resource
  // is missing or if a thread has written to it meanwhile; its content is then as before.
  // Memory that is part of shared pages has these.
  static std::shared_ptr<SharedPages> make(std::byte *data, std::size_t bytes);
  static bool any(const std::byte *data, std::size_t bytes); // of its bytes are shared so
  // Those that such memory is part of, or null.
  static std::shared_ptr<SharedPages> find(const std::byte *data, std::size_t bytes);
  ~SharedPages();
  SharedPages(const SharedPages &) = delete;
  SharedPages &operator=(const SharedPages &) = delete;

  std::byte *data() const { return data_; }
  std::size_t size() const { return size_; }
  const std::shared_ptr<Memory> &memory() const { return memory_; }
  const std::shared_ptr<Descriptor> &descriptor() const { return fd_; }
  // The place of `data` in the segment.
  std::size_t offset(const std::byte *data) const { return std::size_t(data - outer_); }
  std::byte *alias(const std::byte *data) const { return memory_->data() + offset(data); }
  // What of this part of the range is at its ends, to the alias or from it.
  void copy_ends_in(const std::byte *data, std::size_t bytes) const;
  void copy_ends_out(std::byte *data, std::size_t bytes) const;

  // Makes the pages private before the destructor does; in a child they become its own.
  void restore() noexcept;
  // The memory was freed: those pages that are still mapped there become private.
  void abandon() noexcept;

private:
  SharedPages(std::byte *data, std::size_t bytes);
  void in_child() override;
  void replace();
  void restore_locked() noexcept;
  bool make_anonymous(const std::byte *from) noexcept;
  bool map_privately() noexcept;
  template <class Copy>
  void each_end(const std::byte *data, std::size_t bytes, Copy copy) const;

  std::byte *data_;
  std::size_t size_;
  std::byte *outer_, *inner_, *inner_end_; // its first page, and the pages it fills
  std::byte *replaced_end_;                // so far
  std::shared_ptr<Descriptor> fd_;
  std::shared_ptr<Memory> memory_;
  Origin origin_;
};

} // namespace unisono

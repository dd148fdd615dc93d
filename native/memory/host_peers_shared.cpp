// Memory that was made a segment after it was allocated.

#include <algorithm>
#include <new>
#include <stdexcept>

#include "memory/host_peers_messages.hpp"
#include "memory/shared_pages.hpp"

namespace unisono {

// Other ranks know it as long as it is held: by its registrations, and by calls that have
// told them of it.
struct HostPeers::SharedSegment {
  ~SharedSegment() { home.end_sharing(id); }
  HostPeers &home;
  std::uint64_t id;
  std::shared_ptr<SharedPages> pages; // private again after that
};

std::uint64_t HostPeers::share(std::byte *data, std::size_t bytes) {
  if (forked())
    throw std::runtime_error("a forked child has no part in its parent's shared memory");
  std::lock_guard one_at_a_time(sharing_);
  const auto pages = SharedPages::make(data, bytes);
  const auto at = reinterpret_cast<std::uintptr_t>(pages->data());
  std::uint64_t id;
  {
    std::lock_guard lock(own_mutex_);
    if (const auto found = own_.find(at); found != own_.end()) {
      ++found->second.count;
      return found->second.id;
    }
    id = next_id_++;
  }
  const std::shared_ptr<SharedSegment> segment(new SharedSegment{*this, id, pages});
  {
    std::lock_guard lock(table_->mutex);
    table_->segments[rank_][id] = pages->memory();
  }
  announce({{Message::segment, id, pages->memory()->size()}, pages->descriptor()});
  std::lock_guard lock(own_mutex_);
  own_[at] = {pages->size(), id, {segment, pages.get()}};
  owns_.store(true, std::memory_order_relaxed);
  return id;
}

std::shared_ptr<SharedPages> HostPeers::shared(std::uint64_t id) const {
  std::lock_guard lock(own_mutex_);
  for (const auto &[at, segment] : own_)
    if (segment.id == id)
      return segment.pages;
  return nullptr;
}

void HostPeers::unshare(std::uint64_t id) noexcept {
  std::shared_ptr<SharedPages> pages; // released without a lock
  std::scoped_lock lock(sharing_, own_mutex_);
  const auto found = std::find_if(own_.begin(), own_.end(),
                                  [id](const auto &one) { return one.second.id == id; });
  if (found == own_.end() || --found->second.count > 0)
    return;
  pages = std::move(found->second.pages);
  own_.erase(found);
  owns_.store(!own_.empty(), std::memory_order_relaxed);
}

void HostPeers::end_sharing(std::uint64_t id) noexcept {
  if (forked())
    return;
  std::shared_ptr<Memory> memory;
  {
    std::lock_guard lock(table_->mutex);
    if (const auto node = table_->segments[rank_].extract(id); !node.empty())
      memory = std::move(node.mapped());
  }
  if (closed_)
    return;
  try {
    announce({{Message::drop, id, 0}, nullptr});
  } catch (const std::bad_alloc &) {
    // Another rank keeps it mapped until this rank ends.
  }
}

} // namespace unisono

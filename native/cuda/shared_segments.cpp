#include "cuda/shared_segments.hpp"

#include <algorithm>
#include <utility>

namespace unisono::cuda {

namespace {

// Numbers of cuda.h: attributes of an address.
constexpr int mapping_id = 7, range_first = 11, range_bytes = 12, handle_types = 14;
constexpr Result invalid_value = 1;
// A buffer with more mappings goes through the windows, and so many are shared by one call:
// to export one takes up to a millisecond.
constexpr std::size_t most_mappings = 512, most_at_once = 16;
constexpr std::size_t most_unshareable = 4096; // that are remembered

template <class T> std::optional<T> attribute(int which, Address address) {
  T value{};
  if (api().cuPointerGetAttribute(&value, which, address) != success)
    return {};
  return value;
}

// Whether a mapping is no longer there; a driver that fails does not say so.
bool is_gone(Address first, std::uint64_t id) {
  std::uint64_t now = 0;
  const Result result = api().cuPointerGetAttribute(&now, mapping_id, first);
  return result == success ? now != id : result == invalid_value;
}

// A descriptor of the memory at an address; null if it has none.
std::shared_ptr<Descriptor> exported(Address address) {
  Allocation memory = 0;
  if (api().cuMemRetainAllocationHandle(&memory, reinterpret_cast<void *>(address)) != success)
    return nullptr;
  int fd = -1;
  const Result result =
      api().cuMemExportToShareableHandle(&fd, memory, as_descriptor, 0);
  (void)api().cuMemRelease(memory); // the descriptor keeps it
  return result == success ? Descriptor::owning(fd) : nullptr;
}

std::vector<std::size_t> without(const std::vector<std::size_t> &ranks, std::size_t rank) {
  std::vector<std::size_t> others = ranks;
  others.erase(others.begin() + std::ptrdiff_t(rank));
  return others;
}

} // namespace

SharedSegments::SharedSegments(const Device &device, std::size_t rank,
                               std::vector<std::size_t> ranks,
                               std::shared_ptr<HostPeers> host_peers, BoardRank *board)
    : device_(device), rank_(rank), ranks_(std::move(ranks)), others_(without(ranks_, rank)),
      host_peers_(std::move(host_peers)), board_(board) {}

std::optional<SharedSegments::Place> SharedSegments::place_of(Address address,
                                                              std::size_t bytes) {
  const auto found = segment_at(address);
  const Coverage covered =
      found == segments_.end() ? Coverage{false} : coverage(found->second, address, bytes);
  if (!covered.is_complete) {
    forget_taken();
    share(address, bytes);
    return {};
  }
  if (handled_by_all() < covered.event || is_refused(found->second.number))
    return {};
  return Place{found->second.number, address - found->first};
}

SharedSegments::State SharedSegments::state_of(Address address, std::size_t bytes) const {
  const auto found = segment_at(address);
  if (found != segments_.end())
    if (const Coverage covered = coverage(found->second, address, bytes); covered.is_complete)
      return is_refused(found->second.number)       ? State::refused
             : handled_by_all() < covered.event ? State::awaited
                                                    : State::in_place;
  const auto mapping = mapping_of(address);
  return mapping && is_unshareable(*mapping) ? State::impossible : State::unknown;
}

std::optional<SharedSegments::Mapping> SharedSegments::mapping_of(Address address) {
  Mapping mapping{};
  if (api().cuMemGetAddressRange_v2(&mapping.first, &mapping.bytes, address) != success)
    return {};
  const auto id = attribute<std::uint64_t>(mapping_id, address);
  if (!id)
    return {};
  mapping.id = *id;
  return mapping;
}

SharedSegments::Segments::const_iterator SharedSegments::segment_at(Address address) const {
  auto found = segments_.upper_bound(address);
  if (found == segments_.begin())
    return segments_.end();
  --found;
  return address - found->first < found->second.bytes ? found : segments_.end();
}

// Whether all memory of a buffer is shared, and is still what was shared.
SharedSegments::Coverage SharedSegments::coverage(const Segment &segment, Address address,
                                                  std::size_t bytes) const {
  Coverage covered;
  for (Address at = address; at < address + bytes;) {
    auto piece = segment.pieces.upper_bound(at);
    if (piece == segment.pieces.begin())
      return {false};
    --piece;
    const Address end = piece->first + piece->second.bytes;
    if (at >= end || attribute<std::uint64_t>(mapping_id, piece->first) != piece->second.id)
      return {false};
    covered.event = std::max(covered.event, piece->second.event);
    at = end;
  }
  return covered;
}

bool SharedSegments::is_shared(const Mapping &mapping) const {
  const auto found = segment_at(mapping.first);
  if (found == segments_.end())
    return false;
  const auto piece = found->second.pieces.find(mapping.first);
  return piece != found->second.pieces.end() && piece->second.id == mapping.id;
}

bool SharedSegments::is_unshareable(const Mapping &mapping) const {
  const auto found = unshareable_.find(mapping.first);
  return found != unshareable_.end() && found->second == mapping.id;
}

// Shares the memory of a buffer, as far as there is room for it now.
void SharedSegments::share(Address address, std::size_t bytes) {
  std::size_t shared = 0;
  for (Address at = address; at < address + bytes;) {
    const auto mapping = mapping_of(at);
    if (!mapping || bytes / mapping->bytes > most_mappings)
      return;
    if (!is_shared(*mapping) && (shared++ == most_at_once || !share(*mapping)))
      return;
    at = mapping->first + mapping->bytes;
  }
}

// Whether it is shared now.
bool SharedSegments::share(const Mapping &mapping) {
  if (is_unshareable(mapping) || !can_publish())
    return false;
  SegmentEvent event{};
  if (api().cuIpcGetMemHandle(&event.handle, mapping.first) == success)
    return share_allocation(mapping, event);
  if (attribute<std::uint64_t>(handle_types, mapping.first).value_or(0) & std::uint64_t(as_descriptor))
    return share_piece(mapping, event);
  remember_unshareable(mapping); // of a pool, or virtual memory without descriptors
  return false;
}

void SharedSegments::remember_unshareable(const Mapping &mapping) {
  if (unshareable_.size() >= most_unshareable) // some may be gone: they are asked again
    unshareable_.clear();
  unshareable_[mapping.first] = mapping.id;
}

bool SharedSegments::share_allocation(const Mapping &mapping, SegmentEvent &event) {
  Segment *const segment = make_segment({mapping.first, mapping.bytes}, true);
  if (segment == nullptr)
    return false;
  event.kind = SegmentEvent::allocation;
  event.segment = segment->number;
  event.length = event.bytes = mapping.bytes;
  return publish(event, *segment, mapping);
}

bool SharedSegments::share_piece(const Mapping &mapping, SegmentEvent &event) {
  const auto first = attribute<Address>(range_first, mapping.first);
  const auto bytes = attribute<std::size_t>(range_bytes, mapping.first);
  Segment *const segment =
      first && bytes ? make_segment({*first, *bytes}, false) : nullptr;
  if (segment == nullptr || !free_pieces(*segment, mapping) || !can_publish())
    return false;
  const auto descriptor = exported(mapping.first);
  if (!descriptor) {
    remember_unshareable(mapping);
    return false;
  }
  event.kind = SegmentEvent::piece;
  event.segment = segment->number;
  event.length = *bytes;
  event.offset = mapping.first - *first;
  event.bytes = mapping.bytes;
  event.descriptor = host_peers_->send_descriptor(descriptor, others_);
  sent_.push_back({event.descriptor, published() + 1});
  return publish(event, *segment, mapping);
}

// The segment of these addresses, a new one if there is none; null if there is no room now.
SharedSegments::Segment *SharedSegments::make_segment(const AddressRange &range,
                                                      bool is_allocation) {
  const auto found = segments_.find(range.base);
  if (found != segments_.end() && found->second.is_allocation == is_allocation &&
      found->second.bytes == range.bytes && (!is_allocation || found->second.pieces.empty()))
    return &found->second;
  if (!free_overlapping(range))
    return nullptr;
  const std::uint32_t number = take_number();
  if (number == 0)
    return nullptr;
  return &(segments_[range.base] = {number, range.base, range.bytes, is_allocation, {}});
}

// Frees the segments at these addresses: they are of memory that is no longer there.
bool SharedSegments::free_overlapping(const AddressRange &range) {
  auto next = segments_.lower_bound(range.base);
  if (next != segments_.begin())
    if (const auto before = std::prev(next);
        before->first + before->second.bytes > range.base)
      next = before;
  while (next != segments_.end() && next->first < range.base + range.bytes)
    if (!free(next++))
      return false;
  return true;
}

bool SharedSegments::free(Segments::iterator segment) {
  if (!publish({SegmentEvent::freed, segment->second.number, 0, 0, 0, 0, {}}))
    return false;
  freed_.push_back({segment->second.number, published()});
  segments_.erase(segment);
  return true;
}

// Frees a piece, and the segment with its last one.
bool SharedSegments::free(Segments::iterator segment, Address piece) {
  auto &pieces = segment->second.pieces;
  if (pieces.size() == 1)
    return free(segment);
  if (!publish_freed(segment->second, piece))
    return false;
  pieces.erase(piece);
  return true;
}

void SharedSegments::free_some(std::size_t most) {
  forget_taken();
  for (; most > 0; --most) {
    const auto [segment, piece] = piece_behind(looked_at_);
    if (segment == segments_.end()) {
      looked_at_ = 0; // from the beginning, the next time
      return;
    }
    const Address first = piece->first;
    if (is_gone(first, piece->second.id) && !free(segment, first))
      return; // no room: it is looked at again
    looked_at_ = first;
  }
}

std::pair<SharedSegments::Segments::iterator,
          std::map<Address, SharedSegments::Piece>::iterator>
SharedSegments::piece_behind(Address address) {
  auto segment = segments_.upper_bound(address);
  if (segment != segments_.begin())
    --segment;
  for (; segment != segments_.end(); ++segment)
    if (const auto piece = segment->second.pieces.upper_bound(address);
        piece != segment->second.pieces.end())
      return {segment, piece};
  return {segment, {}};
}

// Frees the pieces where something else is mapped now.
bool SharedSegments::free_pieces(Segment &segment, const Mapping &mapping) {
  auto next = segment.pieces.lower_bound(mapping.first);
  if (next != segment.pieces.begin())
    if (const auto before = std::prev(next);
        before->first + before->second.bytes > mapping.first)
      next = before;
  while (next != segment.pieces.end() && next->first < mapping.first + mapping.bytes) {
    if (!publish_freed(segment, next->first))
      return false;
    next = segment.pieces.erase(next);
  }
  return true;
}

bool SharedSegments::publish_freed(const Segment &segment, Address piece) {
  return publish({SegmentEvent::piece_freed, segment.number, 0, piece - segment.first,
                  segment.pieces.at(piece).bytes, 0, {}});
}

// The number of a new segment; 0 if all are in use.
std::uint32_t SharedSegments::take_number() {
  if (!freed_.empty() && freed_.front().event <= handled_by_all()) {
    const std::uint32_t number = freed_.front().number;
    freed_.pop_front();
    return number;
  }
  return last_number_ + 1 < device::most_segments ? ++last_number_ : 0;
}

std::uint64_t SharedSegments::published() const {
  return board_[rank_].published.load(std::memory_order_relaxed);
}

bool SharedSegments::can_publish() const {
  return published() - handled_by_all() < most_events;
}

bool SharedSegments::publish(const SegmentEvent &event) {
  if (!can_publish())
    return false;
  const std::uint64_t number = published();
  board_[rank_].events[number % most_events] = event;
  board_[rank_].published.store(number + 1, std::memory_order_release);
  return true;
}

bool SharedSegments::publish(const SegmentEvent &event, Segment &segment,
                             const Mapping &mapping) {
  if (!publish(event))
    return false;
  segment.pieces[mapping.first] = {mapping.bytes, mapping.id, published()};
  return true;
}

std::uint64_t SharedSegments::handled_by_all() const {
  std::uint64_t least = published();
  for (std::size_t q = 0; q < ranks_.size(); ++q)
    if (q != rank_)
      least = std::min(least, board_[q].handled[rank_].load(std::memory_order_acquire));
  return least;
}

bool SharedSegments::is_refused(std::uint32_t segment) const {
  for (std::size_t q = 0; q < ranks_.size(); ++q)
    if (board_[q].refused[rank_][segment / 64].load(std::memory_order_acquire) >>
            (segment % 64) & 1)
      return true;
  return false;
}

void SharedSegments::forget_taken() {
  while (!sent_.empty() && sent_.front().event <= handled_by_all())
    sent_.pop_front();
}

void SharedSegments::withdraw() {
  forget_taken();
  for (const Sent &sent : sent_)
    host_peers_->drop_descriptor(sent.descriptor, others_);
  sent_.clear();
}

} // namespace unisono::cuda

// Buffers of this rank that the other ranks use in place.
//
// The rank shares the memory that a buffer lies in, and the others map it when they next look
// (mapped_segments.hpp). Until all have done so, calls on the buffer go through the windows.
// Memory is shared in one of two ways:
//
//   an allocation of cuMemAlloc    by its handle, as a segment of its own
//   memory of cuMemCreate          by a descriptor for each mapping; the reserved addresses
//                                  around it are the segment, which the others mirror: so a
//                                  buffer may lie across many mappings
//
// Other memory, such as that of pools, is not shared. An address may be mapped to something
// else later, so every use compares the driver's number of the mapping.

#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "cuda/board.hpp"
#include "cuda/device.hpp"
#include "memory/host_peers.hpp"

namespace unisono::cuda {

class SharedSegments {
public:
  // `ranks` are those of the communicator, as numbered in the world.
  SharedSegments(const Device &device, std::size_t rank, std::vector<std::size_t> ranks,
                 std::shared_ptr<HostPeers> host_peers, BoardRank *board);

  struct Place { // as other ranks find it
    std::uint64_t segment, offset;
  };
  // Where the others find a buffer; nothing if not all of them have mapped it. What is not
  // shared yet is shared now. To be called with the device's context.
  std::optional<Place> place_of(Address address, std::size_t bytes);

  enum class State { unknown, in_place, awaited, refused, impossible };
  // Of a buffer, as far as it was used: changes nothing.
  State state_of(Address address, std::size_t bytes) const;

  // Looks at some of what is shared, in turn, and tells the others what is no longer there. To
  // be called with the device's context.
  void free_some(std::size_t most);
  bool is_empty() const { return segments_.empty(); }

  // Takes back the descriptors that others have not taken.
  void withdraw();

private:
  struct Piece { // a mapping
    std::size_t bytes;
    std::uint64_t id;    // tells mappings at one address apart
    std::uint64_t event; // how many events the others have handled when they have it
  };
  struct Segment {
    std::uint32_t number;
    Address first;
    std::size_t bytes;
    bool is_allocation;
    std::map<Address, Piece> pieces; // by their first addresses
  };
  using Segments = std::map<Address, Segment>; // by their first addresses
  struct Mapping { // what the driver says of an address
    Address first;
    std::size_t bytes;
    std::uint64_t id;
  };
  struct Coverage { // of a buffer, by what is shared
    bool is_complete = true;
    std::uint64_t event = 0;
  };

  static std::optional<Mapping> mapping_of(Address address);
  Segments::const_iterator segment_at(Address address) const;
  std::pair<Segments::iterator, std::map<Address, Piece>::iterator> piece_behind(Address);
  Coverage coverage(const Segment &segment, Address address, std::size_t bytes) const;
  bool is_shared(const Mapping &mapping) const;
  bool is_unshareable(const Mapping &mapping) const;
  void share(Address address, std::size_t bytes);
  bool share(const Mapping &mapping);
  bool share_allocation(const Mapping &mapping, SegmentEvent &event);
  bool share_piece(const Mapping &mapping, SegmentEvent &event);
  Segment *make_segment(const AddressRange &range, bool is_allocation);
  bool free_overlapping(const AddressRange &range);
  bool free_pieces(Segment &segment, const Mapping &mapping);
  bool free(Segments::iterator segment);
  bool free(Segments::iterator segment, Address piece);
  void remember_unshareable(const Mapping &mapping);
  std::uint32_t take_number();

  std::uint64_t published() const;
  bool can_publish() const;
  bool publish(const SegmentEvent &event);
  bool publish(const SegmentEvent &event, Segment &segment, const Mapping &mapping);
  bool publish_freed(const Segment &segment, Address piece);
  std::uint64_t handled_by_all() const;
  bool is_refused(std::uint32_t segment) const;
  void forget_taken();

  const Device &device_;
  const std::size_t rank_;
  const std::vector<std::size_t> ranks_;
  std::vector<std::size_t> others_; // in the world
  const std::shared_ptr<HostPeers> host_peers_;
  BoardRank *const board_;
  Segments segments_;
  std::map<Address, std::uint64_t> unshareable_; // mappings, by their first addresses
  Address looked_at_ = 0; // the piece that was looked at last
  std::uint32_t last_number_ = 0;
  struct Freed { // a number that is used again when all have handled the event
    std::uint32_t number;
    std::uint64_t event;
  };
  std::deque<Freed> freed_;
  struct Sent { // a descriptor, which the others have taken when they have handled the event
    std::uint64_t descriptor, event;
  };
  std::deque<Sent> sent_;
};

} // namespace unisono::cuda

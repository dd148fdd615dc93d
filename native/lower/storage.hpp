// Where every version is stored, and in which order a rank makes those of its own.

#pragma once

#include <cstdint>
#include <vector>

#include "lower/lower.hpp"
#include "lower/versions.hpp"

namespace unisono::lowering {

class Storage {
public:
  Storage(Versions &versions, Shared shared);

  // Of each rank: its versions, and those it makes, in its order.
  std::vector<std::vector<Index>> mine, acts;
  std::int32_t places = 0; // of the window of the rank that needs most

private:
  struct Turn {
    std::int32_t step;
    bool arrives, delivers;
    std::int32_t nearest, latest, slot;
    auto operator<=>(const Turn &) const = default;
  };
  struct Load {
    std::int32_t most;
    bool not_preferred; // which of two decides if the busiest rank has as much to do
    auto operator<=>(const Load &) const = default;
  };

  void settle(Index v, Shared shared);
  void deliver_copies(Shared shared);
  bool is_deliverable(Index v) const;
  bool is_read_by_none_but(Index reader, Index v) const;
  std::vector<Index> shared_out(const std::vector<Index> &copies) const;
  void deliver(Index copy);
  void place(const std::vector<Index> &versions);
  void number(std::size_t rank);
  Turn turn(Index v) const;

  Versions &versions_;
};

// How far it is from a rank to the next of these, counting up and around; 0 without any.
template <class Indices>
std::int32_t nearest(const Versions &versions, std::int32_t rank, const Indices &peers) {
  const auto n = static_cast<std::int32_t>(versions.input().n);
  std::int32_t least = 0;
  for (const Index peer : peers) {
    const std::int32_t distance = (versions.at(peer).rank - rank + n) % n;
    if (distance != 0 && (least == 0 || distance < least))
      least = distance;
  }
  return least;
}

// The last step in which something was made that v gets from other hosts; -1 without any.
std::int32_t latest_step(const Versions &versions, const Version &v);

} // namespace unisono::lowering

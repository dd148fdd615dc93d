// What the meshes of two ranks tell each other, and what one has still to tell another.

#pragma once

#include <map>
#include <memory>

#include "memory/host_peers.hpp"

namespace unisono {

// A segment, whose descriptor travels with it, or the end of one.
struct Mesh::Message {
  enum Kind : std::uint64_t { segment = 1, drop = 2 };
  std::uint64_t kind;
  std::uint64_t id;
  std::uint64_t bytes;
};

struct Mesh::Announcement {
  Message message;
  std::shared_ptr<Descriptor> fd; // one for all who have still to be told
};

// Messages about different segments are independent of each other, and of each segment at
// most one waits: its end takes the place of its beginning, or, if that has not gone out,
// cancels it. So what is kept for a rank that takes in nothing is bounded by the segments
// that exist or that it knows.
struct Mesh::Outgoing {
  std::map<std::uint64_t, Announcement> unsent; // by segment
  bool gone = false;                            // its end of the socket is closed
  bool later = false; // the system is short of something: not before a while
};

} // namespace unisono

// The messages between two ranks of a host, and those that wait to be sent.

#pragma once

#include <map>
#include <memory>

#include "memory/host_peers.hpp"

namespace unisono {

// A segment, with its descriptor, another descriptor, or the end of either.
struct HostPeers::Message {
  enum Kind : std::uint64_t { segment = 1, drop = 2, descriptor = 3 };
  std::uint64_t kind;
  std::uint64_t id;
  std::uint64_t bytes;
};

struct HostPeers::Announcement {
  Message message;
  std::shared_ptr<Descriptor> fd; // shared by all ranks that it is still to be sent to
};

// Messages about different segments are independent, and per segment at most one waits: a
// drop replaces the announcement, or cancels it if that was not sent. So the queue for a
// rank that receives nothing is bounded by the segments that exist or that it knows.
struct HostPeers::Outgoing {
  std::map<std::uint64_t, Announcement> unsent; // by segment
  bool gone = false;                            // its end of the socket is closed
  bool later = false; // the system lacks a resource: try again later
};

} // namespace unisono

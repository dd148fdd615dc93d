// One connection of a lifeline: reads frames, and keeps sealed frames until the kernel
// accepts them. No thread ever waits for it.

#pragma once

#include <array>
#include <atomic>
#include <memory>

#include <sys/types.h>

#include "net/lifeline.hpp"

namespace unisono {

struct Lifeline::Peer {
  static constexpr std::size_t frame_bytes = sizeof(FrameHeader) + sizeof(Event); // at most
  static constexpr int reads_at_once = 4; // before the next peer is served

  // Prepares the socket, and adds it to `epoll`.
  Peer(std::size_t rank, Connection &connection, const Options &options, int epoll);

  bool open() const { return open_.load(std::memory_order_relaxed); }
  ssize_t recv(void *into, std::size_t bytes);
  // Reads and discards what the peer sent; the result of the last read.
  ssize_t discard_input();
  // Appends one sealed event to the output; false if it does not fit.
  bool put(const Event &event);
  std::size_t queued() const { return end - begin; }
  // Sends what the kernel accepts.
  void write();
  void drop();
  // Closes the wire alone, as a child does after fork.
  void close_wire();

  const std::size_t rank;
  const std::unique_ptr<Wire> wire;
  std::atomic<std::int64_t> heard;
  std::array<std::byte, sizeof(Event)> place;
  FrameReader reader;
  std::uint64_t next = 0; // its position in the log
  std::int64_t behind = 0; // since when it has had too much unsent output
  int error = 0; // of a write; what was received before it is still read

private:
  ssize_t send();
  void want_writable(bool wanted);

  std::atomic<bool> open_ = true; // only the lifeline's thread closes it
  const int epoll;
  Seal outgoing;
  std::array<std::byte, 4096> out; // sealed and unsent, from `begin` to `end`
  std::size_t begin = 0, end = 0;
  bool wants_writable = false;
};

} // namespace unisono

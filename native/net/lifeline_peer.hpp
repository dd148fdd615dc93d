// One connection of a lifeline: what came over it is read frame by frame, what is to be
// sent is sealed and kept until the kernel takes it. Nobody ever waits for it.

#pragma once

#include <array>
#include <atomic>
#include <memory>

#include <sys/types.h>

#include "net/lifeline.hpp"

namespace unisono {

struct Lifeline::Peer {
  static constexpr std::size_t frame_bytes = sizeof(FrameHeader) + sizeof(Event); // the most
  static constexpr int reads_at_once = 4; // before it is the turn of the next

  // Prepares the socket, and has `epoll` watch it.
  Peer(std::size_t rank, Connection &connection, const Options &options, int epoll);

  bool open() const { return open_.load(std::memory_order_relaxed); }
  ssize_t recv(void *into, std::size_t bytes);
  // Takes off what was sent and nobody will hear; what the last read gave.
  ssize_t skim();
  // Seals one event into what is to be sent; false if there is no room.
  bool put(const Event &event);
  std::size_t queued() const { return end - begin; }
  // Sends what the kernel takes.
  void write();
  void drop();
  // Closes the wire alone, as a child does after fork.
  void close_wire();

  const std::size_t rank;
  const std::unique_ptr<Wire> wire;
  std::atomic<std::int64_t> heard;
  std::array<std::byte, sizeof(Event)> place;
  FrameReader reader;
  std::uint64_t next = 0; // which event of the log it is sent next
  std::int64_t behind = 0; // since when there is too much that it was not sent
  int error = 0; // of a write; what came before it is still read

private:
  ssize_t send();
  void want_writable(bool wanted);

  std::atomic<bool> open_ = true; // only the lifeline's thread ends it
  const int epoll;
  Seal outgoing;
  std::array<std::byte, 4096> out; // sealed and unsent, from `begin` to `end`
  std::size_t begin = 0, end = 0;
  bool wants_writable = false;
};

} // namespace unisono

// The ranks of one host as seen by one of them: whose memory can be read, and who lives.
//
// Memory is shared in segments, each made by one rank and known to the others by its owner
// and a number. Between processes a segment is a sealed memfd whose descriptor travels
// over a socket; between threads it is plain memory. Nothing has a name in any file
// system, so nothing can be left behind.
//
// One thread per process watches: it takes in the segments of others as they arrive, and
// learns of a death from the kernel at once. It never touches Python.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <unordered_map>
#include <vector>

#include "reach.hpp"
#include "shared.hpp"

namespace unisono {

// Memory that is unmapped when the last who uses it lets go.
class Memory {
public:
  // New shared memory, present in full; `fd` is its descriptor, for the caller to close.
  static std::shared_ptr<Memory> make(std::size_t bytes, int *fd);
  static std::shared_ptr<Memory> from(int fd, std::size_t bytes);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  std::byte *data() const { return data_; }
  std::size_t size() const { return size_; }

private:
  Memory(std::byte *data, std::size_t size) : data_(data), size_(size) {}
  std::byte *data_;
  std::size_t size_;
};

// The segments of all ranks, and who is dead: private to a process, or common to threads.
struct Hub {
  explicit Hub(std::size_t n) : dead(n), ended(n), segments(n) {}
  std::mutex mutex;
  std::vector<std::atomic<bool>> dead;
  std::vector<std::atomic<bool>> ended; // by the word of the kernel
  std::vector<std::unordered_map<std::uint64_t, std::shared_ptr<Memory>>> segments;
};

class Mesh {
public:
  // Between threads: all ranks hold the same hub.
  Mesh(std::size_t rank, std::shared_ptr<Hub> hub);
  // Between processes: a connected socket and a process id for every other rank, and -1
  // for this one. The descriptors belong to the mesh from here on.
  Mesh(std::size_t rank, std::vector<int> sockets, std::vector<int> pids);
  ~Mesh();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return hub_->dead.size(); }
  bool between_threads() const { return sockets_.empty(); }

  std::uint64_t create(std::size_t bytes);
  std::shared_ptr<Memory> find(std::size_t owner, std::uint64_t id) const;
  void drop(std::uint64_t id);

  // Where in this rank's segments a buffer lies, if it does.
  std::optional<Lent> locate(const void *data, std::size_t bytes) const;
  // How to reach what `owner` has lent; keeps the memory alive in `hold`.
  Reach resolve(std::size_t owner, Lent lent,
                std::vector<std::shared_ptr<Memory>> &hold) const;
  int pid(std::size_t rank) const { return pids_[rank]; }

  bool dead(std::size_t rank) const {
    return hub_->dead[rank].load(std::memory_order_acquire);
  }
  // Whether the kernel of this host says that its process has ended. Unlike `dead`, which
  // may rest on a connection that ended, this cannot be wrong.
  bool ended(std::size_t rank) const {
    return hub_->ended[rank].load(std::memory_order_acquire);
  }
  // Whether another rank's memory could not be taken in, for want of memory or descriptors.
  bool starved() const { return starved_.load(std::memory_order_acquire); }
  void bury(std::size_t rank) { hub_->dead[rank].store(true, std::memory_order_release); }

  // In a child after fork: the watching thread is not here, and nothing may be waited for.
  bool forked() const;
  void close();

private:
  struct Message;
  void watch();
  bool receive(std::size_t from);
  bool drain(std::size_t from);
  void announce(const Message &message, int fd);

  std::size_t rank_;
  std::shared_ptr<Hub> hub_;
  std::vector<int> sockets_, pids_, pidfds_;
  std::vector<bool> gone_; // before it could be watched
  int stop_ = -1;
  std::uint64_t fork_epoch_;
  std::uint64_t next_id_ = 1;
  mutable std::mutex own_mutex_;
  std::map<std::uintptr_t, std::pair<std::size_t, std::uint64_t>> own_; // address: size, id
  std::atomic<bool> owns_ = false;
  std::atomic<bool> closed_ = false;
  std::atomic<bool> starved_ = false;
  std::thread watcher_;
};

// Counts the forks that led to this process.
std::uint64_t fork_epoch();

} // namespace unisono

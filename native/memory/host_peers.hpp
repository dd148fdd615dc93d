// The ranks of one host as seen by one of them: whose memory can be read, and who lives.
//
// Memory is shared in segments, each made by one rank and known to the others by its owner
// and a number. Between processes a segment is a sealed memfd whose descriptor travels
// over a socket; between threads it is plain memory. Nothing has a name in any file
// system, so nothing can be left behind.
//
// One thread per process watches: it takes in the segments of others as they arrive, sends
// what could not be sent at once, and learns of a death from the kernel at once. It never
// touches Python. Nobody but this thread ever waits for another rank here: one that is
// stopped takes in nothing, and what it is to be told is kept until it does.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "memory/cross_memory.hpp"
#include "memory/layout.hpp"
#include "support/fork.hpp"

namespace unisono {

// A file descriptor that is closed when the last who holds it lets go.
class Descriptor {
public:
  explicit Descriptor(int fd) : fd_(fd) {}
  ~Descriptor();
  Descriptor(const Descriptor &) = delete;
  Descriptor &operator=(const Descriptor &) = delete;
  int number() const { return fd_; }

private:
  int fd_;
};

// Memory that is unmapped when the last who uses it lets go.
class Memory {
public:
  // New shared memory, present in full, and its descriptor.
  static std::shared_ptr<Memory> make(std::size_t bytes, std::shared_ptr<Descriptor> &fd);
  // That of another rank. Its pages are mapped as they are touched: most ranks touch little
  // of most segments, and page tables for all of them would grow with the square of n.
  static std::shared_ptr<Memory> from(int fd, std::size_t bytes);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  std::byte *data() const { return data_; }
  std::size_t size() const { return size_; }
  // Maps all pages now, for one who is about to use all of it again and again.
  void populate() const;

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

class Mesh : ForkAware {
public:
  // Between threads: all ranks hold the same hub.
  Mesh(std::size_t rank, std::shared_ptr<Hub> hub);
  // Between processes: a connected socket and a process id for every other rank, and -1
  // for this one. The id is 0 where it is not known, because the rank is in another pid
  // namespace: then the end of its socket alone tells its death, and its private memory is
  // out of reach. The descriptors belong to the mesh from here on.
  Mesh(std::size_t rank, std::vector<int> sockets, std::vector<int> pids);
  ~Mesh();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return hub_->dead.size(); }
  bool between_threads() const { return sockets_.empty(); }

  // These never wait for another rank.
  std::uint64_t create(std::size_t bytes);
  std::shared_ptr<Memory> find(std::size_t owner, std::uint64_t id) const;
  void drop(std::uint64_t id) noexcept;
  // Drops a segment once nobody wants it any more, which is asked now and then.
  void drop_later(std::uint64_t id, std::function<bool(const Mesh &)> wanted);

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
  // Whether for some time now a segment could not be taken in or announced, for want of
  // memory or descriptors, or because the system refuses it.
  bool starved() const;
  void bury(std::size_t rank) { hub_->dead[rank].store(true, std::memory_order_release); }

  // In a child after fork all sockets are closed: they are the parent's, and must end when
  // it ends. The watching thread is not there, and nothing may be waited for.
  bool forked() const { return origin_.forked(); }
  void close();

private:
  struct Message;
  struct Announcement;
  struct Outgoing;
  enum class Sent { yes, full, later, gone };

  void in_child() override;
  void end(bool patient);
  void close_descriptors();
  void remember(std::uint64_t id, const std::shared_ptr<Memory> &memory);
  std::shared_ptr<Memory> forget(std::uint64_t id);
  bool drop_unwanted();

  // What travels over the sockets: host_peers_messages.cpp.
  void announce(const Announcement &announcement);
  bool tell(std::size_t rank, const Announcement &announcement);
  Sent send(std::size_t rank, const Announcement &announcement);
  Sent flush(std::size_t rank);
  bool receive(std::size_t from);
  void take_in(std::size_t from, const Message &message, std::shared_ptr<Memory> memory);
  bool drain(std::size_t from);
  void note_shortage(std::size_t rank, bool is_short);
  bool unsent();

  // The thread: host_peers_thread.cpp.
  struct Watching;
  void watch();
  void wake();

  std::size_t rank_;
  std::shared_ptr<Hub> hub_;
  std::vector<int> sockets_, pids_, pidfds_;
  std::vector<bool> gone_; // before it could be watched
  int wake_ = -1;
  Origin origin_;
  std::uint64_t next_id_ = 1;
  mutable std::mutex own_mutex_;
  std::map<std::uintptr_t, std::pair<std::size_t, std::uint64_t>> own_; // address: size, id
  std::atomic<bool> owns_ = false;
  std::atomic<bool> closed_ = false, hurried_ = false;
  std::mutex lingering_mutex_;
  std::vector<std::pair<std::uint64_t, std::function<bool(const Mesh &)>>> lingering_;
  std::mutex sending_; // of `outgoing_`, and of what is written to the sockets
  std::vector<Outgoing> outgoing_;
  std::vector<bool> short_; // the thread's: whose message waits for memory or descriptors
  std::atomic<std::int64_t> short_since_ = 0; // or 0
  std::atomic<bool> refused_ = false;         // the system lets us announce nothing
  Worker watcher_;
};

} // namespace unisono

// The ranks of one host as seen by one of them: their shared memory segments, and whether
// they are alive.
//
// A segment is made by one rank and identified by its owner and a number. Between processes
// it is a sealed memfd whose descriptor is sent over a socket; between threads it is plain
// memory. It has no name in a file system, so nothing is left behind by a crash. Descriptors
// of other things are sent in the same way.
//
// One thread per process receives the segments of others, sends what could not be sent at
// once, and is notified of a death by the kernel. It never calls Python. No other thread
// waits for another rank here: announcements to a rank that is stopped are kept until it
// receives them.

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

// A file descriptor that is closed with its last reference.
class Descriptor {
public:
  explicit Descriptor(int fd) : fd_(fd) {}
  // Closes it too if there is no memory for the object.
  static std::shared_ptr<Descriptor> owning(int fd);
  ~Descriptor();
  Descriptor(const Descriptor &) = delete;
  Descriptor &operator=(const Descriptor &) = delete;
  int number() const { return fd_; }

private:
  int fd_;
};

// A mapping that is removed with its last reference.
class Memory {
public:
  // New shared memory, all pages allocated, and its descriptor.
  static std::shared_ptr<Memory> make(std::size_t bytes, std::shared_ptr<Descriptor> &fd);
  // A segment of another rank. Its pages are mapped on first use: most ranks use little of
  // most segments, and page tables for all of them would grow with the square of n.
  static std::shared_ptr<Memory> from(int fd, std::size_t bytes);
  ~Memory();
  Memory(const Memory &) = delete;
  Memory &operator=(const Memory &) = delete;
  std::byte *data() const { return data_; }
  std::size_t size() const { return size_; }
  // Maps all pages now, for a segment that is used in full and often.
  void populate() const;

private:
  Memory(std::byte *data, std::size_t size) : data_(data), size_(size) {}
  std::byte *data_;
  std::size_t size_;
};

class SharedPages;

// The segments and the liveness of all ranks: private to a process, or shared by threads.
struct PeerTable {
  explicit PeerTable(std::size_t n) : dead(n), ended(n), segments(n), descriptors(n) {}
  std::mutex mutex;
  std::vector<std::atomic<bool>> dead;
  std::vector<std::atomic<bool>> ended; // as reported by the kernel
  std::vector<std::unordered_map<std::uint64_t, std::shared_ptr<Memory>>> segments;
  // That have arrived and were not taken; between processes only.
  std::vector<std::unordered_map<std::uint64_t, std::shared_ptr<Descriptor>>> descriptors;
};

class HostPeers : ForkAware {
public:
  // Between threads: all ranks share one table.
  HostPeers(std::size_t rank, std::shared_ptr<PeerTable> table);
  // Between processes: a connected socket and a process id for every other rank, and -1 for
  // this one. The id is 0 if it is not known, because the rank is in another pid namespace:
  // then its death shows only by the end of its socket, and its private memory cannot be
  // accessed. This object owns the descriptors.
  HostPeers(std::size_t rank, std::vector<int> sockets, std::vector<int> pids);
  ~HostPeers();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return table_->dead.size(); }
  bool between_threads() const { return sockets_.empty(); }

  // These never wait for another rank.
  std::uint64_t create(std::size_t bytes);
  std::shared_ptr<Memory> find(std::size_t owner, std::uint64_t id) const;
  void drop(std::uint64_t id) noexcept;
  // Drops a segment once `wanted` returns false; it is called from time to time.
  void drop_later(std::uint64_t id, std::function<bool(const HostPeers &)> wanted);

  // Descriptors of what is not mapped like a segment, such as memory of a device. A rank sends
  // one to some others, each of which takes it by its number; null if it has not arrived. One
  // that was dropped is neither sent nor kept any more. Between processes only.
  std::uint64_t send_descriptor(std::shared_ptr<Descriptor> fd,
                                const std::vector<std::size_t> &ranks);
  std::shared_ptr<Descriptor> take_descriptor(std::size_t owner, std::uint64_t id);
  void drop_descriptor(std::uint64_t id, const std::vector<std::size_t> &ranks) noexcept;

  // Makes memory that exists already a segment: shared_pages.hpp. Where it is part of one
  // that was made so, that counts once more. Between processes only.
  std::uint64_t share(std::byte *data, std::size_t bytes);
  std::shared_ptr<SharedPages> shared(std::uint64_t id) const;
  // Calls that use it go on, and hold it until they end.
  void unshare(std::uint64_t id) noexcept;

  // The position of a buffer in this rank's segments, if it is in one, and the pages if they
  // have replaced others.
  struct Located {
    ExposedBuffer exposed;
    std::shared_ptr<SharedPages> pages;
  };
  std::optional<Located> locate(const void *data, std::size_t bytes) const;
  // The address of a buffer that `owner` exposes; adds its segment to `hold`.
  PeerAddress resolve(std::size_t owner, ExposedBuffer exposed,
                std::vector<std::shared_ptr<Memory>> &hold) const;
  int pid(std::size_t rank) const { return pids_[rank]; }

  bool dead(std::size_t rank) const {
    return table_->dead[rank].load(std::memory_order_acquire);
  }
  // Whether the kernel reports that its process has ended. Unlike `dead`, which may be
  // inferred from a lost connection, this is certain.
  bool ended(std::size_t rank) const {
    return table_->ended[rank].load(std::memory_order_acquire);
  }
  // Whether for some time a segment could not be received or announced, for lack of memory
  // or descriptors, or because the system refuses it.
  bool out_of_resources() const;
  void mark_dead(std::size_t rank) {
    table_->dead[rank].store(true, std::memory_order_release);
  }

  // In a forked child all sockets are closed: they belong to the parent, and must end with
  // it. The thread does not exist there, and nothing may be waited for.
  bool forked() const { return origin_.forked(); }
  void close();

private:
  struct Message;
  struct Announcement;
  struct Outgoing;
  struct SharedSegment;
  enum class Sent { yes, full, later, gone };

  void in_child() override;
  void end(bool flushes);
  void close_descriptors();
  void remember(std::uint64_t id, const std::shared_ptr<Memory> &memory);
  std::shared_ptr<Memory> forget(std::uint64_t id);
  bool drop_unwanted();
  void end_sharing(std::uint64_t id) noexcept;

  // Messages on the sockets: host_peers_messages.cpp.
  void announce(const Announcement &announcement);
  void announce(const Announcement &announcement, const std::vector<std::size_t> &ranks);
  bool announce_to(std::size_t rank, const Announcement &announcement);
  Sent send(std::size_t rank, const Announcement &announcement);
  Sent flush(std::size_t rank);
  bool receive(std::size_t from);
  void store(std::size_t from, const Message &message, std::shared_ptr<Memory> memory,
             std::shared_ptr<Descriptor> fd);
  bool drain(std::size_t from);
  void note_shortage(std::size_t rank, bool is_short);
  bool unsent();

  // The thread: host_peers_thread.cpp.
  struct Watcher;
  void watch();
  void wake();

  std::size_t rank_;
  std::shared_ptr<PeerTable> table_;
  std::vector<int> sockets_, pids_, pidfds_;
  std::vector<bool> gone_at_start_; // ended before it could be watched
  int wake_ = -1;
  Origin origin_;
  std::uint64_t next_id_ = 1;
  mutable std::mutex own_mutex_;
  struct Own {
    std::size_t bytes;
    std::uint64_t id;
    std::shared_ptr<SharedPages> pages; // or null; holds its SharedSegment
    std::size_t count = 1;              // how often they were shared
  };
  std::mutex sharing_; // held to share and unshare
  std::map<std::uintptr_t, Own> own_; // by address
  std::atomic<bool> owns_ = false;
  std::atomic<bool> closed_ = false, immediate_ = false;
  std::mutex dropped_later_mutex_;
  std::vector<std::pair<std::uint64_t, std::function<bool(const HostPeers &)>>>
      dropped_later_;
  std::mutex sending_; // guards `outgoing_` and writes to the sockets
  std::vector<Outgoing> outgoing_;
  // used by the thread: ranks whose message waits for memory or descriptors
  std::vector<bool> short_;
  std::atomic<std::int64_t> short_since_ = 0; // or 0
  std::atomic<bool> refused_ = false; // the system refuses announcements
  Worker watcher_;
};

} // namespace unisono

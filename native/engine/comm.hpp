// A communicator as one rank sees it: its shared memory, its work in flight, its verdict.
//
// Collectives go one after the other, in the order they were called. A call that finds
// nothing before it runs on its caller's thread; everything else is queued, and the mesh's
// progress thread (or the queue's next waiter) advances it. Sends and receives do not
// stand in that queue.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "engine/collective.hpp"
#include "engine/task.hpp"
#include "engine/trace.hpp"
#include "memory/host_peers.hpp"
#include "memory/wait.hpp"
#include "memory/zero_copy.hpp"
#include "p2p/channel.hpp"

namespace unisono {

class Lifeline;
class Progress;
struct Event;

// What a process has once, beside its mesh.
struct Engine {
  std::shared_ptr<Mesh> mesh;
  std::shared_ptr<Recorder> recorder;
  std::shared_ptr<Progress> progress;
  std::shared_ptr<Lifeline> lifeline; // to other hosts, if there are any
  std::shared_ptr<Trace> trace = std::make_shared<Trace>();
};

class Comm {
public:
  // `here` are the ranks of this host, as numbered in this communicator. `agreed` is a
  // number by which all its ranks know it.
  Comm(Engine engine, std::vector<std::size_t> ranks, std::size_t rank,
       std::vector<std::size_t> here, std::shared_ptr<Memory> memory, std::size_t half,
       std::uint64_t id, std::uint64_t agreed);
  ~Comm();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return ranks_.size(); }
  std::size_t world_rank(std::size_t rank) const { return ranks_[rank]; }
  const Layout &layout() const { return layout_; }
  const std::shared_ptr<Memory> &memory() const { return memory_; }
  Mesh &mesh() const { return *engine_.mesh; }
  Engine &engine() { return engine_; }
  Trace &trace() { return *engine_.trace; }
  std::uint64_t id() const { return id_; }
  std::uint64_t agreed() const { return agreed_; }
  // The ranks of this host, beginning with the one after this rank and ending with it.
  const std::vector<std::size_t> &here() const { return here_; }
  bool far(std::size_t rank) const { return !far_.empty() && far_[rank]; }
  Outlet &outlet(std::size_t rank) { return *outlets_[rank]; }
  const Outlet &outlet(std::size_t rank) const { return *outlets_[rank]; }
  Inlet &inlet(std::size_t rank) { return *inlets_[rank]; }
  const Inlet &inlet(std::size_t rank) const { return *inlets_[rank]; }
  Patience patience;
  Crowd crowd;
  std::int64_t late_after = 5'000'000'000; // ns until a late rank is warned about

  // Advances `op` on this thread until it ends. `interrupted` is asked now and then.
  Task::State drive(Task &op, Patience patience, const std::function<bool()> &interrupted);
  // The same for at most `spins` looks and without ever sleeping.
  bool try_drive(Task &op, std::uint32_t spins);

  // A collective on the caller's thread: null if it has to queue.
  Collective *begin_inline(std::shared_ptr<const Plan> plan, const void *input,
                           void *output, std::int64_t timeout);
  void end_inline();

  // What is queued: comm_queue.cpp.
  std::shared_ptr<Task> submit(std::shared_ptr<const Plan> plan, const void *input,
                             void *output, std::int64_t timeout, std::uint32_t site = 0);
  std::shared_ptr<Task> submit(std::shared_ptr<Transfer> transfer);
  void cancel(const std::shared_ptr<Task> &op);
  // Advances what is queued; whether anything moved, and whether anything is left.
  bool progress(bool *left);
  // The sockets that what is queued waits for; true if it waits for nothing else.
  bool interests(std::vector<pollfd> &into);
  std::vector<std::size_t> missing(Task &op);

  // Sleeps until something may have come for `op`, but not long.
  void doze(const Task &op, std::int64_t nap);

  // What stops this communicator, if anything does.
  Verdict verdict() const {
    return Verdict::of(layout_.control().abort.load(std::memory_order_acquire));
  }
  // Breaks it for all ranks; the first verdict stands.
  Verdict condemn(Verdict verdict);
  // What a rank of another host tells.
  void hear(const Event &event);
  // A verdict that came from a rank, or that what came from it cannot be right.
  Verdict believed(const Verdict &verdict, std::size_t from) const;
  // Says that this rank waits until it is connected to another, before its call begins;
  // with its own rank, that it does no longer. Other hosts are told if it lasts.
  void tell_connecting(std::size_t rank, bool lasts);
  // Whether `op`, which is blocked, must fail now: somebody died, or its time is up.
  bool doomed(Task &op);
  // Whether `op`, which was blocked, must fail, has come about after all, or goes on waiting.
  Status judge(Task &op);
  bool gone(std::size_t rank) const {
    return mesh().dead(world_rank(rank)) ||
           layout_.block(rank).left.load(std::memory_order_acquire) != 0;
  }
  // The first of its ranks that is dead, or its size if all live.
  std::size_t dead() const;
  void record(Task &op, const Note &note, std::int64_t now);
  // Who holds `op` up: those it waits for, or those that they in turn wait for.
  std::vector<std::size_t> culprits(const Task &op) const;
  // Whom the last call on its caller's thread was waiting for when its time was up.
  const std::vector<std::size_t> &awaited() const { return inline_.missed; }
  // Bytes that this rank has sent in calls that are done.
  std::uint64_t sent_bytes() const { return sent_.load(std::memory_order_relaxed); }
  void close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  Post &post() { return post_; }
  Lending &lending() { return lending_; }

  // The state of the collective in progress; one at a time touches it.
  std::uint64_t seq = 0;
  std::uint64_t generation = 1;
  std::vector<std::int32_t> window_readers[2]; // of each half, who reads what is in it
  std::vector<std::uint64_t> seen; // of each rank's progress, what was read last

private:
  std::size_t culprit(std::size_t rank, std::int64_t since) const;
  void accuse(const Verdict &verdict);
  void say_goodbye();
  void answer(const Verdict &verdict);
  void tell_waiting(Task &op, std::int64_t waited);
  bool calls_otherwise(std::size_t rank, std::uint64_t seq) const;
  bool has_left(std::size_t rank, const Task &op) const;
  // Whoever advances the collectives claims them first; false if somebody else is at it.
  bool claim() {
    bool idle = false;
    return busy_.compare_exchange_strong(idle, true, std::memory_order_acquire);
  }
  void release() { busy_.store(false, std::memory_order_release); }
  bool advance_queue(bool *left);
  bool advance_transfers(bool *left);
  Status attempt(Task &op);
  std::shared_ptr<Task> next();
  void settle(Task &op, Status status);
  void trace_call(const Task &op);
  Status step(Task &op);
  void wake_waiters();
  void part();
  void warn(const Task &op, std::int64_t waited) const;

  Engine engine_;
  std::vector<std::size_t> ranks_;
  std::size_t rank_;
  std::shared_ptr<Memory> memory_;
  Layout layout_;
  std::uint64_t id_, agreed_;
  std::vector<std::size_t> here_;
  std::vector<bool> far_; // by rank, whether on another host; empty: none is
  std::vector<std::unique_ptr<Outlet>> outlets_;
  std::vector<std::unique_ptr<Inlet>> inlets_;
  Lending lending_;
  Collective inline_;
  std::atomic<bool> busy_ = false; // somebody advances the collectives
  std::atomic<std::uint32_t> queued_ = 0;
  std::atomic<std::uint64_t> sent_ = 0;
  std::mutex transferring_; // held by who advances messages that are in flight
  std::mutex mutex_;
  std::deque<std::shared_ptr<Task>> queue_;
  std::vector<std::shared_ptr<Task>> transfers_;
  std::atomic<bool> closed_ = false;
  Post post_;
};

} // namespace unisono

// A communicator as one rank sees it: its shared memory, its outstanding work, its failure.
//
// Collectives run one after another, in the order of the calls. A call that finds the queue
// empty runs on its caller's thread; any other is queued, and the progress thread, or a
// thread that waits for it, advances it. Sends and receives do not pass through that queue.

#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/collective.hpp"
#include "engine/task.hpp"
#include "engine/trace.hpp"
#include "memory/host_peers.hpp"
#include "memory/wait.hpp"
#include "memory/zero_copy.hpp"
#include "p2p/channel.hpp"

namespace unisono {

class IoThreads;
class Lifeline;
class Progress;
struct Event;

// What a process has once: its view of the local ranks, its recorder, its threads.
struct Engine {
  std::shared_ptr<HostPeers> host_peers;
  std::shared_ptr<Recorder> recorder;
  std::shared_ptr<Progress> progress;
  std::shared_ptr<Lifeline> lifeline; // to other hosts, if there are any
  std::shared_ptr<IoThreads> io_threads; // for data between hosts, if there are cores for it
  std::shared_ptr<Trace> trace = std::make_shared<Trace>();
};

class Comm {
public:
  // `local_ranks` are the ranks of this host, as numbered in this communicator. `shared_id`
  // identifies the communicator on all of its ranks.
  Comm(Engine engine, std::vector<std::size_t> ranks, std::size_t rank,
       std::vector<std::size_t> local_ranks, std::shared_ptr<Memory> memory,
       std::size_t half, std::uint64_t id, std::uint64_t shared_id);
  ~Comm();

  std::size_t rank() const { return rank_; }
  std::size_t size() const { return ranks_.size(); }
  std::size_t world_rank(std::size_t rank) const { return ranks_[rank]; }
  const Layout &layout() const { return layout_; }
  const std::shared_ptr<Memory> &memory() const { return memory_; }
  HostPeers &host_peers() const { return *engine_.host_peers; }
  Engine &engine() { return engine_; }
  Trace &trace() { return *engine_.trace; }
  std::uint64_t id() const { return id_; }
  std::uint64_t shared_id() const { return shared_id_; }
  // The ranks of this host, beginning with the one after this rank and ending with this
  // rank.
  const std::vector<std::size_t> &local_ranks() const { return local_ranks_; }
  bool is_remote(std::size_t rank) const { return !remote_.empty() && remote_[rank]; }
  SendStream &send_stream(std::size_t rank) { return *send_streams_[rank]; }
  const SendStream &send_stream(std::size_t rank) const { return *send_streams_[rank]; }
  ReceiveStream &receive_stream(std::size_t rank) { return *receive_streams_[rank]; }
  const ReceiveStream &receive_stream(std::size_t rank) const {
    return *receive_streams_[rank];
  }
  WaitPolicy wait_policy;
  Oversubscription oversubscription;
  std::int64_t late_after = 5'000'000'000; // ns until a late rank is warned about
  std::string late_hint; // what a warning ends with; set before the first call

  // Advances `op` on this thread until it ends. `interrupted` is called from time to time.
  Task::State drive(Task &op, WaitPolicy wait_policy,
                    const std::function<bool()> &interrupted);
  // The same for at most `spins` attempts, without sleeping.
  bool try_drive(Task &op, std::uint32_t spins);

  // Begins a collective on the caller's thread: null if it has to be queued.
  Collective *begin_inline(std::shared_ptr<const Plan> plan, const void *input,
                           void *output, std::int64_t timeout);
  void end_inline();

  // Queued work: comm_queue.cpp. If it is `brief` and the queue was empty, the caller's
  // thread attempts it once.
  std::shared_ptr<Task> submit(std::shared_ptr<const Plan> plan, const void *input,
                             void *output, std::int64_t timeout, std::uint32_t site = 0,
                             bool brief = false);
  std::shared_ptr<Task> submit(std::shared_ptr<Transfer> transfer);
  void cancel(const std::shared_ptr<Task> &op);
  // Advances queued work; whether anything moved, and whether anything is left.
  bool progress(bool *left);
  // The sockets that queued work waits for; true if it waits for nothing else.
  bool poll_fds(std::vector<pollfd> &into);
  std::vector<std::size_t> missing(Task &op);

  // Sleeps for a short time, or until there may be progress for `op`.
  void sleep_until_ready(const Task &op, std::int64_t nap);

  // Why this communicator is aborted, if it is.
  Failure failure() const {
    return Failure::of(layout_.control().abort.load(std::memory_order_acquire));
  }
  // Whether a failure ends the next call that this rank begins.
  bool ends_next_call() const { return failure().ends(seq.load() + 1); }
  // Aborts the communicator for all ranks. The failure that is kept is returned: the first, or
  // this one if the first is that of a rank that closed in a later call.
  Failure abort(Failure failure);
  // The same for a mismatch whose two calls the caller knows: that of the rank that caused it
  // and this rank's. Their notes must have the number of the call in the failure.
  Failure abort_mismatch(Failure failure, const Note &theirs, const Note &mine);
  // Publishes what this rank called, if it is one of the two and knows more of its call.
  void describe_differing(const Note &mine);
  // Handles an event that a rank of another host has announced.
  void handle_event(const Event &event);
  // A failure received from a rank, or `corrupted` if it cannot be valid.
  Failure validated(const Failure &failure, std::size_t from) const;
  // Publishes that this rank waits for a connection to another before its call begins; with
  // its own rank, that it no longer waits. Other hosts are informed if `lasts`.
  void announce_connecting(std::size_t rank, bool lasts);
  // Fails `op`, which is blocked, if it must fail now: a rank died, it timed out, the
  // communicator is aborted. Done if it completes after all, blocked if it goes on waiting.
  Status check_blocked(Task &op);
  bool is_gone(std::size_t rank) const {
    return host_peers().dead(world_rank(rank)) || has_left(rank);
  }
  // Whether a rank has announced that it has closed this communicator. What becomes of its
  // process later is no death here.
  bool has_left(std::size_t rank) const;
  // The first of its ranks that died before it had closed, or its size if none did.
  std::size_t first_dead() const;
  void record(Task &op, const Note &note, std::int64_t now);
  // The ranks that block `op`: those it waits for, or those that they wait for in turn.
  std::vector<std::size_t> blocking_ranks(const Task &op) const;
  // The ranks that the last call on its caller's thread waited for when it timed out.
  const std::vector<std::size_t> &awaited() const { return inline_.late_ranks; }
  // Bytes that this rank has sent in completed calls.
  std::uint64_t sent_bytes() const { return sent_.load(std::memory_order_relaxed); }
  // By calls on devices, which do not go over links of the host.
  std::uint64_t sent_on_devices() const {
    return sent_on_devices_.load(std::memory_order_relaxed);
  }
  void count_sent_on_devices(std::uint64_t bytes) {
    sent_on_devices_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void close();
  bool closed() const { return closed_.load(std::memory_order_acquire); }

  Channels &channels() { return channels_; }
  ZeroCopy &zero_copy() { return zero_copy_; }

  // The state of the collective in progress; accessed by the thread that holds the claim.
  std::atomic<std::uint64_t> seq = 0; // any thread reads it, for errors
  std::uint64_t generation = 1;
  std::vector<std::int32_t> window_readers[2]; // the readers of each half
  std::vector<std::uint64_t> seen; // the progress of each rank, as read last

private:
  // Why `op`, which is blocked, must fail now, if it must. Publishes what it waits for.
  Failure find_failure(Task &op);
  bool may_be_complete(const Task &op, const Failure &failure) const;
  std::size_t follow_waits(std::size_t rank, std::int64_t since) const;
  std::size_t longest_unchanged(const std::vector<std::size_t> &circle) const;
  void publish_mismatch(const Failure &failure);
  Failure set_failure(Failure failure);
  // Whether `failure` was stored; `found` is the word that stands now.
  bool store_failure(const Failure &failure, std::uint64_t &found);
  void announce_closing();
  void announce_own_call(const Failure &failure);
  void announce_wait(Task &op, std::int64_t waited);
  bool called_differently(std::size_t rank, std::uint64_t seq) const;
  bool has_closed(std::size_t rank, const Task &op) const;
  // A thread claims the collectives before it advances them; false if another thread has.
  bool claim() {
    bool idle = false;
    return busy_.compare_exchange_strong(idle, true, std::memory_order_acquire);
  }
  void release() { busy_.store(false, std::memory_order_release); }
  bool advance_queue(bool *left, const Task *only = nullptr);
  bool advance_transfers(bool *left);
  Status attempt(Task &op);
  std::shared_ptr<Task> next();
  void complete(Task &op, Status status);
  void trace_call(const Task &op);
  Status step(Task &op);
  void wake_waiters();
  void close_queue();
  void end_streams();
  Failure closed_failure() const;
  bool claim_to_close();
  void make_streams();
  void warn(const Task &op, std::int64_t waited) const;

  Engine engine_;
  std::vector<std::size_t> ranks_;
  std::size_t rank_;
  std::shared_ptr<Memory> memory_;
  Layout layout_;
  std::uint64_t id_, shared_id_;
  std::vector<std::size_t> local_ranks_;
  std::vector<bool> remote_; // by rank, whether on another host; empty: none is
  std::vector<std::unique_ptr<SendStream>> send_streams_;
  std::vector<std::unique_ptr<ReceiveStream>> receive_streams_;
  ZeroCopy zero_copy_;
  Collective inline_;
  std::atomic<bool> busy_ = false; // a thread advances the collectives
  std::atomic<std::uint32_t> queued_ = 0;
  std::atomic<std::uint64_t> sent_ = 0, sent_on_devices_ = 0;
  std::mutex transferring_; // held by the thread that advances messages
  std::mutex mutex_;
  std::deque<std::shared_ptr<Task>> queue_;
  std::vector<std::shared_ptr<Task>> transfers_;
  bool queue_closed_ = false; // under `mutex_`; after `closed_`
  std::atomic<bool> closed_ = false;
  Channels channels_;
};

} // namespace unisono

#include "engine/progress.hpp"

#include <algorithm>

#include "engine/comm.hpp"
#include "net/event.hpp"

namespace unisono {

namespace {

constexpr std::size_t most_kept = 4096;

} // namespace

// A forked child has no such thread, and the lock may be held for ever: there every
// function returns at once.

Progress::~Progress() {
  if (origin_.forked())
    return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void Progress::add(Comm *comm) {
  if (origin_.forked())
    return;
  std::lock_guard lock(mutex_);
  comms_.push_back(comm);
  std::erase_if(early_events_, [comm](const Event &event) {
    const bool its = event.comm == comm->shared_id();
    if (its)
      comm->handle_event(event);
    return its;
  });
}

void Progress::handle_event(const Event &event) {
  std::lock_guard lock(mutex_);
  bool known = false;
  for (Comm *comm : comms_)
    if (comm->shared_id() == event.comm) {
      comm->handle_event(event);
      known = true;
    }
  if (!known &&
      std::find(ended_comms_.begin(), ended_comms_.end(), event.comm) == ended_comms_.end())
    store_early(event);
}

// Ranks join a communicator at different times: events of it may arrive before this rank
// has joined. If there are many, the oldest are dropped, for some may never be needed.
void Progress::store_early(const Event &event) {
  const auto same = [&](const Event &e) { // of a rank's waits only the last counts
    return e.kind == Event::Kind::waits && event.kind == e.kind && e.comm == event.comm &&
           e.rank == event.rank;
  };
  std::erase_if(early_events_, same);
  early_events_.push_back(event);
  if (early_events_.size() > most_kept)
    early_events_.pop_front();
}

void Progress::remove(Comm *comm) {
  if (origin_.forked())
    return;
  std::unique_lock lock(mutex_);
  std::erase(comms_, comm);
  ended_comms_.push_back(comm->shared_id());
  if (ended_comms_.size() > most_kept)
    ended_comms_.pop_front();
  // The thread may be in the middle of a round; the next one is without this communicator.
  // The thread may be so busy that no idle moment is seen.
  changed_.wait(lock, [this, round = round_] { return !working_ || round_ != round; });
}

void Progress::wake() {
  if (origin_.forked())
    return;
  {
    std::lock_guard lock(mutex_);
    ++requests_;
    if (!started_) {
      started_ = true;
      thread_.start("unisono-calls", [this] { run(); });
    }
  }
  changed_.notify_all();
}

// Sleeps until data comes from another host, for a short time; false if none is awaited.
bool Progress::sleep_until_ready(const std::vector<Comm *> &comms) {
  std::vector<pollfd> sockets;
  for (Comm *comm : comms)
    comm->poll_fds(sockets);
  if (sockets.empty())
    return false;
  const timespec limit{0, 100'000};
  ::ppoll(sockets.data(), sockets.size(), &limit, nullptr);
  return true;
}

void Progress::run() {
  std::unique_lock lock(mutex_);
  std::uint64_t handled = 0;
  std::uint32_t idle = 0;
  while (!stop_) {
    const std::uint64_t requests = requests_;
    bool moved = false, left = false;
    const std::vector<Comm *> comms = comms_;
    working_ = true;
    lock.unlock();
    for (Comm *comm : comms) {
      bool more = false;
      moved = comm->progress(&more) || moved;
      left = left || more;
    }
    if (left && !moved) {
      ++idle;
      // Spinning would take time from threads that compute.
      if (idle < 200)
        relax();
      else if (idle < 300)
        ::sched_yield();
      else if (!sleep_until_ready(comms))
        for (Comm *comm : comms) { // a sleep that any local rank can end
          auto &asleep = comm->layout().block(comm->rank()).asleep;
          Backoff nap({0, 0}, comm->layout().control(), asleep,
                      comm->oversubscription);
          nap.pause([&] { bool more; return comm->progress(&more); });
          break;
        }
    } else {
      idle = 0;
    }
    lock.lock();
    working_ = false;
    ++round_;
    changed_.notify_all();
    if (!left) {
      handled = requests;
      changed_.wait(lock, [&] { return stop_ || requests_ != handled; });
    }
  }
}

} // namespace unisono

#include "engine/progress.hpp"

#include <algorithm>

#include "engine/comm.hpp"
#include "net/event.hpp"

namespace unisono {

namespace {

constexpr std::size_t most_kept = 4096;

} // namespace

// In a forked child the thread is not there, and another may have held the lock: whoever
// comes there leaves everything as it is.

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
  std::erase_if(early_, [comm](const Event &event) {
    const bool its = event.comm == comm->agreed();
    if (its)
      comm->hear(event);
    return its;
  });
}

void Progress::hear(const Event &event) {
  std::lock_guard lock(mutex_);
  bool known = false;
  for (Comm *comm : comms_)
    if (comm->agreed() == event.comm) {
      comm->hear(event);
      known = true;
    }
  if (!known && std::find(ended_.begin(), ended_.end(), event.comm) == ended_.end())
    keep(event);
}

// Some join a communicator later than others, who may break it, wait in it and even close
// it before. The oldest go first if there are many, for some may never be asked for.
void Progress::keep(const Event &event) {
  const auto same = [&](const Event &e) { // of how a rank waits, the last is all that counts
    return e.kind == Event::Kind::waits && event.kind == e.kind && e.comm == event.comm &&
           e.rank == event.rank;
  };
  std::erase_if(early_, same);
  early_.push_back(event);
  if (early_.size() > most_kept)
    early_.pop_front();
}

void Progress::remove(Comm *comm) {
  if (origin_.forked())
    return;
  std::unique_lock lock(mutex_);
  std::erase(comms_, comm);
  ended_.push_back(comm->agreed());
  if (ended_.size() > most_kept)
    ended_.pop_front();
  // The thread may be in the middle of a round; the next is without this one. It may be
  // so busy that we never see it between two.
  changed_.wait(lock, [this, round = round_] { return !working_ || round_ != round; });
}

void Progress::wake() {
  if (origin_.forked())
    return;
  {
    std::lock_guard lock(mutex_);
    ++news_;
    if (!started_) {
      started_ = true;
      thread_.start([this] { run(); });
    }
  }
  changed_.notify_all();
}

// A nap that what comes from other hosts can end; false if nothing is awaited from there.
bool Progress::doze(const std::vector<Comm *> &comms) {
  std::vector<pollfd> sockets;
  for (Comm *comm : comms)
    comm->interests(sockets);
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
    const std::uint64_t news = news_;
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
      // Beside a thread that computes, spinning takes more than it gives.
      if (idle < 200)
        relax();
      else if (idle < 300)
        ::sched_yield();
      else if (!doze(comms))
        for (Comm *comm : comms) { // a nap that any of its peers can end
          auto &asleep = comm->layout().block(comm->rank()).asleep;
          Backoff nap({0, 0}, comm->layout().control(), asleep,
                      comm->crowd);
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
      handled = news;
      changed_.wait(lock, [&] { return stop_ || news_ != handled; });
    }
  }
}

} // namespace unisono

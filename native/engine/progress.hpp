// The thread that advances what nobody waits for. It never touches Python.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "support/fork.hpp"

namespace unisono {

class Comm;
struct Event;

class Progress {
public:
  ~Progress();
  void add(Comm *comm);
  void remove(Comm *comm); // returns when the thread no longer looks at it
  void wake();             // there is something new to do; starts the thread if need be
  // What a rank of another host tells of the communicator that all know by a number.
  void hear(const Event &event);

private:
  void run();
  static bool doze(const std::vector<Comm *> &comms);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Comm *> comms_;
  void keep(const Event &event);
  std::deque<Event> early_;         // of communicators that are not here yet
  std::deque<std::uint64_t> ended_; // those that are here no longer, the last of them
  bool started_ = false, stop_ = false, working_ = false;
  std::uint64_t news_ = 0, round_ = 0;
  Origin origin_;
  Worker thread_;
};

} // namespace unisono

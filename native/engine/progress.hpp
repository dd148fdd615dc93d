// The thread that advances work that no thread waits for. It never calls Python.

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
  void remove(Comm *comm); // returns when the thread no longer uses it
  void wake(); // there is new work; starts the thread if necessary
  // Handles an event about the communicator with the event's shared id.
  void handle_event(const Event &event);

private:
  void run();
  static bool sleep_until_ready(const std::vector<Comm *> &comms);
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Comm *> comms_;
  void store_early(const Event &event);
  std::deque<Event> early_events_; // of communicators that do not exist here yet
  std::deque<std::uint64_t> ended_comms_; // the last that were closed
  bool started_ = false, stop_ = false, working_ = false;
  std::uint64_t requests_ = 0, round_ = 0;
  Origin origin_;
  Worker thread_;
};

} // namespace unisono

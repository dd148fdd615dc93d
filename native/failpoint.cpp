#include "failpoint.hpp"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <thread>

namespace unisono {

std::atomic<bool> failpoints_armed = false;

namespace {

struct Armed {
  std::string name;
  long hit;
  std::string action;
};

std::mutex mutex;
std::vector<Armed> armed;

void act(const std::string &action) {
  if (action == "kill") {
    std::raise(SIGKILL);
  } else if (action == "stop") {
    std::raise(SIGSTOP);
  } else if (action.rfind("sleep=", 0) == 0) {
    std::this_thread::sleep_for(std::chrono::milliseconds(std::stol(action.substr(6))));
  }
}

} // namespace

std::vector<std::string> failpoint_names() {
  return {"segment.make",  "segment.announce", "call.begin",   "lead.done",
          "arrive.posted", "arrive.seen",      "action.begin", "action.done",
          "deliver",       "generation.done",  "exit.wait",    "call.end",
          "send.header",   "send.part",        "recv.part",    "message.offered",
          "stream.send",   "stream.receive",   "reach.write"};
}

void arm_failpoints(const std::string &spec) {
  std::lock_guard lock(mutex);
  armed.clear();
  std::istringstream items(spec);
  for (std::string item; std::getline(items, item, ',');) {
    const auto one = item.find(':'), two = item.find(':', one + 1);
    if (one == std::string::npos || two == std::string::npos)
      throw std::invalid_argument("a failpoint is name:hit:action, not " + item);
    Armed a{item.substr(0, one), std::atol(item.substr(one + 1, two - one - 1).c_str()),
            item.substr(two + 1)};
    bool known = false;
    for (const std::string &name : failpoint_names())
      known = known || name == a.name;
    const bool can = a.action == "kill" || a.action == "stop" || a.action.rfind("sleep=", 0) == 0;
    if (!known || a.hit < 1 || !can)
      throw std::invalid_argument("no such failpoint: " + item);
    armed.push_back(a);
  }
  failpoints_armed.store(!armed.empty(), std::memory_order_relaxed);
}

void failpoint_passed(const char *name) {
  std::string action;
  {
    std::lock_guard lock(mutex);
    for (Armed &a : armed)
      if (a.name == name && --a.hit == 0)
        action = a.action;
  }
  if (!action.empty())
    act(action);
}

} // namespace unisono

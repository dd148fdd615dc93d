#include "test/failpoint.hpp"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <csignal>
#include <cstdlib>
#include <mutex>
#include <random>
#include <sstream>
#include <stdexcept>
#include <thread>

#include "support/failpoint.hpp"

namespace unisono {

std::atomic<bool> failpoints_armed = false;

namespace {

struct Armed {
  std::string name;
  long hit;
  bool every; // not at one passage alone
  std::string action;
  long value; // what stands behind its =
};

std::mutex mutex;
std::vector<Armed> armed;
std::mt19937_64 chance;

void act(const Armed &what, std::uint64_t drawn) {
  if (what.action == "kill") {
    std::raise(SIGKILL);
  } else if (what.action == "stop") {
    std::raise(SIGSTOP);
  } else if (what.action == "sleep") {
    std::this_thread::sleep_for(std::chrono::milliseconds(what.value));
  } else if (what.action == "jitter" && drawn % 8 == 0) {
    const auto most = std::uint64_t(what.value) + 1;
    std::this_thread::sleep_for(std::chrono::microseconds(drawn / 8 % most));
  }
}

bool is_one_of(const std::vector<std::string> &all, const std::string &name) {
  return std::find(all.begin(), all.end(), name) != all.end();
}

bool is_known(const Armed &a) {
  if (a.action == "short" || a.action == "cut")
    return (is_one_of(cut_names(), a.name) || is_one_of(page_names(), a.name)) && a.every &&
           a.value >= 1;
  const bool timed = (a.action == "sleep" || a.action == "jitter") && a.value >= 0;
  const bool placed = is_one_of(failpoint_names(), a.name) ||
                      is_one_of(device_names(), a.name) || is_one_of(wait_names(), a.name) ||
                      is_one_of(page_names(), a.name) || is_one_of(fabric_names(), a.name);
  return placed && (timed || a.action == "kill" || a.action == "stop");
}

Armed parsed(const std::string &item) {
  const auto one = item.find(':'), two = item.find(':', one + 1);
  if (one == std::string::npos || two == std::string::npos)
    throw std::invalid_argument("a failpoint is name:hit:action, not " + item);
  const std::string hit = item.substr(one + 1, two - one - 1), what = item.substr(two + 1);
  const auto equals = what.find('=');
  Armed a{item.substr(0, one), std::atol(hit.c_str()), hit == "*",
          what.substr(0, equals), -1};
  if (equals != std::string::npos)
    a.value = std::atol(what.c_str() + equals + 1);
  if ((a.hit < 1 && !a.every) || !is_known(a))
    throw std::invalid_argument("no such failpoint: " + item);
  return a;
}

} // namespace

std::vector<std::string> failpoint_names() {
  return {"segment.make",  "segment.announce", "call.begin",   "lead.done",
          "arrive.posted", "arrive.seen",      "action.begin", "action.done",
          "deliver",       "generation.done",  "exit.wait",    "call.end",
          "send.header",   "send.part",        "recv.part",    "message.offered",
          "stream.send",   "stream.receive",   "reach.write",
          "io.step"};
}

std::vector<std::string> device_names() { return {"device.move", "device.exchange"}; }

std::vector<std::string> fabric_names() { return {"ucx.send", "ucx.receive"}; }

std::vector<std::string> wait_names() { return {"wait.yield"}; }

std::vector<std::string> page_names() { return {"pages.copied", "pages.map"}; }

std::vector<std::string> cut_names() {
  return {"socket.send", "stream.receive", "tls.send",
          "tls.receive", "life.receive",   "message.frame",
          "stream.part"};
}

void arm_failpoints(const std::string &spec) {
  std::vector<Armed> all;
  std::istringstream items(spec);
  for (std::string item; std::getline(items, item, ',');)
    all.push_back(parsed(item));
  std::lock_guard lock(mutex);
  armed = std::move(all);
  chance.seed(1);
  for (const Armed &a : armed)
    if (a.action == "cut")
      chance.seed(std::uint64_t(a.value));
  failpoints_armed.store(!armed.empty(), std::memory_order_relaxed);
}

void failpoint_passed(const char *name) {
  std::vector<Armed> due;
  std::uint64_t drawn;
  {
    std::lock_guard lock(mutex);
    drawn = chance();
    for (Armed &a : armed)
      if (a.name == name && (a.every || --a.hit == 0))
        due.push_back(a);
  }
  for (const Armed &a : due)
    act(a, drawn);
}

std::size_t failpoint_allows(const char *name, std::size_t bytes) {
  std::lock_guard lock(mutex);
  for (const Armed &a : armed) {
    if (a.name != name || (a.action != "short" && a.action != "cut"))
      continue;
    const std::uint64_t drawn = chance();
    if (drawn % 2 == 0)
      return 0;
    const std::uint64_t scale = std::uint64_t(1) << drawn / 2 % 12;
    const std::size_t most =
        a.action == "short" ? std::size_t(a.value) : 1 + std::size_t(drawn / 64 % scale);
    return std::min(bytes, most);
  }
  return bytes;
}

} // namespace unisono

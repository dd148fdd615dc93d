// Discrete-event simulation of a schedule: when every message is sent and arrives.
//
// Messages wait for the slots that they read and overwrite (order.hpp), are sent in the
// order of their rank's steps (or, with streams, in that order for each peer), and then
// share links fairly (network.hpp). Docs: docs/simulation.md.

#pragma once

#include <cstdint>
#include <vector>

#include "simulate/agenda.hpp"
#include "simulate/network.hpp"
#include "simulate/order.hpp"

namespace unisono::sim {

struct Costs {
  double overhead = 0; // of a rank, for each message it sends
  double encode = 0;   // seconds per byte, before it is sent
  double decode = 0;   // seconds per byte, after it arrives
  double reduce = 0;   // seconds per byte that is reduced
  double ratio = 1;    // the fraction of the bytes that is sent
  bool streams = false; // messages to different ranks do not wait for each other
  double duplex = 1;   // the fraction of a link's bandwidth while its other direction is busy
};

class Simulator {
public:
  Simulator(std::int64_t n, std::int64_t num_slots, std::vector<double> sizes,
            const std::vector<double> &bandwidth, const std::vector<std::int64_t> &twins,
            Costs costs);
  Simulator(const Simulator &) = delete;
  Simulator &operator=(const Simulator &) = delete;

  // Adds a step: its messages and their dependencies. False if a transfer is out of range.
  bool add(const std::vector<Transfer> &step) { return order_.add(step); }
  // Pairs (src * n + dst) that have no path yet, in the order they appeared.
  const std::vector<std::int64_t> &unknown() const { return order_.unknown(); }
  // The paths of all of them: links first[k]..first[k+1]-1, and latencies.
  bool know(const std::vector<std::int64_t> &first, const std::vector<std::int64_t> &links,
            const std::vector<double> &latency);
  // Runs to the end and returns the number of events. Ranks begin at `begin`.
  std::int64_t run(const std::vector<double> &begin);

  const std::vector<Message> &messages() const { return order_.messages(); }
  const std::vector<double> &carried() const { return network_.carried(); }
  const std::vector<double> &finished() const { return finished_; }
  // The edges found so far, as before * (number of messages) + after.
  std::vector<std::int64_t> edges() const { return order_.edges(); }

private:
  Message &message(std::int32_t id) {
    return order_.messages()[static_cast<std::size_t>(id)];
  }
  void begin_ranks(const std::vector<double> &begin);
  void offer(std::int32_t rank, double now, std::int32_t cause);
  void leave(std::int32_t id, double now, std::int32_t cause);
  void handle(const Event &event);
  void drained(std::int32_t id, double now);
  void arrived(std::int32_t id, double now);
  void done(std::int32_t id, double now);

  Costs costs_;
  Order order_;
  Agenda agenda_;
  Network network_;
  std::vector<std::size_t> turn_, last_; // the messages of a rank's current step: turn_..last_-1
  std::vector<std::int32_t> unsent_;     // how many of those are not sent
  std::vector<double> sending_, adding_, finished_; // when a rank ends doing so
};

} // namespace unisono::sim

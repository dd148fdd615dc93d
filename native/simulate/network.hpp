// Links, and the flows that share them.
//
// A message in flight is a flow over the links of its path. The rate of every flow
// is max-min fair: no rate can grow without lowering that of a flow that has less. A link
// that can carry all its flows at the rate of their narrowest links limits none of them and
// is left out; so a change affects only flows that share saturated links.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "simulate/agenda.hpp"
#include "simulate/order.hpp"

namespace unisono::sim {

class Network {
public:
  // `ratio` is the fraction of the bytes that is sent; `duplex` the fraction of a link's
  // bandwidth that is left while its other direction, its twin, is busy. The end of each
  // flow is put on the agenda.
  Network(const std::vector<double> &bandwidth, const std::vector<std::int64_t> &twins,
          double ratio, double duplex, const std::vector<Message> &messages,
          Agenda &agenda);

  // The next `count` paths: links first[k]..first[k+1]-1, and latencies. False if they are
  // not so many, or not of these links.
  bool know(std::size_t count, const std::vector<std::int64_t> &first,
            const std::vector<std::int64_t> &links, const std::vector<double> &latency);
  // Allocates the flows of all messages.
  void begin() { flows_.resize(messages_.size()); }
  void open(std::int32_t message, double now);
  void close(std::int32_t message);
  // Computes new rates for all flows whose share may have changed.
  void settle(double now);

  double latency(std::int32_t path) const {
    return path_latency_[static_cast<std::size_t>(path)];
  }
  std::size_t open_flows() const { return open_flows_; }
  // Bytes over each link.
  const std::vector<double> &carried() const { return carried_; }
  // Whether an end was predicted before rates changed.
  bool stale(const Event &event) const {
    return event.kind == Event::Kind::drained &&
           event.version != flows_[static_cast<std::size_t>(event.message)].version;
  }

private:
  struct Flow {
    double left = 0, rate = 0, since = 0, cap = 0, share = 0;
    std::uint32_t version = 0;
    bool growing = false, listed = false;
  };
  struct Link {
    double bandwidth, room = 0, claimed = 0, left = 0; // room: the bandwidth that is left now
    std::int32_t open = 0, twin = -1;                  // twin: its other direction
    bool listed = false, dirty = false;
    std::vector<std::int32_t> flows;
    bool saturated() const { return claimed > room * (1 + 1e-9); }
    double share() const { return left / open; } // while some of its flows grow
  };

  void mark(std::int32_t at);
  void other_way(Link &link);
  void gather();
  void fill();
  void stop_at(double level, std::size_t next);
  void stop(std::int32_t message, double level);
  void apply(std::int32_t message, double rate, double now);

  const double ratio_, duplex_;
  const std::vector<Message> &messages_;
  Agenda &agenda_;
  std::vector<std::int64_t> first_{0};
  std::vector<std::int32_t> path_links_;
  std::vector<double> path_latency_, path_cap_;
  std::vector<double> carried_;
  std::vector<Flow> flows_; // by message
  std::vector<Link> links_;
  std::size_t open_flows_ = 0;
  std::vector<std::int32_t> dirty_, fresh_, some_links_, some_flows_;
  std::vector<std::int32_t> filling_links_, filling_flows_, full_;
};

} // namespace unisono::sim

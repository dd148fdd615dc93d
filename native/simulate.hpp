// When every message of a schedule would leave and arrive, event by event.
//
// Messages wait for what they read and overwrite, leave a rank in the order of its steps (or,
// with streams, in that order for each peer alone), and then share links fairly: the rate of
// every flow is max-min fair, that is, nobody can get more without taking it from somebody who
// has less. Docs: docs/simulation.md.

#pragma once

#include <cstdint>
#include <limits>
#include <unordered_map>
#include <vector>

namespace unisono::sim {

struct Costs {
  double overhead = 0; // of a rank, for each message it sends
  double encode = 0;   // seconds per byte, before it leaves
  double decode = 0;   // seconds per byte, after it arrives
  double reduce = 0;   // seconds per byte that is added up
  double ratio = 1;    // of the bytes travel
  bool streams = false; // messages to different ranks do not wait for each other
  double duplex = 1;   // of a link's bandwidth is left while its other direction is busy
};

// One transfer of a step, as the bindings unpack it.
struct Transfer {
  std::int64_t src, dst, chunk, into;
  bool reduces;
};

struct Message {
  std::int32_t src, dst, step, path;
  std::int32_t waits_for = 0; // dependencies that are not yet done
  std::int32_t cause = -1;    // the message whose end let it go
  double nbytes = 0, reduced = 0;
  double start = 0, end = 0;
};

class Simulator {
public:
  Simulator(std::int64_t n, std::int64_t num_slots, std::vector<double> sizes,
            std::vector<double> bandwidth, std::vector<std::int64_t> twins, Costs costs);

  // A step: its messages, and what they wait for. False if a transfer is out of range.
  bool add(const std::vector<Transfer> &step);
  // Pairs (src * n + dst) that have no path yet, in the order they appeared.
  const std::vector<std::int64_t> &unknown() const { return unknown_; }
  // The paths of all of them: links first[k]..first[k+1]-1, and latencies.
  bool know(const std::vector<std::int64_t> &first, const std::vector<std::int64_t> &links,
            const std::vector<double> &latency);
  // Runs to the end; how many events there were. Ranks begin at `begin`.
  std::int64_t run(const std::vector<double> &begin);

  const std::vector<Message> &messages() const { return messages_; }
  const std::vector<double> &carried() const { return carried_; }
  const std::vector<double> &finished() const { return finished_; }
  // The edges found so far, as before * (number of messages) + after.
  std::vector<std::int64_t> edges() const;

private:
  enum class Kind : std::uint8_t { start, drained, arrived, done };
  struct Event {
    double time;
    std::int32_t message;
    std::uint32_t version;
    Kind kind;
    bool operator>(const Event &other) const {
      return time != other.time ? time > other.time : message > other.message;
    }
  };
  struct Flow {
    double left = 0, rate = 0, since = 0, cap = 0, share = 0;
    std::uint32_t version = 0;
    bool growing = false, listed = false;
  };
  struct Link {
    double bandwidth, room = 0, claimed = 0, left = 0; // room: of the bandwidth, now
    std::int32_t open = 0, twin = -1;                  // twin: its other direction
    bool listed = false, dirty = false;
    std::vector<std::int32_t> flows;
    bool crowded() const { return claimed > room * (1 + 1e-9); }
    double share() const { return left / open; } // while some of its flows grow
  };
  struct Edge {
    std::int32_t before, after;
  };
  struct Cell { // a node of a list of messages; lists share one pool
    std::int32_t message, next;
  };

  std::int32_t message_of(std::int64_t pair, std::int32_t step);
  void wait(std::int32_t before, std::int32_t after);
  void thin_out(std::size_t from);
  void reads(const std::vector<Transfer> &step);
  void writes(const std::vector<Transfer> &step);
  void note(const std::vector<Transfer> &step);
  void push(std::vector<std::int32_t> &head, std::int64_t slot, std::int32_t message);
  void drop(std::vector<std::int32_t> &head, std::int64_t slot);
  void link_edges();
  void link_streams();
  void begin_ranks(const std::vector<double> &begin);
  void offer(std::int32_t rank, double now, std::int32_t cause);
  void leave(std::int32_t message, double now, std::int32_t cause);
  void handle(const Event &event);
  void open(std::int32_t message, double now);
  void close(std::int32_t message, double now);
  void complete(std::int32_t message, double now);
  void mark(std::int32_t at);
  void other_way(Link &link);
  void settle(double now);
  void gather();
  void fill();
  void stop_at(double level, std::size_t next);
  void stop(std::int32_t message, double level);
  void apply(std::int32_t message, double rate, double now);
  void schedule(double time, std::int32_t message, Kind kind, std::uint32_t version = 0);
  bool stale(const Event &event) const;
  void forget_stale();

  const std::int64_t n_, num_slots_;
  std::vector<double> sizes_;
  Costs costs_;
  std::vector<Message> messages_;
  std::unordered_map<std::int64_t, std::int32_t> path_of_; // by pair
  std::vector<std::int64_t> unknown_;
  std::vector<std::int64_t> first_{0};
  std::vector<std::int32_t> path_links_;
  std::vector<double> path_latency_, path_cap_;

  std::unordered_map<std::int64_t, std::int32_t> here_; // messages of the step, by pair
  std::vector<std::int32_t> of_transfer_;
  std::vector<std::int32_t> writers_, readers_, written_, wrote_;
  std::vector<Cell> cells_;
  std::int32_t spare_ = -1, steps_ = 0;
  std::vector<Edge> edges_;
  std::vector<std::int64_t> next_; // the same by `before`: offsets
  std::vector<std::int32_t> then_;
  std::vector<std::int32_t> behind_; // with streams: the next message to the same rank

  std::vector<std::vector<std::int32_t>> queue_; // messages by sender, in step order
  std::vector<std::size_t> turn_, last_;         // whose turn: queue_[r][turn_..last_-1]
  std::vector<std::int32_t> unsent_;             // of those, how many have not left
  std::vector<double> sending_, adding_, finished_, carried_;
  std::vector<Flow> flows_;
  std::vector<Link> links_;
  std::vector<std::int32_t> dirty_, fresh_, some_links_, some_flows_;
  std::vector<std::int32_t> filling_links_, filling_flows_, full_;
  std::vector<Event> events_;
  std::size_t open_flows_ = 0, kept_events_ = 0;
};

} // namespace unisono::sim

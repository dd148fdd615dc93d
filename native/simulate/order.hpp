// The messages of a schedule's steps, and their dependencies.
//
// What a rank sends to another in one step is one message. With streams each chunk that is
// copied is one, as in the runtime between hosts: a chunk that is there need not wait for
// others of its step, and one that is not holds up those behind it. They leave in the order
// of the arrays, which src/unisono/schedule/message_order.py makes that of the runtime.
// (Those that are added up are one still: that is nearer to what was measured,
// docs/simulation.md.) A message waits for those that wrote the slots that it reads, and for
// those that read or wrote the slots that it overwrites: the last writers and readers of
// every slot are recorded, step by step.

#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

namespace unisono::sim {

// One transfer of a step, as the bindings unpack it.
struct Transfer {
  std::int64_t src, dst, chunk, into;
  bool reduces;
};

struct Message {
  std::int32_t src, dst, step, path;
  std::int32_t waits_for = 0; // dependencies that are not yet done
  std::int32_t cause = -1;    // the message whose end started it
  bool first = true;          // of those to its rank in its step
  double nbytes = 0, reduced = 0;
  double start = 0, end = 0;
};

class Order {
public:
  Order(std::int64_t n, std::int64_t num_slots, std::vector<double> sizes, bool streams);

  // Adds a step: its messages and their dependencies. False if a transfer is out of range.
  bool add(const std::vector<Transfer> &step);
  // After all steps: counts the dependencies of each message. With streams it also waits
  // for the previous one to the same rank.
  void complete();

  std::vector<Message> &messages() { return messages_; }
  const std::vector<Message> &messages() const { return messages_; }
  // Pairs (src * n + dst) that have no path yet, in the order they appeared.
  const std::vector<std::int64_t> &unknown() const { return unknown_; }
  void forget_unknown() { unknown_.clear(); }
  // The edges found so far, as before * (number of messages) + after.
  std::vector<std::int64_t> edges() const;

  // The messages of a rank, in the order of their steps.
  const std::vector<std::int32_t> &sent_by(std::size_t rank) const { return queue_[rank]; }
  std::size_t num_ranks() const { return queue_.size(); }
  // The messages that wait for one; the next one in its stream, or -1.
  std::span<const std::int32_t> after(std::int32_t message) const {
    const auto k = static_cast<std::size_t>(message);
    return {then_.data() + next_[k], then_.data() + next_[k + 1]};
  }
  std::int32_t behind(std::int32_t message) const {
    return behind_[static_cast<std::size_t>(message)];
  }

private:
  struct Edge {
    std::int32_t before, after;
  };
  struct Cell { // a node of a list of messages; lists share one pool
    std::int32_t message, next;
  };

  std::int32_t message_of(std::int64_t pair, std::int32_t step, bool reduces);
  void begin_message(std::int64_t pair, std::int32_t step, bool first);
  std::int32_t path_to(std::int64_t pair);
  void wait(std::int32_t before, std::int32_t after);
  void thin_out(std::size_t from);
  void reads(const std::vector<Transfer> &step);
  void writes(const std::vector<Transfer> &step);
  void note(const std::vector<Transfer> &step);
  void push(std::vector<std::int32_t> &head, std::int64_t slot, std::int32_t message);
  void drop(std::vector<std::int32_t> &head, std::int64_t slot);
  void link_edges();
  void link_streams();

  const std::int64_t n_, num_slots_;
  std::vector<double> sizes_;
  const bool streams_;
  std::vector<Message> messages_;
  std::unordered_map<std::int64_t, std::int32_t> path_of_; // by pair
  std::vector<std::int64_t> unknown_;
  std::vector<std::vector<std::int32_t>> queue_; // messages by sender

  // Of the step, by pair: the message that further chunks join, or -1.
  std::unordered_map<std::int64_t, std::int32_t> here_;
  std::vector<std::int32_t> of_transfer_;
  std::vector<std::int32_t> writers_, readers_; // of each slot: the head of a list
  std::vector<std::int32_t> written_, wrote_;   // and in which step it was last written
  std::vector<Cell> cells_;
  std::int32_t spare_ = -1, steps_ = 0;

  std::vector<Edge> edges_;
  std::vector<std::int64_t> next_; // the same by `before`: offsets
  std::vector<std::int32_t> then_;
  std::vector<std::int32_t> behind_; // with streams: the next message to the same rank
};

} // namespace unisono::sim

// The executor: one rank's part of one collective, resumable at every wait.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "engine/program.hpp"
#include "engine/task.hpp"
#include "engine/trace.hpp"
#include "memory/cross_memory.hpp"
#include "net/stream.hpp"

namespace unisono {

class Comm;

class Collective final : public Task {
public:
  explicit Collective(Comm &comm);
  // Makes it ready for another call; it owns the plan until the next.
  void prepare(std::shared_ptr<const Plan> plan, const void *input, void *output);

  Status advance() override;
  bool hindered_by(std::size_t rank) const override; // collective_wait.cpp
  std::vector<Need> needs() const override;          // collective_wait.cpp
  bool interests(std::vector<pollfd> &into) const override; // collective_streams.cpp

private:
  enum class Phase { begin, lead, arrive, generations, exit, end };

  static constexpr std::size_t nobody = ~std::size_t(0);

  Status go_on();
  Status give_up();
  void begin();
  bool lead();
  void post(std::uint64_t flags);
  Status arrive();
  Status settle();
  Status generations();
  bool window_free();
  bool reached(std::int32_t rank, std::uint64_t word);
  bool passed(const Program::Wait &wait, std::uint64_t generation);
  bool departed(const Program::Wait &wait, std::uint64_t generation) const;
  bool ready(const Program::Action &action);
  void report(std::uint64_t generation, std::uint64_t actions);

  // Which buffers are used where they lie: collective_in_place.cpp.
  void lend();
  bool lends(const std::byte *data, std::size_t bytes, bool for_writing, Lent &lent);
  Status agree();
  bool resolve(std::size_t rank, bool input);

  // What goes between hosts: collective_streams.cpp.
  struct Cursor { // how far the messages to one rank have been offered
    std::int64_t piece = 0;
    std::size_t message = 0, at = 0;
    std::int64_t since = 0; // when this message began to leave, if that is traced
  };
  void depart();
  void depart(const Program::Course &course, Cursor &cursor);
  bool arrives(const Program::Action &action) const;
  Status receive(const Program::Action &action);
  Status stopped(std::size_t rank, Io why);
  bool has_left(std::size_t rank, std::uint64_t pieces, std::uint64_t messages) const;
  bool crosses(std::size_t rank) const;

  // What is noted of it while a trace is on: collective_trace.cpp.
  void begin_wait(std::size_t whom);
  void end_wait(Moment::Kind kind);
  void end_arrival();
  std::size_t traced(const Program::Action &action);
  Status traced_receive(const Program::Action &action);
  void note_action(const Program::Action &action, std::int64_t begun, std::int64_t ended);
  void note_message(const Program::Course &course, const Cursor &cursor, std::size_t bytes);
  Moment &note(Moment::Kind kind, std::int64_t begun, std::int64_t ended);

  // What one action does with bytes: collective_movement.cpp. Each tells whose memory could not be
  // reached, or nobody's.
  struct Movement { // one piece of one chunk, on its way
    const Program::Action &action;
    std::int64_t first; // element of the chunk
    std::size_t count, bytes, sources;
    std::byte *window, *output; // null: not wanted there
    bool streams;               // the output is written past the caches
    bool far;                   // some source lies in another process
    bool delivers;
  };
  struct Span { // of a chunk, in elements
    std::int64_t first;
    std::size_t count;
  };
  Span span(std::int32_t chunk, std::int64_t piece) const;
  Movement movement(const Program::Action &action);
  std::size_t perform(const Program::Action &action);
  std::size_t copy(const Movement &movement);
  std::size_t reduce(const Movement &movement);
  std::size_t reduce_in_blocks(const Movement &movement);
  std::size_t first_served(const Movement &movement) const;
  std::size_t deliver(const Movement &movement, std::size_t at, const std::byte *from,
                      std::size_t bytes);
  bool warm(const Program::Action &action, std::size_t sources) const;
  Reach address(const Program::Source &source, std::int64_t first);

  // The same where values travel as codes: collective_codes.cpp.
  std::size_t perform_coded(const Program::Action &action);
  Status receive_coded(const Program::Action &action);
  void blend(const Movement &movement, std::size_t first, std::size_t count);
  void sum(const Movement &movement, std::size_t done, std::size_t count);
  void store(const Movement &movement, std::size_t at, const float *values,
             std::size_t count) const;
  bool is_code(const Program::Source &source) const;
  std::byte *code_place(std::size_t rank, std::int32_t index, std::int64_t piece);
  std::byte *place(std::size_t rank, std::int32_t index, std::int64_t piece);

  Comm &comm_;
  std::shared_ptr<const Plan> plan_;
  const std::byte *input_ = nullptr;
  std::byte *output_ = nullptr;
  Phase phase_ = Phase::begin;
  const Program *program_ = nullptr;
  std::uint64_t first_generation_ = 0;
  std::int64_t piece_ = 0;   // of the chunks
  std::size_t action_ = 0;   // the next to do
  std::size_t arriving_ = 0; // the next rank to look for
  std::size_t wait_ = 0;     // where in the list of waits we are
  std::uint64_t flags_ = 0;
  unsigned lent_ = 0; // bit 0: inputs, bit 1: outputs are read in place
  bool free_ = false; // this generation's half of the window may be written
  std::size_t lost_ = nobody; // whose memory could not be reached
  std::int64_t lost_since_ = 0;
  std::vector<Reach> inputs_, outputs_; // of all ranks, where lent
  std::vector<std::shared_ptr<class Memory>> hold_;
  std::vector<const void *> operands_;
  std::vector<Reach> reached_; // where the sources of an action lie
  std::vector<Cursor> cursors_; // of the courses of the program
  std::vector<std::uint64_t> came_; // messages from each rank
  std::size_t at_ = 0, arrived_ = 0; // of an action that receives: bytes, and sources
  std::size_t awaited_ = nobody;     // whose message is not there yet
  std::vector<float> slice_;         // of a sum that is to be encoded, and of an operand
  std::vector<std::byte> codes_;     // for two pieces, where they are not in the window
  bool traced_ = false;              // this call, from beginning to end
  std::int64_t posted_ = 0;          // when it arrived, until all have
  std::int64_t since_ = 0;           // when it began to wait, while it does,
  std::size_t whom_ = nobody;        // and for whom
  std::int64_t lately_ = 0;          // the time now, if it was just looked at; or 0
  std::int64_t received_ = 0;        // when an action that receives began
  std::int64_t encoding_ = 0;        // how long an action has encoded
};

} // namespace unisono

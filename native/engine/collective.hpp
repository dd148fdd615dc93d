// The executor: one rank's part of one collective, resumable at every wait.

#pragma once

#include <array>
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
class IoThreads;

class Collective final : public Task {
public:
  explicit Collective(Comm &comm);
  ~Collective() override;
  // Prepares it for another call; it holds the plan until the next.
  void prepare(std::shared_ptr<const Plan> plan, const void *input, void *output);

  Status advance() override;
  bool depends_on(std::size_t rank) const override; // collective_wait.cpp
  std::vector<Need> needs() const override;          // collective_wait.cpp
  bool expects_data_of(std::size_t rank) const override;
  bool poll_fds(std::vector<pollfd> &into) const override; // collective_streams.cpp
  void release_buffers() override;                         // collective_in_place.cpp
  void recall() override;                                  // collective_shares.cpp

private:
  enum class Phase { begin, lead, arrive, generations, exit, end };

  static constexpr std::size_t no_rank = ~std::size_t(0);

  Status run_phases();
  Status fail_unreachable();
  void begin();
  bool lead();
  void publish_arrival(std::uint64_t flags);
  Status arrive();
  Status begin_generations();
  Status generations();
  bool window_free();
  bool reached(std::int32_t rank, std::uint64_t word);
  bool passed(const Program::Wait &wait, std::uint64_t generation);
  bool messages_sent(const Program::Wait &wait, std::uint64_t generation) const;
  bool ready(const Program::Action &action);
  void report(std::uint64_t generation, std::uint64_t actions);

  // Buffers that are used in place: collective_in_place.cpp.
  void expose_buffers();
  bool expose(const std::byte *data, std::size_t bytes, bool for_writing,
              ExposedBuffer &exposed, std::shared_ptr<class SharedPages> &pages);
  void use_alias();
  void return_ends();
  Status map_exposed();
  bool map_buffer(std::size_t rank, bool input);

  struct Movement { // one piece of one chunk
    const Program::Action &action;
    std::int64_t first; // element of the chunk
    std::size_t count, bytes, sources;
    std::byte *window, *output; // null: not written there
    bool streams; // the output is written past the caches
    bool cross_process; // some source is private memory of another process
    bool delivers;
  };
  // How far a thread has received its frames of an action.
  struct Reception {
    std::size_t at, arrived; // bytes of the action, and sources of the frame there
    std::byte *scratch;      // a frame for the result, and one for each source
    const void **operands;
    const std::size_t *lanes; // of each source; null: the lanes whose turn it is
    bool counts; // arrivals are counted at once: only by the thread that advances the call
    std::byte *made = nullptr; // the result of the frame, when it is complete
    std::size_t awaited = no_rank;     // whose frame is missing
    std::size_t unreachable = no_rank; // whose memory could not be accessed
  };
  Io receive_frame(const Movement &movement, Reception &reception);

  // Messages between hosts: collective_streams.cpp.
  struct Cursor { // how far the messages to one rank have been handed to the stream
    std::int64_t piece = 0;
    std::size_t message = 0, at = 0;
    std::int64_t since = 0; // when this message began to be sent, if traced
    std::size_t shares = 0; // in which this message is sent now, if it is
  };
  struct Part { // of a message that is to be sent: from where, and how many bytes
    const std::byte *from;
    std::size_t bytes;
    FrameId frame_id;
    const Note *note; // null, except for the first frame of a call
  };
  void send_messages();
  void send_messages(std::size_t outgoing);
  void end_message(const Program::Outgoing &outgoing, Cursor &cursor, std::size_t bytes);
  bool receives(const Program::Action &action) const;
  Status receive(const Program::Action &action);
  void count_arrival(std::size_t rank, bool ends_message);
  Status receive_failed(std::size_t rank, Io why);
  bool has_sent(std::size_t rank, std::uint64_t pieces, std::uint64_t messages) const;
  bool has_stream_traffic(std::size_t rank) const;

  // Messages that several threads transfer: collective_shares.cpp.
  class ReceiveShare;
  class SendShare;
  // Of the I/O threads of this call those that receive; the others send.
  std::size_t receivers() const { return io_threads_ > 2 ? io_threads_ - 1 : io_threads_; }
  bool receives_in_shares(const Movement &movement) const;
  bool receives_in_shares(const Program::Action &action);
  bool has_received_shares() const;
  Status receive_in_shares(const Movement &movement);
  struct Receiving { // an action that other threads receive
    std::vector<std::unique_ptr<ReceiveShare>> shares; // kept for later actions
    std::size_t count = 0;                             // of the shares: those in use
  };
  bool post_receive_shares(const Movement &movement);
  void post_ahead(std::size_t first);
  const Program::Source &source_of(const Program::Action &action) const;
  void end_receive_shares(const Movement &movement);
  Status receive_share_failed(const Receiving &of, const ReceiveShare &share);
  bool read_first_frame(const ReceiveShare &of_first, const ReceiveShare &share);
  bool sends_in_shares() const;
  bool sends_in_shares(const SendStream &stream, std::size_t bytes) const;
  void post_send_shares(std::size_t outgoing, const Part &message);
  bool sent_in_shares(std::size_t outgoing);
  void poll_own_shares(std::size_t outgoing, std::vector<pollfd> &into) const;

  // What a trace records of it: collective_trace.cpp.
  void begin_wait(std::size_t whom);
  void end_wait(Moment::Kind kind);
  void end_arrival();
  std::size_t run_traced(const Program::Action &action);
  Status receive_traced(const Program::Action &action);
  void note_action(const Program::Action &action, std::int64_t begun, std::int64_t ended);
  void note_message(const Program::Outgoing &outgoing, const Cursor &cursor,
                    std::size_t bytes);
  Moment &note(Moment::Kind kind, std::int64_t begun, std::int64_t ended);

  // What one action does with bytes: collective_movement.cpp. The result is the rank whose
  // memory could not be accessed, or no_rank.
  struct Span { // of a chunk, in elements
    std::int64_t first;
    std::size_t count;
  };
  Span span(std::int32_t chunk, std::int64_t piece) const;
  Movement movement(const Program::Action &action);
  std::size_t run_action(const Program::Action &action);
  std::size_t copy(const Movement &movement);
  std::size_t reduce(const Movement &movement);
  std::size_t reduce_in_blocks(const Movement &movement);
  std::size_t first_destination(const Movement &movement) const;
  std::size_t deliver(const Movement &movement, std::size_t at, const std::byte *from,
                      std::size_t bytes);
  bool output_is_cached(const Program::Action &action, std::size_t sources) const;
  PeerAddress address(const Program::Source &source, std::int64_t first);

  // The same where codes are transferred instead of values: collective_codes.cpp.
  std::size_t run_coded_action(const Program::Action &action);
  Status receive_coded(const Program::Action &action);
  void combine(const Movement &movement, std::size_t first, std::size_t count);
  void sum(const Movement &movement, std::size_t done, std::size_t count);
  void store(const Movement &movement, std::size_t at, const float *values,
             std::size_t count) const;
  bool is_code(const Program::Source &source) const;
  std::byte *code_address(std::size_t rank, std::int32_t index, std::int64_t piece);
  std::byte *window_address(std::size_t rank, std::int32_t index, std::int64_t piece);

  Comm &comm_;
  const std::shared_ptr<IoThreads> threads_; // null: there are none
  std::size_t io_threads_ = 0; // how many of them have work in this call
  std::shared_ptr<const Plan> plan_;
  const std::byte *input_ = nullptr;
  std::byte *output_ = nullptr;
  Phase phase_ = Phase::begin;
  const Program *program_ = nullptr;
  std::uint64_t first_generation_ = 0;
  std::int64_t piece_ = 0;   // of the chunks
  std::size_t action_ = 0; // the next to run
  std::size_t arriving_ = 0; // the next rank to check for arrival
  std::size_t wait_ = 0; // position in the list of waits
  std::uint64_t flags_ = 0;
  unsigned exposed_ = 0; // bit 0: inputs, bit 1: outputs are accessed in place
  bool window_free_ = false; // this generation's half of the window may be written
  std::size_t unreachable_ = no_rank; // the rank whose memory could not be accessed
  std::int64_t unreachable_since_ = 0;
  std::vector<PeerAddress> inputs_, outputs_; // of all ranks, where exposed
  std::vector<std::shared_ptr<class Memory>> mapped_;
  std::shared_ptr<class SharedPages> input_pages_, output_pages_; // of registered memory
  std::byte *own_output_ = nullptr; // where the caller has it, if that is not `output_`
  std::vector<const void *> operands_;
  std::vector<PeerAddress> addresses_; // of the sources of an action
  std::vector<Cursor> cursors_; // for each entry of program.outgoing
  std::vector<std::uint64_t> received_; // messages from each rank
  std::size_t at_ = 0, arrived_ = 0; // of an action that receives: bytes, and sources
  std::size_t awaited_sender_ = no_rank; // the rank whose message is awaited
  // The action that is next, and those behind it: `num_receiving_` places from the first on.
  static constexpr std::size_t most_receiving = 8;
  std::array<Receiving, most_receiving> receiving_;
  std::size_t first_receiving_ = 0, num_receiving_ = 0;
  bool alone_ = false; // after a recall no share is posted any more in this call
  std::int64_t mismatch_since_ = 0; // when a share met a frame of another call
  std::vector<std::vector<std::unique_ptr<SendShare>>> send_shares_; // like cursors_
  std::vector<float> slice_;         // of a sum that is to be encoded, and of an operand
  std::vector<std::byte> codes_;     // for two pieces, where they are not in the window
  bool traced_ = false; // whether this call is traced
  std::int64_t posted_ = 0; // when this rank published its arrival, until all have arrived
  std::int64_t wait_begun_ = 0; // when the current wait began, or 0
  std::size_t awaited_rank_ = no_rank; // the rank it waits for
  std::int64_t last_clock_ = 0; // the clock, if it was read just now; or 0
  std::int64_t receive_begun_ = 0;        // when an action that receives began
  std::int64_t encoding_ = 0; // ns that an action has spent encoding
};

} // namespace unisono

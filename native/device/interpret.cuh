// The interpreter of programs for devices: one source for CUDA, HIP and the threads of a CPU.
//
// Every thread block runs the whole program of its rank on its own slice of every chunk. An
// action is elementwise within its chunk, so block b reads only what the blocks b of other
// ranks wrote, and there is one progress word for each rank and block:
//
//   wait     the threads poll different ranks, with acquire loads; then a block barrier
//   move     copy or reduce the slice, in the order of the sources, as the CPU's engine does
//   publish  a block barrier; then thread 0 stores the progress word with release
//
// Every wait is bounded: by the time limit of the call, and by a word in the host's memory.
// A block that gives up reports why, fills its slice of the output with a value that is not
// a number, and ends: the kernel ends normally, and the device stays usable.
//
// Target provides the block (its number, threads and barriers), the ordered loads and
// stores, and the clock. Mover does the work on bytes: see move.cuh.

#pragma once

#include "device/launch.hpp"

namespace unisono::device {

// The slice of one block of one piece of a chunk: what is combined, and where it is written.
// The addresses are in memory that the threads of the block share.
struct Movement {
  const unsigned char *const *sources;
  unsigned char *const *destinations;
  std::int32_t num_sources, num_destinations;
  std::int64_t count; // elements
  std::uint32_t divisor;
};

// What the threads of a block share.
struct BlockMemory {
  const unsigned char *inputs[most_ranks]; // of all ranks, where exposed
  unsigned char *outputs[most_ranks];
  const unsigned char *sources[most_ranks]; // of the action that runs
  unsigned char *destinations[most_ranks + 2];
  std::uint32_t exposed; // of the flags, those that all ranks have
};

template <class Target, class Mover> class Interpreter {
public:
  UNISONO_DEVICE Interpreter(const Launch &call, Target target, BlockMemory &shared)
      : call_(call), target_(target), shared_(shared),
        mine_(words(call.rank)),
        first_generation_(mine_.progress >> progress_action_bits) {}

  UNISONO_DEVICE void run() {
    if (!execute())
      abandon();
  }

private:
  struct Slice { // in elements
    std::int64_t in_piece, in_chunk, count;
  };

  // Of this call; read again where it is needed, which saves registers.
  UNISONO_DEVICE U64 number() const { return mine_.calls + 1; }

  UNISONO_DEVICE BlockWords &words(std::int32_t rank) const {
    return call_.peers[rank].words->blocks[target_.block()];
  }

  // Round 0 is the arrival; round k runs the program on piece k - 1. One loop for both keeps
  // the number of registers down: the tables of the program are not held in any.
  UNISONO_DEVICE bool execute() {
    const ProgramTables *program = &call_.programs[0];
    UNISONO_NO_UNROLL
    for (std::int64_t round = 0; round <= program->pieces; ++round) {
      const bool arrived = round > 0;
      const std::int64_t piece = arrived ? round - 1 : 0;
      if (piece >= 2 && !window_is_free(*program, piece))
        return false;
      UNISONO_NO_UNROLL
      for (std::int32_t a = 0; a < (arrived ? program->num_actions : 0); ++a)
        if (!run_action(*program, a, piece))
          return false;
      if (arrived) {
        if (target_.thread() == 0)
          report(piece + 1, 0);
      } else {
        if (has_failed())
          return false;
        publish_arrival();
        if (!arrive())
          return false;
        program = &call_.programs[shared_.exposed];
      }
    }
    if (!wait(program->exits, program->num_exits, program->pieces - 1))
      return false;
    if (target_.thread() == 0) {
      const U64 call = number();
      target_.store_relaxed(&mine_.calls, call);
      if (target_.block() == 0)
        target_.store_relaxed(call_.done, call);
    }
    return true;
  }

  // Whether a call before this one has failed: then this one publishes nothing, since the
  // other ranks would take it for the one that has failed.
  UNISONO_DEVICE bool has_failed() {
    return target_.any(target_.thread() == 0 &&
                       target_.load_relaxed(&call_.peers[call_.rank].words->failed) != 0);
  }

  UNISONO_DEVICE void publish_arrival() {
    if (target_.thread() == 0)
      shared_.exposed = std::uint32_t(call_.flags);
    target_.sync();
    if (target_.thread() != 0)
      return;
    const U64 call = number();
    if (call_.begun != nullptr && target_.block() == 0)
      target_.store_relaxed(call_.begun, call);
    Arrival &arrival = mine_.arrivals[call & 1];
    arrival.fingerprint = call_.fingerprint;
    arrival.flags = call_.flags | U64(target_.blocks()) << flag_bits;
    arrival.summary = call_.summary;
    for (int i = 0; i < 2; ++i) {
      arrival.segment[i] = call_.segment[i];
      arrival.offset[i] = call_.offset[i];
    }
    target_.store_release(&arrival.call, call);
  }

  // Waits for the arrival of all ranks, compares their calls, and finds their buffers.
  UNISONO_DEVICE bool arrive() {
    const U64 call = number();
    bool failed = false;
    for (std::int32_t q = target_.thread(); q < call_.n && !failed; q += target_.threads()) {
      const Arrival &arrival = words(q).arrivals[call & 1];
      failed = !poll(&arrival.call, call, q);
      if (!failed && (arrival.fingerprint != call_.fingerprint ||
                      arrival.flags >> flag_bits != U64(target_.blocks()))) {
        fail(Why::mismatch, q, &arrival.summary);
        failed = true;
      }
      if (failed)
        break;
      target_.and_in_block(&shared_.exposed,
                           std::uint32_t(arrival.flags) & (exposes_input | exposes_output));
      shared_.inputs[q] = segment_buffer(q, arrival, 0);
      shared_.outputs[q] = segment_buffer(q, arrival, 1);
    }
    return !target_.any(failed);
  }

  // Where a buffer that another rank exposes is mapped here.
  UNISONO_DEVICE unsigned char *segment_buffer(std::int32_t rank, const Arrival &arrival,
                                               int which) {
    const U64 flag = which == 0 ? exposes_input : exposes_output;
    if ((arrival.flags & flag) == 0)
      return nullptr;
    return call_.peers[rank].segments[arrival.segment[which]] + arrival.offset[which];
  }

  UNISONO_DEVICE bool run_action(const ProgramTables &program, std::int32_t number,
                                 std::int64_t piece) {
    const rows::Action &action = program.actions[number];
    find_addresses(program, action, piece);
    if (!wait(program.waits + action.first_wait, action.end_wait - action.first_wait, piece))
      return false;
    move(program, action, piece);
    target_.sync();
    // The last action is reported as the end of the generation.
    const bool is_awaited = number < program.num_actions - program.tail;
    if (is_awaited && number + 1 < program.num_actions && target_.thread() == 0)
      report(piece, U64(number) + 1);
    return true;
  }

  // This generation's half of the window is free when its readers have finished the
  // generation that used it before. That of an earlier call is: all ranks have arrived.
  UNISONO_DEVICE bool window_is_free(const ProgramTables &program, std::int64_t piece) {
    bool failed = false;
    for (std::int32_t i = target_.thread(); i < program.num_readers && !failed;
         i += target_.threads())
      failed = !reached(program.readers[i], piece - 1, 0);
    return !target_.any(failed);
  }

  // Waits for ranks, each of which a thread polls. The barrier orders what all threads of
  // the block read next after what their polls have seen.
  UNISONO_DEVICE bool wait(const rows::Wait *waits, std::int32_t count, std::int64_t piece) {
    bool failed = false;
    for (std::int32_t i = target_.thread(); i < count && !failed; i += target_.threads())
      failed = !reached(waits[i].rank, piece, U64(waits[i].count));
    return !target_.any(failed);
  }

  UNISONO_DEVICE bool reached(std::int32_t rank, std::int64_t piece, U64 actions) {
    return poll(&words(rank).progress, progress_word(piece, actions), rank);
  }

  // Polls a word of a rank until it is at least `least`; false if the call is given up.
  UNISONO_DEVICE bool poll(const U64 *word, U64 least, std::int32_t rank) {
    for (unsigned looks = 1; target_.load_acquire(word) < least; ++looks) {
      if (looks % 64 == 0 && given_up(word, least, rank))
        return false;
      target_.pause(looks);
    }
    return true;
  }

  UNISONO_DEVICE bool given_up(const U64 *word, U64 least, std::int32_t rank) {
    if (target_.load_host(call_.abort) != 0) {
      (void)target_.claim(&call_.peers[call_.rank].words->failed); // for the calls behind it
      return true;
    }
    if (target_.load_relaxed(&call_.peers[call_.rank].words->failed) != 0)
      return true;
    // A rank closes after its last kernel has ended: what is not there then never comes.
    if (target_.load_acquire(&call_.peers[rank].words->closed) != 0 &&
        target_.load_acquire(word) < least) {
      fail(Why::closed, rank);
      return true;
    }
    const U64 now = target_.clock_ns();
    if (waiting_since_ == 0)
      waiting_since_ = now;
    if (now - waiting_since_ < call_.timeout_ns)
      return false;
    fail(Why::timeout, rank);
    return true;
  }

  // Reports the first failure of this rank to the host.
  UNISONO_DEVICE void fail(Why why, std::int32_t rank, const Summary *other = nullptr) {
    if (!target_.claim(&call_.peers[call_.rank].words->failed))
      return;
    FailureSlot &slot = *call_.failure;
    slot.why = std::uint32_t(why);
    slot.rank = std::uint32_t(rank);
    slot.block = std::uint32_t(target_.block());
    slot.mine = call_.summary;
    if (other != nullptr)
      slot.theirs = *other;
    target_.store_host(&slot.state, 1);
  }

  UNISONO_DEVICE void report(std::int64_t piece, U64 actions) {
    target_.store_release(&mine_.progress, progress_word(piece, actions));
  }

  UNISONO_DEVICE U64 progress_word(std::int64_t piece, U64 actions) const {
    return (first_generation_ + U64(piece)) << progress_action_bits | actions;
  }

  // The addresses that an action reads and writes, which all threads of the block need:
  // its sources; its place in the window, if it has one; its place in the output, if it has
  // one; and the outputs of those it delivers to.
  UNISONO_DEVICE void find_addresses(const ProgramTables &program, const rows::Action &action,
                                     std::int64_t piece) {
    const Slice slice = slice_of(program, action.chunk, piece);
    const std::int32_t sources = action.end_source - action.first_source;
    const std::int32_t total = sources + num_destinations(action);
    for (std::int32_t i = target_.thread(); i < total; i += target_.threads())
      if (i < sources)
        shared_.sources[i] =
            address(program, program.sources[action.first_source + i], piece, slice);
      else
        shared_.destinations[i - sources] =
            destination(program, action, i - sources, piece, slice);
  }

  UNISONO_DEVICE static std::int32_t num_destinations(const rows::Action &action) {
    return (action.window >= 0) + (action.output >= 0) + action.end_delivery -
           action.first_delivery;
  }

  UNISONO_DEVICE unsigned char *destination(const ProgramTables &program,
                                            const rows::Action &action, std::int32_t which,
                                            std::int64_t piece, const Slice &slice) {
    if (action.window >= 0 && which-- == 0)
      return window(program, call_.rank, action.window, piece, slice);
    if (action.output >= 0 && which-- == 0)
      return call_.output + bytes(call_.output_at[action.output] + slice.in_chunk);
    const std::int32_t rank = program.deliveries[action.first_delivery + which];
    return shared_.outputs[rank] + bytes(call_.output_at[action.chunk] + slice.in_chunk);
  }

  UNISONO_DEVICE void move(const ProgramTables &program, const rows::Action &action,
                           std::int64_t piece) {
    const Slice slice = slice_of(program, action.chunk, piece);
    if (slice.count == 0)
      return;
    Mover::move(target_,
                {shared_.sources, shared_.destinations,
                 action.end_source - action.first_source, num_destinations(action),
                 slice.count, action.completes ? call_.divisor : 1},
                call_.itemsize);
  }

  UNISONO_DEVICE std::int64_t bytes(std::int64_t elements) const {
    return elements * std::int64_t(call_.itemsize);
  }

  UNISONO_DEVICE const unsigned char *address(const ProgramTables &program,
                                              const rows::Source &source, std::int64_t piece,
                                              const Slice &slice) {
    if (source.home == rows::window)
      return window(program, source.rank, source.index, piece, slice);
    const bool own = source.rank == call_.rank;
    if (source.home == rows::input)
      return (own ? call_.input : shared_.inputs[source.rank]) +
             bytes(call_.input_at[source.index] + slice.in_chunk);
    return (own ? call_.output : shared_.outputs[source.rank]) +
           bytes(call_.output_at[source.index] + slice.in_chunk);
  }

  UNISONO_DEVICE unsigned char *window(const ProgramTables &program, std::int32_t rank,
                                       std::int32_t index, std::int64_t piece,
                                       const Slice &slice) {
    const U64 half = (first_generation_ + U64(piece)) & 1;
    return call_.peers[rank].windows + std::int64_t(half) * call_.half +
           bytes(std::int64_t(index) * program.piece + slice.in_piece);
  }

  // The part of a piece of a chunk that this block works on: whole grains of 16 bytes, the
  // same on all ranks. A piece that is not full is cut like a full one: a half of the window
  // is used again by the same block, which knows that its readers have done.
  UNISONO_DEVICE Slice slice_of(const ProgramTables &program, std::int32_t chunk,
                                std::int64_t piece) const {
    const std::int64_t grain = std::int64_t(16 / call_.itemsize), blocks = target_.blocks();
    const std::int64_t grains = (program.piece + grain - 1) / grain;
    const std::int64_t each = (grains + blocks - 1) / blocks * grain;
    const std::int64_t in_piece = each * target_.block();
    const std::int64_t in_chunk = piece * program.piece + in_piece;
    const std::int64_t of_piece = program.piece - in_piece, of_chunk = call_.size[chunk] - in_chunk;
    std::int64_t count = of_piece < of_chunk ? of_piece : of_chunk;
    count = count < each ? count : each;
    return {in_piece, in_chunk, count < 0 ? 0 : count};
  }

  // Other blocks and ranks may still write to this rank's output, so what it holds after a
  // failure is not defined; but nobody takes an unwritten part for a result.
  UNISONO_DEVICE void abandon() {
    const std::int64_t blocks = target_.blocks();
    const std::int64_t each = (call_.output_bytes + blocks - 1) / blocks;
    const std::int64_t first = each * target_.block();
    const std::int64_t end =
        first + each < call_.output_bytes ? first + each : call_.output_bytes;
    for (std::int64_t i = first + target_.thread(); i < end; i += target_.threads())
      call_.output[i] = static_cast<unsigned char>(call_.lost_value);
    if (target_.thread() == 0) // the host sees that this block has ended
      target_.store_relaxed(&mine_.calls, number());
  }

  const Launch &call_;
  Target target_;
  BlockMemory &shared_;
  BlockWords &mine_;
  const U64 first_generation_;
  U64 waiting_since_ = 0;
};

} // namespace unisono::device

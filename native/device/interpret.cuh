// The interpreter of programs for devices: one source for CUDA, HIP and the threads of a CPU.
//
// Every thread block runs the whole program of its rank on its own tiles of every chunk. An
// action is elementwise within its chunk, so block b reads only what the blocks b of other
// ranks wrote, and there is one progress word for each rank and block:
//
//   wait     the threads poll different ranks, with acquire loads; then a block barrier
//   move     copy or reduce the tiles, in the order of the sources, as the CPU's engine does
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

// One piece of a chunk: what is combined, and where it is written. A block works on its own
// tiles: those from `first` on, and then every `stride` bytes. It is in memory that the threads
// of the block share, which saves registers.
struct Movement {
  const unsigned char *sources[most_ranks];
  unsigned char *destinations[most_ranks + 2];
  std::int32_t num_sources, num_destinations;
  std::int64_t bytes; // of the piece
  std::int64_t first, tile, stride;
  std::uint32_t divisor;
};

// What the threads of a block share.
template <class Vector> struct BlockMemory {
  RankWords *words[most_ranks]; // of all ranks, as their windows
  unsigned char *windows[most_ranks];
  const unsigned char *inputs[most_ranks]; // of all ranks, where exposed
  unsigned char *outputs[most_ranks];
  Movement movement; // of the action that runs
  std::uint32_t exposed; // of the flags, those that all ranks have
  // Of the program that runs, if they fit: every action reads them, one row after another.
  Vector tables[table_bytes / sizeof(Vector)];
};

template <class Target, class Mover> class Interpreter {
  using Vector = typename Target::Vector;

public:
  using Memory = BlockMemory<Vector>;
  UNISONO_DEVICE Interpreter(const Launch &call, Target target, Memory &shared)
      : call_(call), target_(target), shared_(shared),
        mine_(call.words->blocks[target.block()]),
        first_generation_(mine_.progress >> progress_action_bits) {}

  UNISONO_DEVICE void run() {
    if (!execute())
      abandon();
  }

private:
  // Of this call; read again where it is needed, which saves registers.
  UNISONO_DEVICE U64 number() const { return mine_.calls + 1; }

  // Of this block on another rank; known from the arrival on.
  UNISONO_DEVICE const BlockWords &words(std::int32_t rank) const {
    return shared_.words[rank]->blocks[target_.block()];
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
        take_time(0);
        const bool failed = !publish_arrival();
        copy_tables(std::uint32_t(call_.flags)); // while the others arrive
        target_.sync();
        if (!arrive(failed))
          return false;
        take_time(1);
        program = &call_.programs[shared_.exposed];
        if (shared_.exposed != std::uint32_t(call_.flags)) {
          copy_tables(shared_.exposed);
          target_.sync();
        }
      }
    }
    if (!wait(rows<rows::Wait>(*program, program->exits), program->num_exits,
              program->pieces - 1))
      return false;
    take_time(2);
    if (target_.thread() == 0) {
      const U64 call = number();
      target_.store_relaxed(&mine_.calls, call);
      if (target_.block() == 0)
        target_.store_relaxed(call_.done, call);
    }
    return true;
  }

  // The arrival's barrier comes before anybody reads them.
  UNISONO_DEVICE void copy_tables(std::uint32_t mode) {
    const ProgramTables &program = call_.programs[mode];
    if (program.bytes > table_bytes)
      return;
    const Vector *from = reinterpret_cast<const Vector *>(program.tables);
    for (std::uint32_t i = target_.thread(); i < program.bytes / sizeof(Vector);
         i += target_.threads())
      shared_.tables[i] = from[i];
  }

  // The rows of a table that begins at a place.
  template <class Row>
  UNISONO_DEVICE const Row *rows(const ProgramTables &program, std::uint32_t at) const {
    const unsigned char *tables = program.bytes > table_bytes
                                      ? program.tables
                                      : reinterpret_cast<const unsigned char *>(shared_.tables);
    return reinterpret_cast<const Row *>(tables + at);
  }

  // For a trace. Before the loop of execute() it would cost registers of the whole kernel.
  UNISONO_DEVICE void take_time(int which) {
    if (call_.times != nullptr && target_.block() == 0 && target_.thread() == 0)
      target_.store_relaxed(&call_.times[which], target_.clock_ns());
  }

  // By thread 0. If a call before this one has failed, this one publishes nothing, since the
  // other ranks would take it for the one that has failed: false.
  UNISONO_DEVICE bool publish_arrival() {
    if (target_.thread() != 0)
      return true;
    shared_.exposed = std::uint32_t(call_.flags);
    if (target_.load_relaxed(&call_.words->failed) != 0)
      return false;
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
    return true;
  }

  // Waits for the arrival of all ranks, compares their calls, and finds their buffers.
  UNISONO_DEVICE bool arrive(bool failed) {
    const U64 call = number();
    for (std::int32_t q = target_.thread(); q < call_.n && !failed; q += target_.threads()) {
      shared_.words[q] = call_.peers[q].words;
      shared_.windows[q] = call_.peers[q].windows;
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
    if (arrival.segment[which] == 0) // of a rank of this process: its address
      return reinterpret_cast<unsigned char *>(arrival.offset[which]);
    return call_.peers[rank].segments[arrival.segment[which]] + arrival.offset[which];
  }

  UNISONO_DEVICE bool run_action(const ProgramTables &program, std::int32_t number,
                                 std::int64_t piece) {
    const Action &action = rows<Action>(program, 0)[number];
    prepare(program, action, piece);
    if (!wait(rows<rows::Wait>(program, program.waits) + action.first_wait,
              action.end_wait - action.first_wait, piece))
      return false;
    if (shared_.movement.first < shared_.movement.bytes)
      Mover::move(target_, shared_.movement);
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
    const std::int32_t *readers = rows<std::int32_t>(program, program.readers);
    bool failed = false;
    for (std::int32_t i = target_.thread(); i < program.num_readers && !failed;
         i += target_.threads())
      failed = !reached(readers[i], piece - 1, 0);
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

  // Polls a word of a rank until it is at least `least`; false if the call is given up. After
  // some looks an acquire load is made only of what is there: it disturbs other blocks.
  UNISONO_DEVICE bool poll(const U64 *word, U64 least, std::int32_t rank) {
    constexpr unsigned eager_looks = 32;
    for (unsigned looks = 1;
         (looks > eager_looks && target_.load_relaxed(word) < least) ||
         target_.load_acquire(word) < least;
         ++looks) {
      if (looks % Target::looks_per_check == 0 && given_up(word, least, rank))
        return false;
      target_.pause(looks);
    }
    return true;
  }

  UNISONO_DEVICE bool given_up(const U64 *word, U64 least, std::int32_t rank) {
    if (target_.load_host(call_.abort) != 0) {
      (void)target_.claim(&call_.words->failed); // for the calls behind it
      return true;
    }
    if (target_.load_relaxed(&call_.words->failed) != 0)
      return true;
    // A rank closes after its last kernel has ended: what is not there then never comes.
    if (target_.load_acquire_host(&call_.peers[rank].words->closed) != 0 &&
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
    if (!target_.claim(&call_.words->failed))
      return;
    FailureSlot &slot = *call_.failure;
    slot.why = std::uint32_t(why);
    slot.rank = std::uint32_t(rank);
    slot.block = std::uint32_t(target_.block());
    slot.call = call_.words->blocks[0].calls + 1;
    slot.done = call_.done;
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

  // Where this piece of a chunk begins, in all that an action reads and writes: its sources;
  // its place in the window, if it has one; its place in the output, if it has one; and the
  // outputs of those it delivers to. The barrier of the wait comes before they are used.
  UNISONO_DEVICE void prepare(const ProgramTables &program, const Action &action,
                              std::int64_t piece) {
    Movement &movement = shared_.movement;
    if (target_.thread() == 0)
      cut(program, action, piece, movement);
    const Source *source = rows<Source>(program, program.sources) + action.first_source;
    const std::int32_t sources = action.end_source - action.first_source;
    const std::int32_t total = sources + num_destinations(action);
    const std::int64_t in_chunk = piece * program.piece;
    for (std::int32_t i = target_.thread(); i < total; i += target_.threads())
      if (i < sources)
        movement.sources[i] = address(source[i], in_chunk, piece);
      else
        movement.destinations[i - sources] =
            destination(program, action, i - sources, in_chunk, piece);
  }

  UNISONO_DEVICE static std::int32_t num_destinations(const Action &action) {
    return (action.window_at >= 0) + (action.output_at >= 0) + action.end_delivery -
           action.first_delivery;
  }

  UNISONO_DEVICE unsigned char *destination(const ProgramTables &program,
                                            const Action &action, std::int32_t which,
                                            std::int64_t in_chunk, std::int64_t piece) {
    if (action.window_at >= 0 && which-- == 0)
      return window(call_.rank, action.window_at, piece);
    if (action.output_at >= 0 && which-- == 0)
      return call_.output + bytes(action.output_at + in_chunk);
    const std::int32_t rank =
        rows<std::int32_t>(program, program.deliveries)[action.first_delivery + which];
    return shared_.outputs[rank] + bytes(action.delivered_at + in_chunk);
  }

  UNISONO_DEVICE const unsigned char *address(const Source &source, std::int64_t in_chunk,
                                              std::int64_t piece) {
    if (source.home == rows::window)
      return window(source.rank, source.at, piece);
    const bool own = source.rank == call_.rank;
    if (source.home == rows::input)
      return (own ? call_.input : shared_.inputs[source.rank]) + bytes(source.at + in_chunk);
    return (own ? call_.output : shared_.outputs[source.rank]) + bytes(source.at + in_chunk);
  }

  UNISONO_DEVICE unsigned char *window(std::int32_t rank, std::int64_t at,
                                       std::int64_t piece) {
    const U64 half = (first_generation_ + U64(piece)) & 1;
    return shared_.windows[rank] + std::int64_t(half) * call_.half + bytes(at);
  }

  // Tiles are cut alike on all ranks, and in a piece that is not full as in a full one: a half
  // of the window is used again by the same block, which knows that its readers have done.
  UNISONO_DEVICE void cut(const ProgramTables &program, const Action &action,
                          std::int64_t piece, Movement &movement) {
    const std::int64_t left = action.size - piece * program.piece;
    movement.num_sources = action.end_source - action.first_source;
    movement.num_destinations = num_destinations(action);
    movement.bytes = bytes(left < program.piece ? left : program.piece);
    movement.tile = bytes(program.tile);
    movement.first = movement.tile * target_.block();
    movement.stride = movement.tile * target_.blocks();
    movement.divisor = action.completes ? call_.divisor : 1;
  }

  UNISONO_DEVICE std::int64_t bytes(std::int64_t elements) const {
    return elements * std::int64_t(call_.itemsize);
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
  Memory &shared_;
  BlockWords &mine_;
  const U64 first_generation_;
  U64 waiting_since_ = 0;
};

} // namespace unisono::device

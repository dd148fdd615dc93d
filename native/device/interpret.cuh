// The interpreter of programs for devices: one source for CUDA, HIP and the threads of a CPU.
//
// Every thread block runs the whole program of its rank on its own tiles of every chunk. An
// action is elementwise within its chunk, so block b reads only what the blocks b of other
// ranks wrote, and there is one progress word for each rank and block:
//
//   wait     the threads poll different ranks, with acquire loads; then a block barrier
//   move     copy or reduce the tiles, in the order of the sources, as the CPU's engine does
//   publish  a block barrier; then thread 0 stores the progress word with release, if
//            another rank waits for this action
//
// What can be done at the same time is done by threads of different warps: one publishes,
// others poll, and others find the addresses of what is moved next.
//
// Every wait is bounded: see waits.cuh. A block that gives up fills its slice of the output
// with a value that is not a number, and ends: the kernel ends normally, and the device stays
// usable.
//
// In small calls nobody publishes: data travel with flags. See packets.cuh.
//
// Target provides the block (its number, threads and barriers), the ordered loads and
// stores, and the clock. Mover does the work on bytes: see move.cuh.

#pragma once

#include "device/packets.cuh"

namespace unisono::device {

// One piece of a chunk: what is combined, and where it is written. The blocks take its tiles in
// turn. It is in memory that the threads of the block share, which saves registers.
struct Movement {
  const unsigned char *sources[most_ranks];
  unsigned char *destinations[most_ranks + 2];
  std::int32_t num_sources, num_destinations;
  std::int64_t bytes, tile; // of the piece, and of one of its tiles
  // If this block has one tile, of one vector at most for each thread: where it begins and
  // ends. Otherwise both are 0.
  std::int64_t begin, end;
  std::uint32_t divisor;
  std::int32_t is_awaited; // by other ranks: what it writes is published
};

// What the threads of a block share.
template <class Vector> struct BlockMemory {
  RankWords *words[most_ranks]; // of all ranks
  // Of all ranks, by rows::Home: inputs and outputs, where they are exposed or this rank's, and
  // windows; of calls with packets: this block's packets of this generation.
  unsigned char *buffers[3][most_ranks];
  // Of the action that runs, and of the next one: some threads prepare it when others still
  // move the data of this one.
  Movement movements[2];
  // The bits in which an address of an action is not aligned to a vector. One turn uses the
  // word of its number, and clears that of the one after the next.
  std::uint32_t misaligned[4];
  U64 call;             // its number; for thread 0
  U64 first_generation; // of the call
  ProgramTables program; // that runs
  // Of the program, if they fit: every action reads them, one row after another.
  Vector tables[table_bytes / sizeof(Vector)];

  // The rows of a table that begins at a place.
  template <class Row>
  UNISONO_DEVICE const Row *rows(const ProgramTables &program, std::uint32_t at) const {
    const unsigned char *from = program.bytes > table_bytes
                                    ? program.tables
                                    : reinterpret_cast<const unsigned char *>(tables);
    return reinterpret_cast<const Row *>(from + at);
  }
};

template <class Target, class Mover> class Interpreter {
  using Vector = typename Target::Vector;

public:
  using Memory = BlockMemory<Vector>;
  UNISONO_DEVICE Interpreter(const Launch &call, Target target, Memory &shared)
      : call_(call), target_(target), shared_(shared), waits_(call, target_) {}

  UNISONO_DEVICE void run() {
    if (!execute())
      abandon();
  }

  // The same for a call whose data travel as packets.
  UNISONO_DEVICE void run_packets() {
    if (!exchange_packets())
      abandon();
  }

private:
  using BlockPackets = Packets<Target, Memory>;

  UNISONO_DEVICE BlockWords &mine() const { return waits_.mine(); }
  UNISONO_DEVICE U64 number() const { return waits_.number(); }

  // Of this block on another rank; known from the arrival on.
  UNISONO_DEVICE const BlockWords &words(std::int32_t rank) const {
    return shared_.words[rank]->blocks[target_.block()];
  }

  // This thread's number for work that few threads do: the first ones are of that warp, if
  // there are so many. Work of different warps is done at the same time.
  UNISONO_DEVICE std::int32_t from_warp(std::int32_t which) const {
    const std::int32_t first = which * Target::warp;
    const std::int32_t number = target_.thread() - (first < target_.threads() ? first : 0);
    return number < 0 ? number + target_.threads() : number;
  }

  // Round 0 is the arrival; round k runs the program on piece k - 1. One loop for both keeps
  // the number of registers down.
  UNISONO_DEVICE bool execute() {
    const ProgramTables &program = shared_.program;
    UNISONO_NO_UNROLL
    for (std::int32_t round = 0; round == 0 || round <= program.pieces; ++round) {
      const std::int32_t piece = round - 1;
      if (round == 0 ? !arrive() : piece >= 2 && !window_is_free(program, piece))
        return false;
      UNISONO_NO_UNROLL
      for (std::int32_t a = 0; round > 0 && a < program.num_actions; ++a)
        if (!run_action(program, a, piece))
          return false;
      if (round > 0) {
        target_.sync();
        if (target_.thread() == 0)
          report(piece + 1, 0);
      }
    }
    if (!wait(rows<rows::Wait>(program, program.exits), program.num_exits,
              std::int32_t(program.pieces) - 1))
      return false;
    end_call();
    return true;
  }

  UNISONO_DEVICE void end_call() {
    take_time(2);
    if (target_.thread() == 0) {
      target_.store_relaxed(&mine().calls, shared_.call);
      if (target_.block() == 0)
        target_.store_relaxed(call_.done, shared_.call);
    }
  }

  // A call whose data travel as packets. The ranks need not arrive before data are exchanged,
  // but before the call ends: so all of them have read this half of the windows when the call
  // after the next one uses it again.
  UNISONO_DEVICE bool exchange_packets() {
    take_time(0);
    bool failed = target_.load_relaxed(&call_.words->failed) != 0;
    copy_program(call_.packets);
    find_packets();
    if (target_.any(failed))
      return false;
    const U64 call = number();
    BlockPackets packets(call_, target_, waits_, shared_);
    const std::int32_t control = target_.thread() - packets.first_control();
    const bool is_clear = mine().packet_epoch == epoch();
    if (control == 0) {
      if (is_clear)
        packets.announce();
      publish_arrival(call);
    }
    // Without threads for it the ranks are seen to arrive first, too.
    UNISONO_NO_UNROLL
    for (std::int32_t turn = is_clear && packets.first_control() != 0; turn < 2; ++turn) {
      failed = turn == 1 && !Mover::exchange(packets);
      UNISONO_NO_UNROLL
      for (std::int32_t q = control; control >= 0 && q < call_.n && !failed;
           q += target_.threads() - packets.first_control())
        failed = !packets.sees(q, call, is_clear);
      if (target_.any(failed) || (turn == 0 && !is_clear && !clear_packets()))
        return false;
    }
    take_time(1);
    if (target_.thread() == 0)
      target_.store_relaxed(&mine().progress, progress_word(1, 0));
    end_call();
    return true;
  }

  // The flags of packets have 32 bits, so one from long ago could be taken for one of this call.
  // Therefore they are cleared long before that: when all ranks have arrived nobody reads those
  // of an earlier call, and when all have cleared theirs they are written again.
  UNISONO_DEVICE bool clear_packets() {
    constexpr std::int64_t bytes = 2 * (packet_header + packet_bytes);
    Vector *const packets =
        reinterpret_cast<Vector *>(call_.peers[call_.rank].packets + target_.block() * bytes);
    UNISONO_NO_UNROLL
    for (std::int32_t i = target_.thread(); i < bytes / std::int32_t(sizeof(Vector));
         i += target_.threads())
      packets[i] = Vector{};
    target_.sync();
    if (target_.thread() == 0) {
      target_.store_relaxed(&mine().packet_epoch, epoch());
      report(0, 1);
    }
    bool failed = false;
    UNISONO_NO_UNROLL
    for (std::int32_t q = target_.thread(); q < call_.n && !failed; q += target_.threads())
      failed = !reached(q, 0, 1);
    return !target_.any(failed);
  }

  UNISONO_DEVICE U64 epoch() const { return shared_.first_generation >> packet_epoch_bits; }

  // Where the packets of this call are, and this rank's buffers.
  UNISONO_DEVICE void find_packets() {
    const U64 half = mine().progress >> progress_action_bits & 1;
    UNISONO_NO_UNROLL
    for (std::int32_t q = from_warp(1); q < call_.n; q += target_.threads()) {
      shared_.words[q] = call_.peers[q].words;
      shared_.buffers[rows::window][q] =
          call_.peers[q].packets + packet_header +
          (target_.block() * 2 + std::int32_t(half)) * (packet_header + packet_bytes);
    }
    if (target_.thread() == 0) {
      shared_.buffers[rows::input][call_.rank] = const_cast<unsigned char *>(call_.input);
      shared_.buffers[rows::output][call_.rank] = call_.output;
    }
  }

  // All threads of the block, while some of them wait for the others to arrive.
  UNISONO_DEVICE void copy_program(const ProgramTables &program) {
    if (from_warp(2) == 0) {
      shared_.program = program;
      shared_.first_generation = mine().progress >> progress_action_bits;
      UNISONO_UNROLL
      for (std::uint32_t &word : shared_.misaligned)
        word = 0;
    }
    if (program.bytes > table_bytes)
      return;
    const Vector *from = reinterpret_cast<const Vector *>(program.tables);
    UNISONO_NO_UNROLL
    for (std::uint32_t i = std::uint32_t(from_warp(3)); i < program.bytes / sizeof(Vector);
         i += target_.threads())
      shared_.tables[i] = from[i];
  }

  template <class Row>
  UNISONO_DEVICE const Row *rows(const ProgramTables &program, std::uint32_t at) const {
    return shared_.template rows<Row>(program, at);
  }

  // For a trace.
  UNISONO_DEVICE void take_time(int which) {
    if (call_.times != nullptr && target_.block() == 0 && target_.thread() == 0)
      target_.store_relaxed(&call_.times[which], target_.clock_ns());
  }

  // Publishes this rank's arrival, waits for that of all ranks, compares their calls, finds
  // their buffers, and chooses the program. If a call before this one has failed, nothing is
  // published, since the other ranks would take it for the one that has failed.
  UNISONO_DEVICE bool arrive() {
    take_time(0);
    const U64 call = number();
    // All of them at once: nobody reports a failure of this call before it is published.
    bool failed = target_.any(target_.load_relaxed(&call_.words->failed) != 0);
    if (target_.thread() == 0 && !failed)
      publish_arrival(call);
    const std::uint32_t flags = std::uint32_t(call_.flags);
    copy_program(call_.programs[flags]);
    std::uint32_t exposed = flags; // by the ranks that this thread waits for
    UNISONO_NO_UNROLL
    for (std::int32_t q = from_warp(1); q < call_.n && !failed; q += target_.threads())
      failed = !sees_arrival(call, q, exposed);
    // Usually one barrier tells that all ranks have arrived and expose the same.
    if (target_.any(failed || exposed != flags)) {
      if (target_.any(failed))
        return false;
      copy_program(call_.programs[common(flags, exposed)]);
      target_.sync();
    }
    take_time(1);
    return true;
  }

  // Of the flags, those that all ranks have.
  UNISONO_DEVICE std::uint32_t common(std::uint32_t flags, std::uint32_t exposed) {
    if (target_.any((exposed & exposes_input) == 0))
      flags &= ~std::uint32_t(exposes_input);
    if (target_.any((exposed & exposes_output) == 0))
      flags &= ~std::uint32_t(exposes_output);
    return flags;
  }

  UNISONO_DEVICE void publish_arrival(U64 call) {
    shared_.call = call;
    Arrival &arrival = mine().arrivals[call & 1];
    arrival.facts = {call_.fingerprint,
                     call_.flags | U64(target_.blocks()) << flag_bits,
                     {call_.segment[0], call_.segment[1]},
                     {call_.offset[0], call_.offset[1]}};
    arrival.summary = call_.summary;
    target_.store_release(&arrival.call, call);
    // Not before: the release would wait until the host's memory is written.
    if (call_.begun != nullptr && target_.block() == 0)
      target_.store_relaxed(call_.begun, call);
  }

  // Waits for one rank; false if the call is given up, or differs from that rank's.
  UNISONO_DEVICE bool sees_arrival(U64 call, std::int32_t rank, std::uint32_t &exposed) {
    const Peer peer = call_.peers[rank];
    shared_.words[rank] = peer.words;
    shared_.buffers[rows::window][rank] = peer.windows;
    const Arrival &arrival = peer.words->blocks[target_.block()].arrivals[call & 1];
    if (!waits_.poll(&arrival.call, call, rank))
      return false;
    const CallFacts facts = arrival.facts; // all of it is on its way at the same time
    if (!waits_.agrees(arrival, facts.fingerprint, facts.flags, rank))
      return false;
    exposed &= std::uint32_t(facts.flags);
    const bool own = rank == call_.rank;
    shared_.buffers[rows::input][rank] =
        own ? const_cast<unsigned char *>(call_.input) : segment_buffer(peer, facts, 0);
    shared_.buffers[rows::output][rank] = own ? call_.output : segment_buffer(peer, facts, 1);
    return true;
  }

  // Where a buffer that another rank exposes is mapped here.
  UNISONO_DEVICE static unsigned char *segment_buffer(const Peer &peer,
                                                      const CallFacts &facts, int which) {
    const U64 flag = which == 0 ? exposes_input : exposes_output;
    if ((facts.flags & flag) == 0)
      return nullptr;
    if (facts.segment[which] == 0) // of a rank of this process: its address
      return reinterpret_cast<unsigned char *>(facts.offset[which]);
    return peer.segments[facts.segment[which]] + facts.offset[which];
  }

  // Actions take turns: what this one shares with the threads is not what the last one does,
  // whose data other threads may still move. Before the one after the next there is a barrier.
  UNISONO_DEVICE bool run_action(const ProgramTables &program, std::int32_t number,
                                 std::int32_t piece) {
    const Action &action = rows<Action>(program, 0)[number];
    const std::uint32_t turn =
        std::uint32_t(piece) * std::uint32_t(program.num_actions) + std::uint32_t(number);
    Movement &movement = shared_.movements[turn & 1];
    prepare(program, action, number, piece, turn);
    if (!wait(rows<rows::Wait>(program, program.waits) + action.first_wait,
              action.end_wait - action.first_wait, piece))
      return false;
    Mover::move(target_, movement, shared_.misaligned[turn & 3]);
    if (movement.is_awaited) {
      target_.sync();
      if (target_.thread() == 0)
        report(piece, U64(number) + 1);
    }
    return true;
  }

  // This generation's half of the window is free when its readers have finished the
  // generation that used it before. That of an earlier call is: all ranks have arrived.
  UNISONO_DEVICE bool window_is_free(const ProgramTables &program, std::int32_t piece) {
    const std::int32_t *readers = rows<std::int32_t>(program, program.readers);
    bool failed = false;
    UNISONO_NO_UNROLL
    for (std::int32_t i = from_warp(1); i < program.num_readers && !failed;
         i += target_.threads())
      failed = !reached(readers[i], piece - 1, 0);
    return !target_.any(failed);
  }

  // Waits for ranks, each of which a thread polls. The barrier orders what all threads of
  // the block read next after what their polls have seen.
  UNISONO_DEVICE bool wait(const rows::Wait *waits, std::int32_t count, std::int32_t piece) {
    bool failed = false;
    UNISONO_NO_UNROLL
    for (std::int32_t i = from_warp(1); i < count && !failed; i += target_.threads())
      failed = !reached(waits[i].rank, piece, U64(waits[i].count));
    return !target_.any(failed);
  }

  UNISONO_DEVICE bool reached(std::int32_t rank, std::int32_t piece, U64 actions) {
    return waits_.poll(&words(rank).progress, progress_word(piece, actions), rank);
  }

  UNISONO_DEVICE void report(std::int32_t piece, U64 actions) {
    target_.store_release(&mine().progress, progress_word(piece, actions));
  }

  UNISONO_DEVICE U64 progress_word(std::int32_t piece, U64 actions) const {
    return (shared_.first_generation + U64(piece)) << progress_action_bits | actions;
  }

  // Where this piece of a chunk begins, in all places that an action reads and writes. The
  // barrier of the wait comes before they are used.
  UNISONO_DEVICE void prepare(const ProgramTables &program, const Action &action,
                              std::int32_t number, std::int32_t piece, std::uint32_t turn) {
    Movement &movement = shared_.movements[turn & 1];
    if (from_warp(3) == 0) {
      cut(program, action, number, piece, movement);
      shared_.misaligned[(turn + 2) & 3] = 0;
    }
    const Place *places = rows<Place>(program, program.places) + action.first_place;
    const std::int32_t sources = action.num_sources;
    UNISONO_NO_UNROLL
    for (std::int32_t i = from_warp(2); i < sources + action.num_destinations;
         i += target_.threads()) {
      unsigned char *address = address_of(places[i], program.piece, piece);
      if (i < sources)
        movement.sources[i] = address;
      else
        movement.destinations[i - sources] = address;
      if (const auto bits = reinterpret_cast<U64>(address) & 15; bits != 0)
        target_.or_in_block(&shared_.misaligned[turn & 3], std::uint32_t(bits));
    }
  }

  // Of a piece, of so many elements each. Windows have two halves, which pieces use in turn.
  UNISONO_DEVICE unsigned char *address_of(const Place &place, std::int64_t elements,
                                           std::int32_t piece) const {
    const bool in_window = place.home == rows::window;
    const bool is_odd = ((shared_.first_generation + U64(piece)) & 1) != 0;
    return shared_.buffers[place.home][place.rank < 0 ? call_.rank : place.rank] +
           bytes(in_window ? place.at : place.at + piece * elements) +
           (in_window && is_odd ? call_.half : 0);
  }

  // Tiles are cut alike on all ranks, and in a piece that is not full as in a full one: a half
  // of the window is used again by the same block, which knows that its readers have done.
  UNISONO_DEVICE void cut(const ProgramTables &program, const Action &action,
                          std::int32_t number, std::int32_t piece, Movement &movement) {
    const std::int64_t left = action.size - piece * program.piece;
    movement.num_sources = action.num_sources;
    movement.num_destinations = action.num_destinations;
    movement.bytes = bytes(left < program.piece ? left : program.piece);
    movement.tile = bytes(program.tile);
    cut_small(movement);
    movement.is_awaited = action.is_awaited && number + 1 < program.num_actions;
    movement.divisor = action.completes ? call_.divisor : 1;
  }

  // What there is to do at once takes longer to find out than to do.
  UNISONO_DEVICE void cut_small(Movement &m) const {
    constexpr std::int64_t vector = sizeof(Vector);
    const bool is_small = m.tile <= target_.threads() * vector &&
                          m.bytes <= target_.blocks() * m.tile && m.bytes % vector == 0 &&
                          m.tile % vector == 0;
    const std::int64_t end = (target_.block() + 1) * m.tile;
    m.begin = is_small ? end - m.tile : 0;
    m.end = !is_small ? 0 : end < m.bytes ? end : m.bytes;
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
    UNISONO_NO_UNROLL
    for (std::int64_t i = first + target_.thread(); i < end; i += target_.threads())
      call_.output[i] = static_cast<unsigned char>(call_.lost_value);
    if (target_.thread() == 0) // the host sees that this block has ended
      target_.store_relaxed(&mine().calls, number());
  }

  const Launch &call_;
  Target target_;
  Memory &shared_;
  Waits<Target> waits_;
};

} // namespace unisono::device

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
// Every wait is bounded: see waits.cuh. A block that gives up fills its tiles of the output
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
  std::int64_t bytes; // of the piece
  std::int32_t tile;  // bytes of one of its tiles
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
  U64 call;              // its number
  U64 first_generation;  // of the call
  ProgramTables program; // that runs
  PacketThreads threads; // if data travel as packets
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
  // after the next one uses it again. The end of the kernel orders that.
  UNISONO_DEVICE bool exchange_packets() {
    take_time(0);
    const bool was_failed = has_failed();
    const bool is_clear =
        mine().packet_epoch == epoch_of(mine().progress >> progress_action_bits);
    find_packets();
    copy_program(call_.packets);
    if (target_.any(was_failed))
      return false;
    BlockPackets packets(call_, target_, waits_, shared_);
    const std::int32_t control = target_.thread() - shared_.threads.first_control;
    if (control == 0) {
      target_.fence();
      store_arrival();
    }
    // Without threads for it the ranks are seen to arrive first, too.
    UNISONO_NO_UNROLL
    for (std::int32_t turn = is_clear && shared_.threads.first_control != 0; turn < 2; ++turn) {
      bool failed = turn == 1 && !Mover::exchange(packets);
      UNISONO_NO_UNROLL
      for (std::int32_t q = control; control >= 0 && q < call_.n && !failed;
           q += target_.threads() - shared_.threads.first_control)
        failed = !makes_this_call(q);
      if (target_.any(failed) || (turn == 0 && !is_clear && !clear_packets()))
        return false;
    }
    take_time(1);
    if (target_.thread() == 0)
      target_.store_relaxed(&mine().progress, progress_word(1, 0));
    end_call();
    return true;
  }

  // A rank whose data travel as packets: the first facts tell all that is needed.
  UNISONO_DEVICE bool makes_this_call(std::int32_t rank) {
    Flagged<Target> facts[1];
    return waits_.sees(arrival_of(rank), shared_.call, rank, facts);
  }

  // The flags of packets have 31 bits, so one from long ago could be taken for one of this call.
  // Therefore they are cleared before that: when all ranks have arrived nobody reads those
  // of an earlier call, and when all have cleared theirs they are written again.
  UNISONO_DEVICE bool clear_packets() {
    constexpr auto vectors = std::int32_t(2 * packet_bytes / std::int64_t(sizeof(Vector)));
    target_.fence(); // behind the arrivals that were seen
    target_.sync();
    Vector *const packets =
        reinterpret_cast<Vector *>(packets_of_block(call_.peers[call_.rank]));
    UNISONO_NO_UNROLL
    for (std::int32_t i = target_.thread(); i < vectors; i += target_.threads())
      packets[i] = Vector{};
    target_.sync();
    if (target_.thread() == 0) {
      target_.store_relaxed(&mine().packet_epoch, epoch_of(shared_.first_generation));
      report(0, 1);
    }
    bool failed = false;
    UNISONO_NO_UNROLL
    for (std::int32_t q = target_.thread(); q < call_.n && !failed; q += target_.threads())
      failed = !reached(q, 0, 1);
    return !target_.any(failed);
  }

  UNISONO_DEVICE static U64 epoch_of(U64 generation) { return generation >> packet_epoch_bits; }

  // Two halves, which generations use in turn.
  UNISONO_DEVICE unsigned char *packets_of_block(const Peer &peer) const {
    return peer.packets + target_.block() * (2 * packet_bytes);
  }

  // Where the packets of this call are, and this rank's buffers.
  UNISONO_DEVICE void find_packets() {
    const auto half = std::int64_t(mine().progress >> progress_action_bits & 1);
    UNISONO_NO_UNROLL
    for (std::int32_t q = from_warp(1); q < call_.n; q += target_.threads()) {
      const Peer peer = call_.peers[q];
      shared_.words[q] = peer.words;
      shared_.buffers[rows::window][q] = packets_of_block(peer) + half * packet_bytes;
    }
    if (target_.thread() == 0) {
      shared_.buffers[rows::input][call_.rank] = const_cast<unsigned char *>(call_.input);
      shared_.buffers[rows::output][call_.rank] = call_.output;
      shared_.threads =
          PacketThreads::of(target_, call_.packets.tile / std::int32_t(sizeof(Vector)));
    }
  }

  UNISONO_DEVICE void copy_program(const ProgramTables &program) {
    if (from_warp(2) == 0) {
      const U64 progress = mine().progress, calls = mine().calls;
      shared_.program = program;
      shared_.first_generation = progress >> progress_action_bits;
      shared_.call = calls + 1;
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
    const bool was_failed = has_failed();
    if (target_.thread() == 0)
      target_.fence(); // before the arrival is stored, while other threads load
    const std::uint32_t flags = std::uint32_t(call_.flags);
    find_peers();
    copy_program(call_.programs[flags]);
    if (target_.any(was_failed))
      return false;
    if (target_.thread() == 0)
      store_arrival();
    cut_first(shared_.program);
    std::uint32_t exposed = flags; // by the ranks that this thread waits for
    bool failed = false;
    UNISONO_NO_UNROLL
    for (std::int32_t q = from_warp(1); q < call_.n && !failed; q += target_.threads())
      failed = !sees_arrival(q, exposed);
    // Usually one barrier tells that all ranks have arrived and expose the same.
    if (target_.any(failed || exposed != flags)) [[unlikely]] {
      if (target_.any(failed))
        return false;
      copy_program(call_.programs[common(flags, exposed)]);
      target_.sync();
      cut_first(shared_.program);
    }
    // What other ranks wrote before they arrived is read behind the next barrier.
    if (from_warp(1) < call_.n)
      target_.fence();
    take_time(1);
    return true;
  }

  // Whether an earlier call has failed. All threads look before one publishes, and before any
  // of them can report that calls differ: so the other rank sees this one, too.
  UNISONO_DEVICE bool has_failed() const {
    return target_.load_relaxed(&call_.words->failed) != 0;
  }

  UNISONO_DEVICE void find_peers() {
    UNISONO_NO_UNROLL
    for (std::int32_t q = from_warp(1); q < call_.n; q += target_.threads()) {
      const Peer peer = call_.peers[q];
      shared_.words[q] = peer.words;
      shared_.buffers[rows::window][q] = peer.windows;
    }
  }

  UNISONO_DEVICE const Arrival &arrival_of(std::int32_t rank) const {
    return words(rank).arrivals[shared_.call & 1];
  }

  // Of the flags, those that all ranks have.
  UNISONO_DEVICE std::uint32_t common(std::uint32_t flags, std::uint32_t exposed) {
    if (target_.any((exposed & exposes_input) == 0))
      flags &= ~std::uint32_t(exposes_input);
    if (target_.any((exposed & exposes_output) == 0))
      flags &= ~std::uint32_t(exposes_output);
    return flags;
  }

  // By one thread. What this rank's earlier calls read, others may write when they see it.
  UNISONO_DEVICE void store_arrival() {
    const U64 call = shared_.call;
    Arrival &arrival = mine().arrivals[call & 1];
    store(arrival.facts,
          CallFacts{{call_.fingerprint,
                     waits_.own_flags(),
                     {std::uint16_t(call_.segment[0]), std::uint16_t(call_.segment[1])}},
                    {call_.offset[0], call_.offset[1]}},
          call);
    store(arrival.summary, call_.summary, call);
    target_.store_relaxed(&mine().begun, call);
    if (call_.begun != nullptr && target_.block() == 0)
      target_.store_relaxed(call_.begun, call);
  }

  // With the number of the call as flags.
  template <int units, class Value>
  UNISONO_DEVICE void store(U64 (&to)[units][flagged_words], const Value &value, U64 call) {
    const auto vectors = bit_cast<Vectors<Vector, Value>>(value);
    UNISONO_UNROLL
    for (int u = 0; u < units; ++u) {
      Flagged<Target> unit;
      unit.set(vectors.of[u], flag_of(call));
      target_.store_arrival(to[u], unit.words);
    }
  }

  // Waits for one rank; false if the call is given up, or differs from that rank's.
  UNISONO_DEVICE bool sees_arrival(std::int32_t rank, std::uint32_t &exposed) {
    Flagged<Target> read[Vectors<Vector, CallFacts>::count];
    if (!waits_.sees(arrival_of(rank), shared_.call, rank, read))
      return false;
    const auto facts = value_of<CallFacts>(read);
    exposed &= facts.head.flags;
    const bool own = rank == call_.rank;
    const Peer &peer = call_.peers[rank];
    shared_.buffers[rows::input][rank] =
        own ? const_cast<unsigned char *>(call_.input) : segment_buffer(peer, facts, 0);
    shared_.buffers[rows::output][rank] = own ? call_.output : segment_buffer(peer, facts, 1);
    return true;
  }

  // Where a buffer that another rank exposes is mapped here.
  UNISONO_DEVICE static unsigned char *segment_buffer(const Peer &peer,
                                                      const CallFacts &facts, int which) {
    const auto flag = std::uint32_t(which == 0 ? exposes_input : exposes_output);
    if ((facts.head.flags & flag) == 0)
      return nullptr;
    if (facts.head.segment[which] == 0) // of a rank of this process: its address
      return reinterpret_cast<unsigned char *>(facts.offset[which]);
    return peer.segments[facts.head.segment[which]] + facts.offset[which];
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
    if ((number | piece) != 0 && from_warp(3) == 0) {
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

  // That of the first action is known before the others have arrived.
  UNISONO_DEVICE void cut_first(const ProgramTables &program) {
    if (from_warp(3) == 0 && program.num_actions > 0)
      cut(program, rows<Action>(program, 0)[0], 0, 0, shared_.movements[0]);
  }

  // Of a piece, of so many bytes each. Windows have two halves, which pieces use in turn.
  UNISONO_DEVICE unsigned char *address_of(const Place &place, std::int64_t bytes,
                                           std::int32_t piece) const {
    const bool in_window = place.home == rows::window;
    const bool is_odd = ((shared_.first_generation + U64(piece)) & 1) != 0;
    return shared_.buffers[place.home][place.rank < 0 ? call_.rank : place.rank] +
           place.at + (in_window ? 0 : piece * bytes) +
           (in_window && is_odd ? call_.half : 0);
  }

  // Tiles are cut alike on all ranks, and in a piece that is not full as in a full one: a half
  // of the window is used again by the same block, which knows that its readers have done.
  UNISONO_DEVICE void cut(const ProgramTables &program, const Action &action,
                          std::int32_t number, std::int32_t piece, Movement &movement) {
    const std::int64_t left = action.size - piece * program.piece;
    movement.num_sources = action.num_sources;
    movement.num_destinations = action.num_destinations;
    movement.bytes = left < program.piece ? left : program.piece;
    movement.tile = program.tile;
    cut_small(movement);
    movement.is_awaited = action.is_awaited && number + 1 < program.num_actions;
    movement.divisor = action.completes ? call_.divisor : 1;
  }

  // What there is to do at once takes longer to find out than to do.
  UNISONO_DEVICE void cut_small(Movement &m) const {
    constexpr std::int32_t vector = sizeof(Vector);
    const bool is_small = m.tile <= target_.threads() * vector &&
                          m.bytes <= target_.blocks() * m.tile && m.bytes % vector == 0 &&
                          m.tile % vector == 0;
    const std::int64_t end = (target_.block() + 1) * m.tile;
    m.begin = is_small ? end - m.tile : 0;
    m.end = !is_small ? 0 : end < m.bytes ? end : m.bytes;
  }

  // Nobody takes what this block has left unwritten for a result. Tiles of other blocks are not
  // its business: they may be complete, and in place other ranks may still read them. Ranks that
  // deliver to this rank's output may do so later, and a block that gives up before it knows
  // what all ranks expose may cut other tiles than those that go on: so what the output holds
  // after a failure is not defined.
  UNISONO_DEVICE void abandon() {
    UNISONO_NO_UNROLL
    for (std::int32_t c = 0; c < call_.num_output_chunks; ++c)
      lose(call_.output_chunks[c]);
    if (target_.thread() == 0) // the host sees that this block has ended
      target_.store_relaxed(&mine().calls, shared_.call);
  }

  // Fills this block's tiles, which are cut as for the data; but not what this rank gave and
  // has in place, as the root of a broadcast: it is right, and others may still read it.
  UNISONO_DEVICE void lose(const OutputChunk &chunk) {
    const ProgramTables &program = shared_.program;
    if (chunk.own >= 0 && call_.input + chunk.own == call_.output + chunk.at)
      return;
    UNISONO_NO_UNROLL
    for (std::int64_t piece = 0; piece < chunk.size; piece += program.piece) {
      const std::int64_t left = chunk.size - piece;
      const std::int64_t size = left < program.piece ? left : program.piece;
      UNISONO_NO_UNROLL
      for (std::int64_t at = std::int64_t(target_.block()) * program.tile; at < size;
           at += target_.blocks() * program.tile)
        fill(chunk.at + piece + at, size - at < program.tile ? size - at : program.tile);
    }
  }

  UNISONO_DEVICE void fill(std::int64_t first, std::int64_t count) {
    UNISONO_NO_UNROLL
    for (std::int64_t i = target_.thread(); i < count; i += target_.threads())
      call_.output[first + i] = static_cast<unsigned char>(call_.lost_value);
  }

  const Launch &call_;
  Target target_;
  Memory &shared_;
  Waits<Target> waits_;
};

} // namespace unisono::device

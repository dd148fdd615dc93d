// What the host and the kernel agree on: the arguments of a launch, and the memory that the
// ranks of a device communicator share. A device's compiler reads this file too.
//
// A launch runs one rank's program of one call. Each of its thread blocks runs the whole
// program on its own tiles of every chunk, and waits only for the blocks of the same number
// on the other ranks.

#pragma once

#include "engine/program_rows.hpp"

namespace unisono::device {

using U64 = std::uint64_t;

constexpr int most_blocks = 256;    // of a launch
constexpr int most_ranks = 256;     // of a device communicator
constexpr int most_segments = 1024; // of a rank that others have mapped: 16 bits suffice
constexpr int table_bytes = 16 << 10; // of a program that a block copies to its own memory
constexpr unsigned progress_action_bits = 20; // the rest of a progress word is the generation
constexpr int flagged_words = 4; // for 16 bytes of data that travel with flags

// Of calls whose data travel as packets (device/packets.cuh).
constexpr int packet_blocks = 16;               // of a launch, at most
// Of a block: a power of 2, and a warp of 32 threads that sees arrivals.
constexpr int packet_threads = 288;
constexpr std::int64_t packet_bytes = 64 << 10; // of a block in a call, at most
constexpr unsigned packet_epoch_bits = 30; // so many generations later its packets are cleared

// Of a rank: its blocks have two halves each, which generations use in turn.
constexpr std::int64_t packet_area_bytes = packet_blocks * 2 * packet_bytes;

// What all ranks expose is the number of the program that they run, unless all send packets.
enum Flag : U64 { exposes_input = 1, exposes_output = 2, sends_packets = 4 };
constexpr unsigned flag_bits = 8; // above them are the blocks of the launch

// What a call is, for the error message when calls differ.
struct alignas(16) Summary {
  U64 count, content; // elements; a digest of the steps
  std::int32_t root;
  std::uint8_t collective, dtype, op, unused;
};

// What all other ranks read of a call; its first vector tells whether the calls agree.
struct alignas(16) CallHead {
  U64 fingerprint;          // of everything on which the ranks must agree
  std::uint32_t flags;      // and above flag_bits the blocks
  std::uint16_t segment[2]; // of the input and of the output, where they are exposed
};
struct alignas(16) CallFacts {
  CallHead head;
  U64 offset[2]; // in the segments
};

// Published by a block when it begins a call: facts and summary with flags (device/flagged.cuh),
// which are the number of the call. So a rank waits for no store of its own, and those who read
// have all of it as soon as it is there. Double-buffered by the parity of the call: a rank
// publishes call k + 2 only after it has seen that all have read those of call k. Until a call
// fails every one is published, so what a reader may find instead is call k - 2, whose 32 bits
// are others.
struct alignas(16) Arrival {
  U64 facts[sizeof(CallFacts) / 16][flagged_words];
  U64 summary[sizeof(Summary) / 16][flagged_words];
};

// The words of one block of one rank: written by that block alone, read by the same block
// of all ranks. They only grow, so a launch continues where the last one ended, also when a
// graph replays it.
struct BlockWords {
  alignas(128) U64 progress; // generation and actions done; stored with release
  // No other rank reads these.
  U64 calls;        // that have ended
  U64 packet_epoch; // of the last call with packets
  U64 begun;        // the call that was published last
  alignas(128) Arrival arrivals[2];
};

// The words of one rank.
struct RankWords {
  alignas(128) std::uint32_t failed; // 1: a block of this rank has reported a failure
  alignas(128) U64 closed; // 1: this rank's last kernel has ended, and it makes no more calls
  BlockWords blocks[most_blocks];
};

// What a rank knows of another one, or of itself: addresses that are valid on its device.
struct alignas(16) Peer {
  RankWords *words;
  unsigned char *windows; // two halves, which generations use in turn
  unsigned char *const *segments; // where its shared buffers are mapped, by their numbers
  unsigned char *packets; // packet_area_bytes; null if they are not used
};

// A place that an action reads or writes, or an action of a program, as the host has prepared
// them for devices: what the rows of the engine name by indices is looked up. Places are
// counted in bytes.
struct alignas(16) Place {
  std::int64_t at; // in the buffer, or in half a window
  std::int32_t home; // rows::input, rows::output or rows::window
  std::int32_t rank; // whose; -1: of the rank that runs the program
};
struct alignas(16) Action {
  std::int64_t size; // of its chunk, in bytes
  std::int32_t first_place, num_sources, num_destinations; // the sources come first
  std::int32_t first_wait, end_wait;
  std::int32_t completes, is_awaited; // whether another rank waits for it
  std::int32_t chunk;
  std::int32_t own_source; // the last one that is in a buffer of this rank, or -1
};

// A program for one combination of exposed buffers. Its tables follow each other in memory.
struct ProgramTables {
  const unsigned char *tables;
  std::uint32_t bytes; // of all tables, in whole vectors of 16 bytes
  // Where they begin: places (16 bytes each), waits, exits, readers. The actions are at the
  // beginning.
  std::uint32_t places, waits, exits, readers;
  std::int32_t num_actions, num_exits, num_readers;
  std::int64_t piece, pieces; // bytes of a chunk that are processed at a time
  std::int32_t tile;          // bytes; blocks take the tiles of a piece in turn
};

// A chunk of a rank's output, in bytes; and where in its input, if it is only copied from there,
// else -1.
struct OutputChunk {
  std::int64_t at, size, own;
};

// Why a call was abandoned; the numbers of FailureKind in memory/layout.hpp.
enum class Why : std::uint32_t { closed = 2, timeout = 4, mismatch = 5 };

// In memory that the host reads. `state` becomes 1 when the rest is written.
struct FailureSlot {
  std::uint32_t state, why;
  std::uint32_t rank; // that was waited for, or whose call differs
  std::uint32_t block;
  U64 call;
  const U64 *done; // of the launch
  Summary mine, theirs; // this rank's call and that rank's, if they differ
};

// What every call reads first is together at the beginning.
struct Launch {
  RankWords *words;  // of this rank
  const Peer *peers; // of all ranks
  std::int32_t rank, n;
  std::uint32_t divisor;
  std::uint32_t lost_value; // the byte that fills the output of an abandoned call
  const unsigned char *input;
  unsigned char *output;
  U64 fingerprint;
  U64 flags; // what this rank exposes
  U64 *begun; // in a graph, in the host's memory: the calls that have begun; else null
  U64 *done; // in the host's memory: becomes the number of this call when it has ended
  // In the host's memory, if the call is traced, else null: when block 0 began, when it had
  // seen all ranks arrive, and when it ended.
  U64 *times;
  std::int64_t half; // bytes of half a window
  ProgramTables packets; // for packets: in windows, a place is the number of a value
  ProgramTables programs[4]; // by what all ranks expose; no actions: not there
  U64 segment[2], offset[2]; // of what this rank exposes
  Summary summary;
  const std::uint32_t *abort; // in the host's memory; not 0: end at once
  FailureSlot *failure;
  U64 timeout_ns;
  const OutputChunk *output_chunks; // each of them once
  std::int32_t num_output_chunks;
};

} // namespace unisono::device

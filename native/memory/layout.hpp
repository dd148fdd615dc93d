// The layout of the memory that the ranks of one communicator share.
//
// One block of cache lines per rank, written by that rank alone and read by all, then one
// window per rank of this host, in two halves. Three kinds of words order all accesses:
// Header::seq (this rank has arrived at call seq, with these arguments), progress (it has
// done so many actions of a generation) and abort (the communicator has failed; written
// once, except that an earlier call's failure replaces that of a rank that has closed).
//
// Each is stored with release after what it announces, and loaded with acquire. A
// generation is one run of a program over one piece of the data; generations are numbered
// across all calls, alike on all ranks, and alternate between the halves of the windows.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

namespace unisono {

using Word = std::atomic<std::uint64_t>;
static_assert(Word::is_always_lock_free);

constexpr std::size_t line_size = 64;
constexpr std::size_t header_payload = 40;
constexpr unsigned action_bits = 20; // of a progress word; the rest is the generation
constexpr std::size_t most_actions = (std::size_t(1) << action_bits) - 1; // of a program

constexpr std::uint64_t progress_word(std::uint64_t generation, std::uint64_t actions) {
  return generation << action_bits | actions;
}

// Where an exposed buffer begins: a segment of its rank and an offset; or an address, valid
// in all threads of the process or private to the rank's process.
struct ExposedBuffer {
  static constexpr std::uint64_t anywhere = ~std::uint64_t(0), own = anywhere - 1;
  std::uint64_t segment;
  std::uint64_t offset;
};

// Published by a rank on arrival. Data that others read first may be in the same cache
// line.
struct alignas(line_size) Header {
  enum Flag : std::uint64_t { led = 1, exposes_input = 2, exposes_output = 4 };
  Word seq;
  std::uint64_t fingerprint;
  std::uint64_t flags;
  std::byte payload[header_payload]; // data, or ExposedBuffer[2]: input and output
};
static_assert(sizeof(Header) == line_size);
static_assert(2 * sizeof(ExposedBuffer) <= header_payload);

// The call in full, for records and for the error message when fingerprints differ. Its
// texts are stored one after another in `text`; src/unisono/runtime/call/notes.py shortens what
// does not fit, and src/unisono/runtime/observe/tracing.py reads the same layout.
struct alignas(line_size) Note {
  enum Text : std::size_t { algorithm, label, codec, shape, num_texts };
  std::uint64_t seq;
  std::uint64_t count;
  std::uint64_t fingerprint;
  std::uint64_t content; // a digest of the steps that are run
  std::int32_t root;
  std::uint8_t collective;
  std::uint8_t dtype;
  std::uint8_t op;
  // in bytes; not to be trusted in a note from another host
  std::uint8_t lengths[num_texts];
  char text[149];
};
static_assert(sizeof(Note) == 3 * line_size);
// it is sent as it is in memory
static_assert(std::has_unique_object_representations_v<Note>);

struct RankBlock {
  Header headers[2]; // by the parity of seq
  Note notes[2]; // of a remote rank: what it announced after a long wait
  // The call by which this rank was found to differ: written before the failure, by the
  // rank that found it or that was informed by another host. All writers write the same.
  Note differing;
  alignas(line_size) Word progress;
  alignas(line_size) std::atomic<std::uint32_t> asleep; // the futex a rank sleeps on
  // Not 0: it has closed the communicator; of a remote rank, when that was announced.
  alignas(line_size) Word closed;
  Word outbox; // its segment for send, or 0
  Word given_up; // the first call that it gave up, after which it used its buffers again
  // To find the rank that blocks the others: what a rank published that it waits for when
  // it last checked. An old value is harmless, because whether it has arrived can be seen;
  // where it cannot, because it comes by a stream, `needs` is all ones, and the rank clears
  // it when it no longer waits. These words are also sent to the ranks of other hosts.
  alignas(line_size) Word waits_for; // rank + 1, or 0; bit 32: for its arrival
  Word needs;
  // When it last checked, which a stopped rank does not; of a remote rank, when its words
  // arrived.
  Word looked;
  // Whether this rank can access the private memory of all others: 0 not tested, 1 yes, 2
  // no. The probe is a word that they can test it on.
  alignas(line_size) Word access;
  Word probe_at, probe_value;
  alignas(line_size) Word writing; // 1: it is writing to others' buffers
};

struct Control {
  std::uint64_t n;
  std::uint64_t half; // bytes of half a window
  alignas(line_size) Word abort;
  alignas(line_size) std::atomic<std::uint32_t> sleepers;
};

// Finds the parts of the memory of a communicator.
class Layout {
public:
  Layout() = default;
  // `local_ranks` are the ranks of this host, in an order that is the same on all of them.
  Layout(std::byte *base, std::size_t n, std::size_t half,
         const std::vector<std::size_t> &local_ranks)
      : base_(base), n_(n), half_(half) {
    if (local_ranks.size() == n)
      return; // windows are in the order of the ranks
    const std::shared_ptr<std::uint32_t[]> slots(new std::uint32_t[n]());
    for (std::size_t slot = 0; slot < local_ranks.size(); ++slot)
      slots[local_ranks[slot]] = std::uint32_t(slot);
    slots_ = slots;
  }

  static std::size_t bytes(std::size_t n, std::size_t windows, std::size_t half) {
    return windows_at(n) + 2 * windows * (half + page);
  }
  Control &control() const { return *reinterpret_cast<Control *>(base_); }
  RankBlock &block(std::size_t rank) const {
    return reinterpret_cast<RankBlock *>(base_ + blocks_at)[rank];
  }
  // Only local ranks have one.
  std::byte *window(std::size_t rank, std::uint64_t generation) const {
    // Offset by half a page: large arrays begin near the start of a page, and a copy
    // between addresses that agree in their last 12 bits makes loads wait for stores.
    const std::size_t slot = slots_ ? slots_[rank] : rank;
    return base_ + windows_at(n_) + (2 * slot + (generation & 1)) * (half_ + page) + page / 2;
  }
  std::size_t half() const { return half_; }

private:
  static constexpr std::size_t blocks_at = 4 * line_size;
  static constexpr std::size_t page = 4096;
  static_assert(sizeof(Control) <= blocks_at);
  static std::size_t windows_at(std::size_t n) {
    return (blocks_at + n * sizeof(RankBlock) + page - 1) / page * page;
  }
  std::byte *base_ = nullptr;
  std::size_t n_ = 0, half_ = 0;
  // the slot of each rank's window; null: its rank
  std::shared_ptr<const std::uint32_t[]> slots_;
};

// Why a communicator is aborted, in one word, so that the first failure is kept atomically.
enum class FailureKind : std::uint8_t {
  none,
  peer_lost,
  closed,
  interrupted,
  timeout,
  mismatch,
  size_mismatch,
  out_of_resources,
  truncated,
  unreachable,
  corrupted,
  connection_lost
};
constexpr FailureKind last_failure_kind = FailureKind::connection_lost;

// Marks the numbers of calls on a device in failures: they are counted apart.
constexpr std::uint32_t device_call = 1u << 31;

struct Failure {
  static constexpr unsigned rank_bits = 12;
  static constexpr std::size_t most_ranks = std::size_t(1) << rank_bits;
  FailureKind kind = FailureKind::none;
  std::uint32_t culprit = 0; // the rank that caused it
  std::uint32_t reporter = 0; // the rank that detected it
  std::uint32_t seq = 0; // the low 32 bits of the call's number

  // Whether a call fails because of it. A rank that has closed ends the calls on the host
  // that it did not complete: those from `seq` on. Every other failure ends all calls, and
  // every failure ends those on a device.
  bool ends(std::uint64_t call) const {
    const auto number = std::uint32_t(call);
    const bool later =
        ((seq | number) & device_call) == 0 && std::int32_t(seq - number) > 0;
    return kind != FailureKind::none && !(kind == FailureKind::closed && later);
  }

  std::uint64_t word() const {
    return std::uint64_t(kind) | std::uint64_t(culprit & rank_mask) << 8 |
           std::uint64_t(reporter & rank_mask) << (8 + rank_bits) | std::uint64_t(seq) << 32;
  }
  static Failure of(std::uint64_t word) {
    return {FailureKind(word & 0xff), std::uint32_t(word >> 8 & rank_mask),
            std::uint32_t(word >> (8 + rank_bits) & rank_mask), std::uint32_t(word >> 32)};
  }

private:
  static constexpr std::uint32_t rank_mask = most_ranks - 1;
};

} // namespace unisono

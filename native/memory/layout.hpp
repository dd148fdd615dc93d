// What lies in the memory that the ranks of one communicator share.
//
// One block of lines per rank, written by that rank alone and read by all, then one
// window per rank of this host, in two halves. Everything is ordered by three kinds of words:
//
//   Header::seq   "I have arrived at call number seq, and this is what I was called with"
//   progress      "of generation g I have done so many actions"
//   abort         "this communicator is broken", written once by whoever finds it so
//
// each stored with release after what it speaks of, and loaded with acquire. A generation
// is one run of a program over one piece of the data; generations are numbered through
// all calls, alike on all ranks, and use the halves of the windows in turn.

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

// Where a lent buffer begins: in which of its rank's segments, and how far in; or at which
// address, of a memory that threads have in common or that is private to a process.
struct Lent {
  static constexpr std::uint64_t anywhere = ~std::uint64_t(0), own = anywhere - 1;
  std::uint64_t segment;
  std::uint64_t offset;
};

// Said by a rank on arrival. What others read first may ride along in the same line.
struct alignas(line_size) Header {
  enum Flag : std::uint64_t { led = 1, lends_input = 2, lends_output = 4 };
  Word seq;
  std::uint64_t fingerprint;
  std::uint64_t flags;
  std::byte payload[header_payload]; // data, or Lent[2]: input and output
};
static_assert(sizeof(Header) == line_size);
static_assert(2 * sizeof(Lent) <= header_payload);

// The same call in full, for records and for the error message when fingerprints differ.
// Its texts lie one after the other in `text`; src/unisono/runtime/call/notes.py shortens what
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
  std::uint8_t lengths[num_texts]; // in bytes; a note from elsewhere may say too much
  char text[149];
};
static_assert(sizeof(Note) == 3 * line_size);
static_assert(std::has_unique_object_representations_v<Note>); // it travels as it lies

struct RankBlock {
  Header headers[2]; // by the parity of seq
  Note notes[2]; // of a rank of another host: what it said when it had waited for long
  // The call by which this rank was found to differ: written by whoever found it, or heard
  // it from another host, before the verdict. All who write it write the same.
  Note differing;
  alignas(line_size) Word progress;
  alignas(line_size) std::atomic<std::uint32_t> asleep; // the futex a rank sleeps on
  alignas(line_size) Word left; // not 0: closed its communicator; of another host: when heard
  Word outbox;                                          // its segment for send, or 0
  // For naming who holds everybody up: what a rank said it waits for when it last looked
  // up from waiting. Old news is harmless, for whether it has come can be seen; where it
  // cannot, because it comes by a stream, `needs` is all ones, and the rank says when it
  // waits no longer. Ranks of other hosts are told what is told here of theirs.
  alignas(line_size) Word waits_for; // rank + 1, or 0; bit 32: for its arrival
  Word needs;
  Word looked; // when it last looked up, by the clock of its host: a stopped rank does not
  // Whether this rank can reach the private memory of all others: 0 not tried, 1 it can,
  // 2 it cannot. The probe is a word that they can try it on.
  alignas(line_size) Word reaches;
  Word probe_at, probe_value;
  alignas(line_size) Word touching; // 1: it is writing to others' buffers
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
  // `here` are the ranks of this host, in an order that all of them know alike.
  Layout(std::byte *base, std::size_t n, std::size_t half, const std::vector<std::size_t> &here)
      : base_(base), n_(n), half_(half) {
    if (here.size() == n)
      return; // windows lie in the order of the ranks
    const std::shared_ptr<std::uint32_t[]> slots(new std::uint32_t[n]());
    for (std::size_t slot = 0; slot < here.size(); ++slot)
      slots[here[slot]] = std::uint32_t(slot);
    slots_ = slots;
  }

  static std::size_t bytes(std::size_t n, std::size_t windows, std::size_t half) {
    return windows_at(n) + 2 * windows * (half + page);
  }
  Control &control() const { return *reinterpret_cast<Control *>(base_); }
  RankBlock &block(std::size_t rank) const {
    return reinterpret_cast<RankBlock *>(base_ + blocks_at)[rank];
  }
  // Only ranks of this host have one.
  std::byte *window(std::size_t rank, std::uint64_t generation) const {
    // Half a page in: large arrays begin near the beginning of a page, and copying between
    // addresses that agree in their last 12 bits makes loads wait for stores.
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
  std::shared_ptr<const std::uint32_t[]> slots_; // of each rank's window; null: its rank
};

// Why a communicator is broken, in one word, so that the first to say it is believed.
enum class Trouble : std::uint8_t {
  none, peer_lost, left, interrupted, timeout, mismatch, misfit, starved, cut, unreachable,
  corrupted, severed
};
constexpr Trouble last_trouble = Trouble::severed;

struct Verdict {
  static constexpr unsigned rank_bits = 12;
  static constexpr std::size_t most_ranks = std::size_t(1) << rank_bits;
  Trouble trouble = Trouble::none;
  std::uint32_t culprit = 0;  // who is the cause
  std::uint32_t reporter = 0; // who found out
  std::uint32_t seq = 0;      // in which call, as far as 32 bits tell

  std::uint64_t word() const {
    return std::uint64_t(trouble) | std::uint64_t(culprit & rank_mask) << 8 |
           std::uint64_t(reporter & rank_mask) << (8 + rank_bits) | std::uint64_t(seq) << 32;
  }
  static Verdict of(std::uint64_t word) {
    return {Trouble(word & 0xff), std::uint32_t(word >> 8 & rank_mask),
            std::uint32_t(word >> (8 + rank_bits) & rank_mask), std::uint32_t(word >> 32)};
  }

private:
  static constexpr std::uint32_t rank_mask = most_ranks - 1;
};

} // namespace unisono

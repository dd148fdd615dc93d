// Waiting for other ranks, and giving up.
//
// Every wait is bounded: by the time limit of the call, and by a word in the host's memory.
// Who gives up reports why, once for each rank. What is rarely called is a function of its
// own: a small call takes no longer than to fetch some instructions.

#pragma once

#include "device/flagged.cuh"

namespace unisono::device {

// The number of this call, by the words of block 0, which takes part in all calls. If calls
// differ that block has not ended this one, unless a failure was claimed before it did. It may
// have if another block has waited too long; then its number is that of the call it has begun,
// which is one less if that block has not come so far yet.
template <class Target>
UNISONO_DEVICE U64 number_of_failed(const Launch &call, const Target &target, Why why) {
  const BlockWords &first = call.words->blocks[0];
  return why == Why::mismatch ? target.load_acquire(&first.calls) + 1
                              : target.load_acquire(&first.begun);
}

// Writes the first failure of a rank to where its host looks; false if there was one before.
template <class Target>
UNISONO_DEVICE bool write_failure(const Launch &call, const Target &target, Why why,
                                  std::int32_t rank) {
  // Before the claim, after which block 0 may end the call.
  const U64 number = number_of_failed(call, target, why);
  if (!target.claim(&call.words->failed))
    return false;
  FailureSlot &slot = *call.failure;
  slot.why = std::uint32_t(why);
  slot.rank = std::uint32_t(rank);
  slot.block = std::uint32_t(target.block());
  slot.call = number;
  slot.done = call.done;
  slot.mine = call.summary;
  return true;
}

// Reports it to the host.
template <class Target>
UNISONO_COLD void report_failure(const Launch &call, Target target, Why why,
                                 std::int32_t rank) {
  if (write_failure(call, target, why, rank))
    target.store_host(&call.failure->state, 1);
}

// Whether somebody who has waited long for a rank goes on. The first time is given 0, then what
// it returned: 0 if the call is given up.
template <class Target>
UNISONO_COLD std::uint32_t look_around(const Launch &call, Target target, std::int32_t rank,
                                       std::uint32_t since) {
  constexpr unsigned time_unit_bits = 20; // about a millisecond
  constexpr std::uint32_t given_up = 0;
  const std::uint32_t is_closed = 2 * std::uint32_t(rank) + 2; // times are odd
  if (target.load_host(call.abort) != 0) {
    (void)target.claim(&call.words->failed); // for the calls behind it
    return given_up;
  }
  if (target.load_relaxed(&call.words->failed) != 0)
    return given_up;
  // A rank closes after its last kernel has ended: what is not there then never comes. So
  // whoever waits looks for it once more.
  if (target.load_acquire_host(&call.peers[rank].words->closed) != 0) {
    if (since != is_closed)
      return is_closed;
    report_failure(call, target, Why::closed, rank);
    return given_up;
  }
  const auto now = std::uint32_t(target.clock_ns() >> time_unit_bits) | 1;
  if (since % 2 == 0)
    return now;
  if (now - since < call.timeout_ns >> time_unit_bits)
    return since;
  report_failure(call, target, Why::timeout, rank);
  return given_up;
}

template <class Target>
UNISONO_COLD void report_mismatch(const Launch &call, Target target, const Arrival &arrival,
                                  U64 number, std::int32_t rank);

template <class Target> class Waits {
public:
  UNISONO_DEVICE Waits(const Launch &call, const Target &target) : call_(call), target_(target) {}

  UNISONO_DEVICE BlockWords &mine() const { return call_.words->blocks[target_.block()]; }

  // Polls a word of a rank until it is at least `least`; false if the call is given up. After
  // some looks an acquire load is made only of what is there: it disturbs other blocks.
  UNISONO_DEVICE bool poll(const U64 *word, U64 least, std::int32_t rank) {
    constexpr unsigned eager_looks = 32;
    UNISONO_NO_UNROLL
    for (unsigned looks = 1;
         (looks > eager_looks && target_.load_relaxed(word) < least) ||
         target_.load_acquire(word) < least;
         ++looks) {
      if (looks % Target::looks_per_check == 0 && !goes_on(rank))
        return false;
      target_.pause(looks);
    }
    return true;
  }

  // Whether to go on waiting for a rank, for which a thread has waited long.
  UNISONO_DEVICE bool goes_on(std::int32_t rank) {
    since_ = look_around(call_, target_, rank, since_);
    return since_ != 0;
  }

  // Waits for data of a rank that have flags; false if the call is given up.
  template <int units>
  UNISONO_DEVICE bool read(const U64 (*from)[flagged_words], U64 flag, std::int32_t rank,
                           Flagged<Target> (&found)[units]) {
    UNISONO_NO_UNROLL
    for (unsigned looks = 1;; ++looks) {
      UNISONO_UNROLL
      for (int u = 0; u < units; ++u)
        target_.load_arrival(from[u], found[u].words);
      std::uint32_t different = 0;
      UNISONO_UNROLL
      for (int u = 0; u < units; ++u)
        different |= found[u].difference(flag);
      if (different == 0)
        return true;
      if (looks % Target::looks_per_check == 0 && !goes_on(rank))
        return false;
      target_.pause(looks);
    }
  }

  // Waits until a rank begins this call, and reads so many vectors of its facts; false if the
  // call is given up, or differs from that rank's.
  template <int units>
  UNISONO_DEVICE bool sees(const Arrival &arrival, U64 call, std::int32_t rank,
                           Flagged<Target> (&facts)[units]) {
    constexpr auto exposed = std::uint32_t(exposes_input | exposes_output);
    if (!read(arrival.facts, flag_of(call), rank, facts))
      return false;
    const auto head = bit_cast<CallHead>(facts[0].data());
    if (head.fingerprint == call_.fingerprint &&
        ((head.flags ^ own_flags()) & ~exposed) == 0)
      return true;
    report_mismatch(call_, target_, arrival, call, rank);
    return false;
  }

  // What a rank says of its call beside the fingerprint.
  UNISONO_DEVICE std::uint32_t own_flags() const {
    return std::uint32_t(call_.flags) | std::uint32_t(target_.blocks()) << flag_bits;
  }

private:
  const Launch &call_;
  Target target_;
  std::uint32_t since_ = 0; // see look_around
};

// Reports that a rank makes another call. Its summary is stored right behind its facts.
template <class Target>
UNISONO_COLD void report_mismatch(const Launch &call, Target target, const Arrival &arrival,
                                  U64 number, std::int32_t rank) {
  Flagged<Target> read[Vectors<typename Target::Vector, Summary>::count];
  if (!Waits<Target>(call, target).read(arrival.summary, flag_of(number), rank, read))
    return;
  if (!write_failure(call, target, Why::mismatch, rank))
    return;
  call.failure->theirs = value_of<Summary>(read);
  target.store_host(&call.failure->state, 1);
}

} // namespace unisono::device

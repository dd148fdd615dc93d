// Waiting for other ranks, and giving up.
//
// Every wait is bounded: by the time limit of the call, and by a word in the host's memory.
// Who gives up reports why, once for each rank. What is rarely called is a function of its
// own: a small call takes no longer than to fetch some instructions.

#pragma once

#include "device/launch.hpp"

namespace unisono::device {

// Reports the first failure of a rank to its host.
template <class Target>
UNISONO_COLD void report_failure(const Launch &call, Target target, Why why, std::int32_t rank,
                                 const Summary *other) {
  if (!target.claim(&call.words->failed))
    return;
  FailureSlot &slot = *call.failure;
  slot.why = std::uint32_t(why);
  slot.rank = std::uint32_t(rank);
  slot.block = std::uint32_t(target.block());
  slot.call = call.words->blocks[0].calls + 1;
  slot.done = call.done;
  slot.mine = call.summary;
  if (other != nullptr)
    slot.theirs = *other;
  target.store_host(&slot.state, 1);
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
    report_failure(call, target, Why::closed, rank, nullptr);
    return given_up;
  }
  const auto now = std::uint32_t(target.clock_ns() >> time_unit_bits) | 1;
  if (since % 2 == 0)
    return now;
  if (now - since < call.timeout_ns >> time_unit_bits)
    return since;
  report_failure(call, target, Why::timeout, rank, nullptr);
  return given_up;
}

template <class Target> class Waits {
public:
  UNISONO_DEVICE Waits(const Launch &call, const Target &target) : call_(call), target_(target) {}

  UNISONO_DEVICE BlockWords &mine() const { return call_.words->blocks[target_.block()]; }

  // Of this call; read again where it is needed, which saves registers.
  UNISONO_DEVICE U64 number() const { return mine().calls + 1; }

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

  // Whether a rank that has arrived makes the same call, by two of its facts.
  UNISONO_DEVICE bool agrees(const Arrival &arrival, U64 fingerprint, U64 flags,
                             std::int32_t rank) {
    constexpr U64 exposed = exposes_input | exposes_output;
    if (fingerprint == call_.fingerprint && ((flags ^ own_flags()) & ~exposed) == 0)
      return true;
    report_failure(call_, target_, Why::mismatch, rank, &arrival.summary);
    return false;
  }

  // What a rank says of its call beside the fingerprint.
  UNISONO_DEVICE U64 own_flags() const {
    return call_.flags | U64(target_.blocks()) << flag_bits;
  }

private:
  const Launch &call_;
  Target target_;
  std::uint32_t since_ = 0; // see look_around
};

} // namespace unisono::device

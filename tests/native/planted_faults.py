"""Faults that the model of the protocol must find, and what else it changes.

Each is an exact piece of the product's text and what stands in its place in the model.
If the text has changed, the build says which fault has to be planted anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Change:
    """`original`, which is found once in `file`, becomes `planted`."""

    name: str
    file: str
    original: str
    planted: str


@dataclass(frozen=True)
class Fault(Change):
    """A change made when its name is asked for, and the scenario that finds it."""

    scenario: str = ""
    options: dict[str, int] = field(default_factory=dict)


def _if(name: str) -> str:
    return f'model::planted("{name}")'


def _relaxed(name: str, file: str, text: str, order: str, scenario: str) -> Fault:
    """An operation that has lost its order."""
    weak = f"({_if(name)} ? std::memory_order_relaxed : std::{order})"
    planted = text.replace(f"std::{order}", weak)
    options = {"retries": 2} if "message" in scenario else {}
    return Fault(name, file, text, planted, scenario, options)


SUPPORT = (
    # A ring that a scenario can fill.
    Change(
        "a small ring",
        "p2p/byte_ring.hpp",
        "inline std::size_t ring_capacity(std::size_t n) {\n",
        "inline std::size_t ring_capacity(std::size_t n) {\n"
        "  if (n > 0)\n    return 64;\n",
    ),
    # The other half of a fault.
    Change(
        "wake before the store",
        "engine/collective.cpp",
        "  wake_sleepers(comm_.layout(), comm_.size());\n}\n\n} // namespace unisono",
        f"  if (!{_if('wake before the store')})\n"
        "    wake_sleepers(comm_.layout(), comm_.size());\n}\n\n} // namespace unisono",
    ),
)

FAULTS = (
    # A dropped release or acquire.
    _relaxed(
        "arrival without release",
        "engine/collective.cpp",
        "header.seq.store(seq, std::memory_order_release);\n  wake_sleepers(",
        "memory_order_release",
        "arrival",
    ),
    _relaxed(
        "arrival without acquire",
        "engine/collective.cpp",
        "if (header.seq.load(std::memory_order_acquire) != seq) {",
        "memory_order_acquire",
        "arrival",
    ),
    _relaxed(
        "progress without release",
        "engine/collective.cpp",
        "progress.store(progress_word(generation, actions),\n"
        + " " * 52
        + "std::memory_order_release);",
        "memory_order_release",
        "windows, then others",
    ),
    _relaxed(
        "progress without acquire",
        "engine/collective.cpp",
        ".progress.load(std::memory_order_acquire);\n  return seen >= word;",
        "memory_order_acquire",
        "windows, then others",
    ),
    _relaxed(
        "sent without release",
        "p2p/channel.cpp",
        "ring->sent.store(sent, std::memory_order_release);",
        "memory_order_release",
        "messages",
    ),
    _relaxed(
        "sent without acquire",
        "p2p/channel_receive.cpp",
        "box.ring->sent.load(std::memory_order_acquire) - taken;",
        "memory_order_acquire",
        "messages",
    ),
    _relaxed(
        "taken without release",
        "p2p/channel_receive.cpp",
        "box.ring->taken.store(taken + some, std::memory_order_release);",
        "memory_order_release",
        "messages",
    ),
    _relaxed(
        "taken without acquire",
        "p2p/channel.cpp",
        "std::size_t room = capacity_ - "
        "(sent - ring->taken.load(std::memory_order_acquire));",
        "memory_order_acquire",
        "messages",
    ),
    _relaxed(
        "truncation without release",
        "p2p/channel.cpp",
        "box.ring->truncated.store(1, std::memory_order_release);",
        "memory_order_release",
        "message aborted after another",
    ),
    _relaxed(
        "truncation without acquire",
        "p2p/channel_receive.cpp",
        "box.ring->truncated.load(std::memory_order_acquire) != 0;",
        "memory_order_acquire",
        "message aborted after another",
    ),
    # A swapped store.
    Fault(
        "arrival before what it speaks of",
        "engine/collective.cpp",
        "  header.fingerprint = plan_->fingerprint;\n  header.flags = flags;\n",
        f"  if ({_if('arrival before what it speaks of')})\n"
        "    header.seq.store(seq, std::memory_order_release);\n"
        "  header.fingerprint = plan_->fingerprint;\n  header.flags = flags;\n",
        "arrival",
    ),
    Fault(
        "progress before the action",
        "engine/collective.cpp",
        "        unreachable_ = traced_ ? run_traced(action) : run_action(action);\n",
        f"        if ({_if('progress before the action')})\n"
        "          report(generation, action_ + 1);\n"
        "        unreachable_ = traced_ ? run_traced(action) : run_action(action);\n",
        "windows, then others",
    ),
    # The guard of writes to others' buffers: WriteGuard and give_up.
    Fault(
        "guard stores with release",
        "memory/zero_copy.cpp",
        "writing_->store(1, std::memory_order_seq_cst);",
        "writing_->store(1, "
        f"{_if('guard stores with release')} || {_if('guard with acq_rel')} "
        "? std::memory_order_release : std::memory_order_seq_cst);",
        "guard",
    ),
    Fault(
        "guard with acq_rel",
        "memory/zero_copy.cpp",
        "control().abort.load(std::memory_order_seq_cst);",
        f"control().abort.load({_if('guard with acq_rel')} "
        "? std::memory_order_acquire : std::memory_order_seq_cst);",
        "guard",
    ),
    Fault(
        "give_up without its fence",
        "memory/zero_copy.cpp",
        "  std::atomic_thread_fence(std::memory_order_seq_cst);\n  for (",
        f"  if (!{_if('give_up without its fence')})\n"
        "    std::atomic_thread_fence(std::memory_order_seq_cst);\n  for (",
        "guard",
    ),
    Fault(
        "buffers used again at once",
        "memory/zero_copy.cpp",
        "has_writers() && now_ns() < until;)",
        f"!{_if('buffers used again at once')} && has_writers() && now_ns() < until;)",
        "one aborts, exposed",
    ),
    Fault(
        "delivered without a look",
        "memory/zero_copy.cpp",
        "  if (!really)\n    return;\n  writing_ =",
        f"  if (!really || {_if('delivered without a look')})\n"
        "    return;\n  writing_ =",
        "one aborts, exposed",
    ),
    # The last look of a reader.
    Fault(
        "the last look before what was read",
        "engine/collective.cpp",
        "  std::atomic_thread_fence(std::memory_order_acquire);\n"
        "  if (const Failure broken",
        f"  if (!{_if('the last look before what was read')})\n"
        "    std::atomic_thread_fence(std::memory_order_acquire);\n"
        "  if (const Failure broken",
        "one aborts, read by others",
    ),
    Fault(
        "no last look",
        "engine/collective.cpp",
        "  if (status != Status::done || exposed_ == 0)\n",
        f"  if (status != Status::done || exposed_ == 0 || {_if('no last look')})\n",
        "one aborts, read by others",
    ),
    Fault(
        "a call given up in silence",
        "memory/zero_copy.cpp",
        "  std::uint64_t none = 0;\n  layout_.block(rank_).given_up",
        "  std::uint64_t none = 0;\n"
        f"  if (!{_if('a call given up in silence')})\n"
        "    layout_.block(rank_).given_up",
        "one aborts, read by others",
    ),
    # Waits left out.
    Fault(
        "a window not waited for",
        "engine/collective.cpp",
        "bool Collective::window_free() {\n  if (window_free_)",
        "bool Collective::window_free() {\n"
        f"  if (window_free_ || {_if('a window not waited for')})",
        "windows, one way",
    ),
    Fault(
        "an action does not wait",
        "engine/collective.cpp",
        "    if (!passed(wait, generation)) {\n"
        "      begin_wait(std::size_t(wait.rank));",
        f"    if (!{_if('an action does not wait')} && !passed(wait, generation)) {{\n"
        "      begin_wait(std::size_t(wait.rank));",
        "windows, then others",
    ),
    Fault(
        "left before readers are done",
        "engine/collective.cpp",
        "      if (!passed(program_->exits[wait_], comm_.generation - 1)) {",
        f"      if (!{_if('left before readers are done')} &&\n"
        "          !passed(program_->exits[wait_], comm_.generation - 1)) {",
        "exposed",
    ),
    Fault(
        "more sent than there is room",
        "p2p/channel.cpp",
        "  const std::size_t some = std::min(room, transfer.bytes_ - transfer.done_);",
        "  const std::size_t some = std::min("
        f"{_if('more sent than there is room')} ? capacity_ : room, "
        "transfer.bytes_ - transfer.done_);",
        "long message",
        {"retries": 3},
    ),
    # Failures.
    Fault(
        "the last failure stands",
        "engine/comm_failure.cpp",
        "  Word &abort = layout_.control().abort;\n  for (found = 0;",
        "  Word &abort = layout_.control().abort;\n"
        f"  if ({_if('the last failure stands')}) {{\n"
        "    abort.store(found = failure.word(), std::memory_order_release);\n"
        "    return true;\n  }\n  for (found = 0;",
        "several abort",
    ),
    Fault(
        "a rank that closed in a later call stands",
        "engine/comm_failure.cpp",
        "!Failure::of(found).ends(failure.seq);)",
        "!Failure::of(found).ends(failure.seq) && "
        f"!({_if('a rank that closed in a later call stands')} && found != 0);)",
        "one aborts, one has closed",
    ),
    Fault(
        "a rank that closed ends earlier calls",
        "memory/layout.hpp",
        "!(kind == FailureKind::closed && later);",
        "!(kind == FailureKind::closed && later && "
        f"!{_if('a rank that closed ends earlier calls')});",
        "one has closed",
    ),
    Fault(
        "its own failure reported",
        "engine/comm_failure.cpp",
        "  wake_sleepers(layout_, size());\n  return Failure::of(found);",
        "  wake_sleepers(layout_, size());\n"
        f"  return {_if('its own failure reported')} ? failure : Failure::of(found);",
        "several abort",
    ),
    Fault(
        "abandoned without notice",
        "p2p/channel.cpp",
        "  if (transfer.done_ < transfer.bytes_) {\n    box.ring->truncated.store(",
        f"  if (!{_if('abandoned without notice')} &&\n"
        "      transfer.done_ < transfer.bytes_) {\n    box.ring->truncated.store(",
        "message aborted",
        {"retries": 2},
    ),
    # Sleep: these cost time in the product, so they are looked for where no sleep ends.
    Fault(
        "no second look before sleep",
        "memory/wait.hpp",
        "    if (!ready())\n      sleep(sleep_ns_);",
        f"    if ({_if('no second look before sleep')} || !ready())\n"
        "      sleep(sleep_ns_);",
        "sleeping",
        {"newest": 1, "timeouts": 0},
    ),
    Fault(
        "wake before the store",
        "engine/collective.cpp",
        "void Collective::report(std::uint64_t generation, std::uint64_t actions) {\n",
        "void Collective::report(std::uint64_t generation, std::uint64_t actions) {\n"
        f"  if ({_if('wake before the store')})\n"
        "    wake_sleepers(comm_.layout(), comm_.size());\n",
        "driven",
        {"newest": 1, "timeouts": 0},
    ),
    Fault(
        "awake without having been counted",
        "memory/wait.hpp",
        "    control_.sleepers.fetch_add(1, std::memory_order_seq_cst);",
        f"    if (!{_if('awake without having been counted')})\n"
        "      control_.sleepers.fetch_add(1, std::memory_order_seq_cst);",
        "sleeping",
        {"newest": 1, "timeouts": 0},
    ),
)

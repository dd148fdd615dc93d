#include "cuda/call_records.hpp"

#include <chrono>
#include <thread>
#include <utility>

namespace unisono::cuda {

using device::Launch;
using device::RankWords;

namespace {

constexpr std::int64_t clock_period = 50'000'000;
constexpr std::int64_t longest_clock_wait = 1'000'000'000; // for the last answer of the clock

std::uint64_t load(const std::uint64_t &word) {
  return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}

void store(std::uint64_t &word, std::uint64_t value) {
  __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}

} // namespace

void DeviceClock::add(std::int64_t launched, std::uint64_t begun) {
  const std::int64_t difference = launched - std::int64_t(begun);
  if (since_ == unknown || launched - since_ > window) {
    before_ = std::exchange(now_, difference);
    since_ = launched;
  }
  now_ = std::max(now_, difference);
}

CallRecords::CallRecords(Comm &comm, const Device &device)
    : recorder_(comm.engine().recorder), trace_(comm.engine().trace),
      communicator_(comm.id()), device_(device), memory_(device, sizeof(HostMemory)),
      host_(*memory_.host<HostMemory>()), on_device_(memory_.device<HostMemory>()) {
  host_.peer.words = reinterpret_cast<RankWords *>(on_device_->words);
  recorder_->add_source(this, [this] { look(); });
}

CallRecords::~CallRecords() {
  recorder_->remove_source(this);
  if (clock_stream_ == nullptr)
    return;
  // The driver would wait in ways that disturb captures.
  for (const std::int64_t begun = now_ns(); asked_ != 0 && now_ns() - begun < longest_clock_wait;) {
    read_own_clock();
    std::this_thread::sleep_for(std::chrono::microseconds(100));
  }
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuStreamDestroy_v2(clock_stream_);
}

Record &CallRecords::record(const Call &call, std::int64_t now) {
  Record &made = recorder_->begin(*call.note, communicator_, now);
  made.site = call.site;
  made.device = device_.ordinal();
  made.timed = false;
  made.stream = reinterpret_cast<std::uintptr_t>(call.stream);
  return made;
}

void CallRecords::launch(const Call &call, Launch &launch) {
  const std::lock_guard lock(mutex_);
  const bool traced = trace_->on();
  Slot *const slot = take_slot();
  Record &made = record(call, now_ns());
  const std::uint64_t number = pending_.empty() ? last_ + 1 : pending_.back().number + 1;
  made.note.seq = number;
  pending_.push_back({&made, made.id, number, slot, traced, call.queued});
  if (slot == nullptr) {
    launch.done = &on_device_->repeated;
    return;
  }
  Slot &there = on_device_->slots[slot - host_.slots];
  launch.done = &there.done;
  launch.times = traced ? there.times : nullptr;
}

// Null if all are used.
CallRecords::Slot *CallRecords::take_slot() {
  if (used_slots_ == capacity)
    read();
  if (used_slots_ == capacity)
    return nullptr;
  ++used_slots_;
  Slot &slot = host_.slots[next_slot_++ % capacity];
  for (std::uint64_t &time : slot.times)
    store(time, 0);
  store(slot.done, 0);
  return &slot;
}

void CallRecords::capture(const Call &call, Launch &launch) {
  const std::lock_guard lock(mutex_);
  launch.done = &on_device_->repeated;
  Record &made = record(call, now_ns());
  made.note.seq = 0; // it is a call when it is repeated
  made.state.store(Record::captured, std::memory_order_relaxed);
  if (trace_->on())
    trace(made, 0, call.queued);
}

void CallRecords::cancel() {
  const std::lock_guard lock(mutex_);
  if (pending_.empty())
    return; // the communicator has failed meanwhile, and this call with it
  const Pending call = pending_.back();
  pending_.pop_back();
  if (call.slot != nullptr) {
    --used_slots_;
    --next_slot_;
  }
  end(call, Record::failed, now_ns());
}

void CallRecords::read_clock(Function kernel) {
  if (!trace_->on())
    return;
  const std::lock_guard lock(mutex_);
  read_own_clock();
  if (asked_ != 0 || now_ns() - last_asked_ < clock_period)
    return;
  if (clock_stream_ == nullptr &&
      api().cuStreamCreate(&clock_stream_, stream_non_blocking) != success)
    return;
  store(host_.clock.done, 0);
  Launch launch{}; // programs without actions
  launch.peers = &on_device_->peer;
  launch.words = reinterpret_cast<device::RankWords *>(on_device_->words);
  launch.n = 1;
  launch.done = &on_device_->clock.done;
  launch.times = on_device_->clock.times;
  void *arguments[] = {&launch};
  asked_ = last_asked_ = now_ns();
  if (api().cuLaunchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, clock_stream_, arguments, nullptr) !=
      success)
    asked_ = 0;
}

void CallRecords::read_own_clock() {
  if (asked_ == 0 || load(host_.clock.done) == 0)
    return;
  clock_.add(std::exchange(asked_, 0), load(host_.clock.times[0]));
}

void CallRecords::look() {
  const std::lock_guard lock(mutex_);
  read();
}

void CallRecords::fail() {
  const std::lock_guard lock(mutex_);
  read();
  const std::int64_t now = now_ns();
  for (const Pending &call : pending_) {
    compare_clocks(call);
    end(call, Record::failed, now);
  }
  pending_.clear();
  used_slots_ = 0;
}

// The calls of a communicator run one after another: when one has ended, so have those
// before it.
void CallRecords::read() {
  read_own_clock();
  last_ = std::max(last_, load(host_.repeated));
  std::size_t ended = 0;
  for (std::size_t i = 0; i < pending_.size(); ++i) {
    const Pending &call = pending_[i];
    if (call.slot == nullptr) {
      if (call.number <= last_)
        ended = i + 1;
      continue;
    }
    const std::uint64_t number = load(call.slot->done);
    if (number == 0)
      break;
    renumber(i, number);
    compare_clocks(call);
    last_ = std::max(last_, number);
    ended = i + 1;
  }
  const std::int64_t now = now_ns();
  for (; ended > 0; --ended) {
    const Pending call = pending_.front();
    pending_.pop_front();
    used_slots_ -= call.slot != nullptr;
    end(call, Record::completed, now);
  }
  if (pending_.empty())
    return;
  if (pending_.front().number <= last_)
    renumber(0, last_ + 1);
  begin(pending_.front());
}

// Of a call and those behind it. The host does not see what graphs repeat in between.
void CallRecords::renumber(std::size_t first, std::uint64_t number) {
  if (pending_[first].number == number)
    return;
  for (std::size_t i = first; i < pending_.size(); ++i) {
    Pending &call = pending_[i];
    call.number = number + (i - first);
    if (call.record->id == call.id)
      call.record->note.seq = call.number;
  }
}

// A call that has begun was launched before.
void CallRecords::compare_clocks(const Pending &call) {
  const std::uint64_t begun = call.traced && call.slot ? load(call.slot->times[0]) : 0;
  if (begun != 0 && call.record->id == call.id)
    clock_.add(call.record->created, begun);
}

void CallRecords::begin(const Pending &call) {
  const std::uint64_t begun = call.traced && call.slot ? load(call.slot->times[0]) : 0;
  Record &record = *call.record;
  if (begun == 0 || record.id != call.id || record.begun != 0)
    return;
  compare_clocks(call);
  record.begun = clock_.to_host(begun);
  record.state.store(Record::started, std::memory_order_relaxed);
}

void CallRecords::end(const Pending &call, Record::State how, std::int64_t now) {
  Record &record = *call.record;
  if (record.id != call.id)
    return; // overwritten by a later call
  std::int64_t times[num_times] = {};
  for (std::size_t i = 0; call.traced && call.slot && i < num_times; ++i)
    if (const std::uint64_t time = load(call.slot->times[i]); time != 0) {
      const std::int64_t least = i == 0 ? std::max(record.created, last_ended_) : times[i - 1];
      times[i] = std::clamp(clock_.to_host(time), least, std::max(least, now));
    }
  record.begun = times[0];
  record.timed = times[2] != 0;
  last_ended_ = std::max(last_ended_, times[2]);
  record.ended = record.timed ? times[2] : now;
  record.state.store(how, std::memory_order_relaxed);
  if (call.traced)
    trace(record, times[1], call.queued);
}

void CallRecords::trace(const Record &record, std::int64_t arrived, bool queued) {
  const auto communicator = std::uint32_t(communicator_);
  const std::int64_t begun = record.begun != 0 ? record.begun : record.created;
  trace_->called() = {record.note,
                      record.created,
                      begun,
                      record.ended != 0 ? record.ended : begun,
                      0,
                      communicator,
                      -1,
                      0,
                      record.site,
                      record.state.load(std::memory_order_relaxed),
                      queued,
                      std::int16_t(record.device),
                      record.stream};
  if (arrived == 0)
    return;
  Moment &moment = trace_->moment();
  moment = {};
  moment.kind = Moment::arrival;
  moment.begin = begun;
  moment.end = arrived;
  moment.seq = std::uint32_t(record.note.seq);
  moment.communicator = communicator;
  moment.device = 1;
}

void CallRecords::set_number(const std::uint64_t *done, std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  read();
  for (std::size_t i = 0; i < pending_.size(); ++i)
    if (const Slot *slot = pending_[i].slot;
        slot != nullptr && &on_device_->slots[slot - host_.slots].done == done)
      return renumber(i, number);
}

std::uint64_t CallRecords::last() {
  const std::lock_guard lock(mutex_);
  read();
  return last_;
}

std::optional<Note> CallRecords::note_of(std::uint64_t number) {
  const std::lock_guard lock(mutex_);
  for (const Pending &call : pending_)
    if (call.number == number && call.record->id == call.id)
      return call.record->note;
  return {};
}

} // namespace unisono::cuda

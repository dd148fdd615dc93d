#include "engine/task.hpp"

namespace unisono {

Hook Task::fired = {nullptr, nullptr, nullptr};

Task::~Task() {
  Hook *hook = hooks_.load(std::memory_order_acquire);
  while (hook != &fired && hook != nullptr) { // a forked process: the task never ended here
    Hook *next = hook->next;
    delete hook;
    hook = next;
  }
}

void Task::when_done(void (*call)(void *, int), void *arg) {
  if (queued) {
    auto *hook = new Hook{call, arg, hooks_.load(std::memory_order_acquire)};
    while (hook->next != &fired)
      if (hooks_.compare_exchange_weak(hook->next, hook, std::memory_order_acq_rel,
                                       std::memory_order_acquire))
        return;
    delete hook;
  }
  call(arg, int(state.load(std::memory_order_acquire)));
}

void Task::close_record(State how) {
  if (record == nullptr || record->id != record_id)
    return;
  record->ended = now_ns();
  record->encoded = encoded;
  record->decoded = decoded;
  record->state.store(how == succeeded ? Record::completed : Record::failed,
                      std::memory_order_relaxed);
}

void Task::publish(State how) {
  if (!queued) {
    state.store(how, std::memory_order_release);
    return;
  }
  std::uint32_t found = pending;
  if (!state.compare_exchange_strong(found, how, std::memory_order_acq_rel))
    return;
  Hook *hook = hooks_.exchange(&fired, std::memory_order_acq_rel);
  while (hook != nullptr) {
    Hook *next = hook->next;
    hook->call(hook->arg, int(how));
    delete hook;
    hook = next;
  }
}

} // namespace unisono

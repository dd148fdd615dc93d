// The table of the emulation's functions. Each of them is called through a place that counts
// its calls and, if a test asks for it, fails one of them.

#include <array>
#include <atomic>
#include <cstdint>
#include <string_view>

#include "cuda/emulated.hpp"

namespace unisono::cuda::emulated {

namespace {

enum Index : std::size_t {
#define UNISONO_CUDA_INDEX(name, arguments) index_of_##name,
  UNISONO_CUDA_ALL_FUNCTIONS(UNISONO_CUDA_INDEX)
#undef UNISONO_CUDA_INDEX
  num_functions
};

constexpr std::array<std::string_view, num_functions> names = {
#define UNISONO_CUDA_NAME(name, arguments) #name,
    UNISONO_CUDA_ALL_FUNCTIONS(UNISONO_CUDA_NAME)
#undef UNISONO_CUDA_NAME
};

struct Record {
  std::atomic<std::uint64_t> calls = 0;
  std::atomic<std::int64_t> fails_in = 0; // so many calls; 0: none fails
  std::atomic<Result> failure = success;
};
std::array<Record, num_functions> records;

// What this call returns instead of doing anything; success: it is done.
Result injected(Record &record) {
  record.calls.fetch_add(1, std::memory_order_relaxed);
  if (record.fails_in.load(std::memory_order_relaxed) == 0)
    return success;
  return record.fails_in.fetch_sub(1) == 1 ? record.failure.load() : success;
}

template <std::size_t index, auto function> struct Recorded;
template <std::size_t index, class... A, Result (*function)(A...)>
struct Recorded<index, function> {
  static Result call(A... arguments) {
    const Result failed = injected(records[index]);
    return failed != success ? failed : function(arguments...);
  }
};

Record *record_of(std::string_view name) {
  for (std::size_t i = 0; i < num_functions; ++i)
    if (names[i] == name)
      return &records[i];
  return nullptr;
}

} // namespace

std::uint64_t calls_of(std::string_view name) {
  const Record *const record = record_of(name);
  return record == nullptr ? 0 : record->calls.load();
}

std::uint64_t all_calls() {
  std::uint64_t sum = 0;
  for (const Record &record : records)
    sum += record.calls.load();
  return sum;
}

bool fail_call(std::string_view name, std::int64_t number, Result failure) {
  Record *const record = record_of(name);
  if (record == nullptr)
    return false;
  record->failure = failure;
  record->fails_in = number;
  return true;
}

} // namespace unisono::cuda::emulated

namespace unisono::cuda {

Api emulated_api() {
  (void)emulated::Settings(); // throws if one is no number
  Api made;
#define UNISONO_CUDA_EMULATE(name, arguments)                                                  \
  made.name = emulated::Recorded<emulated::index_of_##name, &emulated::name>::call;
  UNISONO_CUDA_ALL_FUNCTIONS(UNISONO_CUDA_EMULATE)
#undef UNISONO_CUDA_EMULATE
  made.emulated = true;
  return made;
}

} // namespace unisono::cuda

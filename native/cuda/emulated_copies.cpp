// Copies, memsets and words that streams wait for, as work of streams.

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "cuda/emulated_memory.hpp"
#include "cuda/emulated_streams.hpp"

namespace unisono::cuda::emulated {

namespace {

void *at_address(Address address) { return reinterpret_cast<void *>(address); }

// A copy of one word, for which kernels may wait, is one store.
void write(void *to, const void *from, std::size_t bytes) {
  std::uint64_t word;
  if (bytes != sizeof word || reinterpret_cast<std::uintptr_t>(to) % sizeof word != 0) {
    std::memmove(to, from, bytes);
    return;
  }
  std::memcpy(&word, from, sizeof word);
  std::atomic_ref(*static_cast<std::uint64_t *>(to)).store(word, std::memory_order_release);
}

// A range that is looked up again when the work runs, because it may have been freed.
struct Place {
  Address address;
  std::size_t bytes;
  bool ours, writes;
  bool there(State &state) const {
    return !ours || accessible(state, address, bytes, writes);
  }
};

Work copy_work(State &state, Place to, Place from) {
  return [&state, to, from](device::CpuThreads &) -> Result {
    {
      std::lock_guard lock(state.mutex);
      if (!to.there(state) || !from.there(state))
        return illegal_address;
    }
    write(at_address(to.address), at_address(from.address), to.bytes);
    return success;
  };
}

// A copy from memory that the driver does not know: its bytes are taken at once, as the
// driver may do; so the caller may use the memory again.
Work copy_of_bytes(State &state, Place to, Address from) {
  const auto *const first = static_cast<const unsigned char *>(at_address(from));
  std::vector<unsigned char> bytes(first, first + to.bytes);
  return [&state, to, bytes = std::move(bytes)](device::CpuThreads &) -> Result {
    {
      std::lock_guard lock(state.mutex);
      if (!to.there(state))
        return illegal_address;
    }
    write(at_address(to.address), bytes.data(), bytes.size());
    return success;
  };
}

Result copy(Entry &at, StreamState &stream, Address to, Address from, std::size_t bytes) {
  if (bytes == 0)
    return success;
  MemoryState &memory = *at.state.memory;
  const Range target = range_of(memory, to, bytes), source = range_of(memory, from, bytes);
  if (target == Range::wrong || source == Range::wrong)
    return invalid_value;
  const Place into{to, bytes, target == Range::known, true};
  const Place out_of{from, bytes, source == Range::known, false};
  StreamsState &streams = *at.state.streams;
  if (stream.capture != nullptr && !(into.ours && out_of.ours))
    return streams.refuse_captured(stream, capture_unsupported);
  if (into.ours && !out_of.ours)
    return streams.submit(stream, copy_of_bytes(at.state, into, from));
  if (const Result refused = streams.submit(stream, copy_work(at.state, into, out_of)))
    return refused;
  // Memory that the driver does not know is written when the call returns.
  return into.ours ? success : streams.synchronize(at.lock, stream);
}

// A copy in the default stream, which has ended when the call returns.
Result copy_and_wait(Entry &at, Address to, Address from, std::size_t bytes, Address device) {
  if (bytes == 0)
    return success;
  if (range_of(*at.state.memory, device, bytes) != Range::known)
    return invalid_value;
  if (const Result refused = at.state.streams->refuse_unsafe())
    return refused;
  StreamState &stream = *at.state.streams->legacy(at.device);
  if (const Result refused = copy(at, stream, to, from, bytes))
    return refused;
  return at.state.streams->synchronize(at.lock, stream);
}

} // namespace

Result cuMemcpyHtoD_v2(Address to, const void *from, std::size_t bytes) {
  return with_context([&](Entry &at) -> Result {
    return copy_and_wait(at, to, Address(from), bytes, to);
  });
}

Result cuMemcpyDtoH_v2(void *to, Address from, std::size_t bytes) {
  return with_context([&](Entry &at) -> Result {
    return copy_and_wait(at, Address(to), from, bytes, from);
  });
}

Result cuMemcpyAsync(Address to, Address from, std::size_t bytes, Stream handle) {
  return with_context([&](Entry &at) -> Result {
    const auto stream = at.state.streams->find(at, handle);
    return stream == nullptr ? Result(invalid_handle) : copy(at, *stream, to, from, bytes);
  });
}

namespace {

Result fill(Entry &at, StreamState &stream, Address address, unsigned char value,
            std::size_t bytes) {
  if (bytes == 0)
    return success;
  if (range_of(*at.state.memory, address, bytes) != Range::known)
    return invalid_value;
  const Place place{address, bytes, true, true};
  State &state = at.state;
  return state.streams->submit(stream, [&state, place, value](device::CpuThreads &) -> Result {
    {
      std::lock_guard lock(state.mutex);
      if (!place.there(state))
        return illegal_address;
    }
    std::memset(at_address(place.address), value, place.bytes);
    return success;
  });
}

} // namespace

Result cuMemsetD8_v2(Address address, unsigned char value, std::size_t bytes) {
  return with_context([&](Entry &at) -> Result {
    if (const Result refused = at.state.streams->refuse_unsafe())
      return refused;
    return fill(at, *at.state.streams->legacy(at.device), address, value, bytes);
  });
}

Result cuMemsetD8Async(Address address, unsigned char value, std::size_t bytes,
                       Stream handle) {
  return with_context([&](Entry &at) -> Result {
    const auto stream = at.state.streams->find(at, handle);
    return stream == nullptr ? Result(invalid_handle)
                             : fill(at, *stream, address, value, bytes);
  });
}

namespace {

constexpr auto pause = std::chrono::microseconds(20);

std::atomic_ref<std::uint32_t> word_at(Address address) {
  return std::atomic_ref(*static_cast<std::uint32_t *>(at_address(address)));
}

// Work on a word; it is told whether it has ended.
template <class Look> Result with_word(Stream handle, Address address, bool writes, Look look) {
  return with_context([&](Entry &at) -> Result {
    const auto stream = at.state.streams->find(at, handle);
    if (stream == nullptr)
      return invalid_handle;
    const std::size_t bytes = sizeof(std::uint32_t);
    if (address % bytes != 0 || range_of(*at.state.memory, address, bytes) != Range::known)
      return invalid_value;
    const Place place{address, bytes, true, writes};
    State &state = at.state;
    return state.streams->submit(*stream, [&state, place, look](device::CpuThreads &) -> Result {
      while (true) {
        {
          std::lock_guard lock(state.mutex);
          if (!place.there(state))
            return illegal_address;
          if (look(word_at(place.address)))
            return success;
        }
        std::this_thread::sleep_for(pause);
      }
    });
  });
}

} // namespace

Result cuStreamWaitValue32_v2(Stream handle, Address address, std::uint32_t value,
                              unsigned flags) {
  if (flags != wait_for_at_least)
    return not_supported;
  return with_word(handle, address, false, [value](auto word) {
    return std::int32_t(word.load(std::memory_order_acquire) - value) >= 0;
  });
}

Result cuStreamWriteValue32_v2(Stream handle, Address address, std::uint32_t value,
                               unsigned flags) {
  if (flags != 0)
    return not_supported;
  return with_word(handle, address, true, [value](auto word) {
    word.store(value, std::memory_order_release);
    return true;
  });
}

} // namespace unisono::cuda::emulated

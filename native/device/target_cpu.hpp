// Threads of the CPU as the threads of a device's blocks.

#pragma once

#include <atomic>
#include <barrier>
#include <bit>
#include <chrono>
#include <cstdint>
#include <thread>

#include "support/clock.hpp"

#define UNISONO_DEVICE inline
#define UNISONO_COLD inline
#define UNISONO_UNROLL
#define UNISONO_NO_UNROLL
#define UNISONO_ASSUME_GLOBAL(address)

namespace unisono::device {

template <class To, class From> To bit_cast(const From &from) {
  return __builtin_bit_cast(To, from);
}

// What the threads of one block share to wait for each other.
class CpuBlockBarrier {
public:
  explicit CpuBlockBarrier(int threads) : barrier_(threads) {}
  void sync() { barrier_.arrive_and_wait(); }
  // Whether any thread says so. Calls alternate between two words, so that the next call
  // does not change what a slow thread still reads.
  bool any(bool value, unsigned &turn) {
    std::atomic<bool> &word = words_[turn % 3];
    if (value)
      word.store(true, std::memory_order_relaxed);
    barrier_.arrive_and_wait();
    const bool found = word.load(std::memory_order_relaxed);
    words_[(turn + 2) % 3].store(false, std::memory_order_relaxed);
    ++turn;
    return found;
  }

private:
  std::barrier<> barrier_;
  std::atomic<bool> words_[3]{};
};

class CpuTarget {
public:
  struct alignas(16) Vector {
    std::uint64_t words[2];
  };

  static constexpr int warp_bits = 0;
  static constexpr int warp = 1 << warp_bits; // threads that run in step
  static constexpr unsigned looks_per_check = 64;
  static constexpr int narrow_sources = 2;
  static constexpr int sum_registers = 16;
  static constexpr int packets_together = 2;
  static constexpr int packet_registers = 8, packet_sums = 8;

  CpuTarget(int block, int blocks, int thread, int threads, CpuBlockBarrier &barrier)
      : block_(block), blocks_(blocks), thread_(thread), threads_(threads),
        barrier_(barrier) {}

  int block() const { return block_; }
  int blocks() const { return blocks_; }
  int thread() const { return thread_; }
  int threads() const { return threads_; }
  void sync() { barrier_.sync(); }
  bool any(bool value) { return barrier_.any(value, turn_); }

  static std::uint64_t load_acquire(const std::uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
  }
  static std::uint64_t load_acquire_host(const std::uint64_t *word) {
    return load_acquire(word);
  }
  static void store_release(std::uint64_t *word, std::uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  static void store_relaxed(std::uint64_t *word, std::uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
  }
  static std::uint64_t load_relaxed(const std::uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
  }
  // 16 bytes of data in words with flags, each of which is loaded and stored at once.
  static void load_packets(const std::uint64_t *from, std::uint64_t (&words)[4]) {
    for (int k = 0; k < 4; ++k)
      words[k] = load_relaxed(from + k);
  }
  static void store_packets(std::uint64_t *to, const std::uint64_t (&words)[4]) {
    for (int k = 0; k < 4; ++k)
      store_relaxed(to + k, words[k]);
  }
  // Each word is ordered by itself, which the tools that look for races understand; a fence
  // they do not.
  static void load_arrival(const std::uint64_t *from, std::uint64_t (&words)[4]) {
    for (int k = 0; k < 4; ++k)
      words[k] = load_acquire(from + k);
  }
  static void store_arrival(std::uint64_t *to, const std::uint64_t (&words)[4]) {
    for (int k = 0; k < 4; ++k)
      store_release(to + k, words[k]);
  }
  static void fence() {} // so there is nothing left to do here
  static std::uint32_t load_relaxed(const std::uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
  }
  static std::uint32_t load_host(const std::uint32_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
  }
  static void store_host(std::uint32_t *word, std::uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
  }
  // Whether this is the first to claim the word.
  static bool claim(std::uint32_t *word) {
    return __atomic_exchange_n(word, 1, __ATOMIC_RELAXED) == 0;
  }
  static void or_in_block(std::uint32_t *word, std::uint32_t value) {
    __atomic_fetch_or(word, value, __ATOMIC_RELAXED);
  }
  static int bit_width(unsigned value) { return std::bit_width(value); }
  static std::uint64_t clock_ns() { return std::uint64_t(now_ns()); }
  // Sleeps when it has looked a few times: there are far more threads than cores, and who
  // is waited for needs one.
  static void pause(unsigned looks) {
    if (looks < 16)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

private:
  int block_, blocks_, thread_, threads_;
  CpuBlockBarrier &barrier_;
  unsigned turn_ = 0;
};

} // namespace unisono::device

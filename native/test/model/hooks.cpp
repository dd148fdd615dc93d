// What the compiler and the product call: the instrumentation of -fsanitize=thread, and the few
// functions of the system whose effect on other threads, on time or on memory is modelled.
// The latter are wrapped by the linker (-Wl,--wrap), and go to the system outside of threads.

#include <cerrno>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>

#include <linux/futex.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

#include "test/model/explorer.hpp"

using model::Kind;

#define SITE reinterpret_cast<std::uintptr_t>(__builtin_return_address(0))

// Atomic operations.
#define HOOKS(bits, type)                                                                      \
  extern "C" type __tsan_atomic##bits##_load(const volatile type *at, int order) {             \
    return type(model::perform({Kind::load, std::uintptr_t(at), sizeof(type), order, 0, 0, 0,  \
                                SITE}).value);                                                 \
  }                                                                                            \
  extern "C" void __tsan_atomic##bits##_store(volatile type *at, type value, int order) {      \
    model::perform({Kind::store, std::uintptr_t(at), sizeof(type), order, 0, value, 0, SITE}); \
  }                                                                                            \
  extern "C" type __tsan_atomic##bits##_exchange(volatile type *at, type value, int order) {   \
    return type(model::perform({Kind::exchange, std::uintptr_t(at), sizeof(type), order, 0,    \
                                value, 0, SITE}).value);                                       \
  }                                                                                            \
  extern "C" type __tsan_atomic##bits##_fetch_add(volatile type *at, type value, int order) {  \
    return type(model::perform({Kind::add, std::uintptr_t(at), sizeof(type), order, 0, value,  \
                                0, SITE}).value);                                              \
  }                                                                                            \
  extern "C" type __tsan_atomic##bits##_fetch_sub(volatile type *at, type value, int order) {  \
    return type(model::perform({Kind::sub, std::uintptr_t(at), sizeof(type), order, 0, value,  \
                                0, SITE}).value);                                              \
  }                                                                                            \
  extern "C" bool __tsan_atomic##bits##_compare_exchange_strong(                               \
      volatile type *at, type *expected, type value, int order, int failure) {                 \
    const model::Answer answer = model::perform({Kind::compare, std::uintptr_t(at),            \
                                                 sizeof(type), order, failure, value,          \
                                                 *expected, SITE});                            \
    *expected = type(answer.value);                                                            \
    return answer.done;                                                                        \
  }                                                                                            \
  extern "C" bool __tsan_atomic##bits##_compare_exchange_weak(                                 \
      volatile type *at, type *expected, type value, int order, int failure) {                 \
    return __tsan_atomic##bits##_compare_exchange_strong(at, expected, value, order, failure); \
  }
HOOKS(8, std::uint8_t)
HOOKS(16, std::uint16_t)
HOOKS(32, std::uint32_t)
HOOKS(64, std::uint64_t)

extern "C" void __tsan_atomic_thread_fence(int order) {
  model::perform({Kind::fence, 0, 0, order, 0, 0, 0, SITE});
}
extern "C" void __tsan_atomic_signal_fence(int) {}

// Plain accesses.
#define PLAIN(bytes)                                                                    \
  extern "C" void __tsan_read##bytes(void *at) {                                        \
    model::access(std::uintptr_t(at), bytes, false);                                    \
  }                                                                                     \
  extern "C" void __tsan_write##bytes(void *at) {                                       \
    model::access(std::uintptr_t(at), bytes, true);                                     \
  }                                                                                     \
  extern "C" void __tsan_unaligned_read##bytes(void *at) {                              \
    model::access(std::uintptr_t(at), bytes, false);                                    \
  }                                                                                     \
  extern "C" void __tsan_unaligned_write##bytes(void *at) {                             \
    model::access(std::uintptr_t(at), bytes, true);                                     \
  }
PLAIN(1)
PLAIN(2)
PLAIN(4)
PLAIN(8)
PLAIN(16)
extern "C" void __tsan_read_range(void *at, unsigned long bytes) {
  model::access(std::uintptr_t(at), bytes, false);
}
extern "C" void __tsan_write_range(void *at, unsigned long bytes) {
  model::access(std::uintptr_t(at), bytes, true);
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void *) {}
extern "C" void __tsan_func_exit() {}
extern "C" void __tsan_vptr_update(void **, void *) {}
extern "C" void __tsan_vptr_read(void **) {}

// Copies: both sides are reported as accesses.
#define WRAPPED(result, name, ...)                   \
  extern "C" result __real_##name(__VA_ARGS__);      \
  extern "C" result __wrap_##name(__VA_ARGS__)

WRAPPED(void *, memcpy, void *to, const void *from, std::size_t bytes) {
  model::access(std::uintptr_t(from), bytes, false);
  model::access(std::uintptr_t(to), bytes, true);
  return std::memmove(to, from, bytes);
}

// Locks, sleep, and time, which does not advance.
WRAPPED(int, pthread_mutex_lock, pthread_mutex_t *mutex) {
  model::perform({Kind::lock, std::uintptr_t(mutex), 4, __ATOMIC_ACQUIRE, 0, 1, 0, SITE});
  return 0;
}
WRAPPED(int, pthread_mutex_trylock, pthread_mutex_t *mutex) {
  const auto answer = model::perform(
      {Kind::try_lock, std::uintptr_t(mutex), 4, __ATOMIC_ACQUIRE, 0, 1, 0, SITE});
  return answer.done ? 0 : EBUSY;
}
WRAPPED(int, pthread_mutex_unlock, pthread_mutex_t *mutex) {
  model::perform({Kind::unlock, std::uintptr_t(mutex), 4, __ATOMIC_RELEASE, 0, 0, 0, SITE});
  return 0;
}
WRAPPED(int, sched_yield) {
  model::await();
  return 0;
}
WRAPPED(int, clock_gettime, clockid_t, timespec *time) {
  *time = {1, 0};
  return 0;
}
extern "C" long __wrap_syscall(long number, ...) {
  va_list rest;
  va_start(rest, number);
  auto *word = va_arg(rest, std::uint32_t *);
  const int what = va_arg(rest, int);
  const std::uint32_t value = va_arg(rest, std::uint32_t);
  va_end(rest);
  if (number != SYS_futex || (what != FUTEX_WAIT && what != FUTEX_WAKE))
    std::abort();
  model::perform({what == FUTEX_WAIT ? Kind::sleep : Kind::wake, std::uintptr_t(word), 4,
                  __ATOMIC_RELAXED, 0, 0, value, SITE});
  return 0;
}

// Memory: the product allocates what threads share from memory of the model.
WRAPPED(int, memfd_create, const char *, unsigned) { return 1000; }
WRAPPED(int, posix_fallocate, int, off_t, off_t) { return 0; }
WRAPPED(int, munmap, void *, std::size_t) { return 0; }
WRAPPED(int, close, int) { return 0; }
extern "C" int __wrap_fcntl(int, int, ...) { return 0; }
WRAPPED(void *, mmap, void *, std::size_t bytes, int, int, int, off_t) {
  return model::allocate(bytes, 4096);
}

void *operator new(std::size_t bytes, std::align_val_t alignment) {
  if (void *at = model::allocate(bytes, std::size_t(alignment)))
    return at;
  if (void *at = std::aligned_alloc(std::size_t(alignment),
                                    (bytes + std::size_t(alignment) - 1) /
                                        std::size_t(alignment) * std::size_t(alignment)))
    return at;
  throw std::bad_alloc();
}
void *operator new(std::size_t bytes) { return operator new(bytes, std::align_val_t(16)); }
void operator delete(void *at) noexcept {
  if (!model::owns(at))
    std::free(at);
}
void operator delete(void *at, std::size_t) noexcept { operator delete(at); }
void operator delete(void *at, std::align_val_t) noexcept { operator delete(at); }
void operator delete(void *at, std::size_t, std::align_val_t) noexcept { operator delete(at); }

// Functions that the model leaves out (other hosts, codecs, traces) link to this.
extern "C" void unmodelled(const char *name) {
  std::fprintf(stderr, "%s is not part of the model, but was called\n", name);
  std::abort();
}

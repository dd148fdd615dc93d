#include "cuda/api.hpp"

#include <atomic>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>

#include "support/fork.hpp"

namespace unisono::cuda {

// The layouts of cuda.h, which the driver reads and writes.
static_assert(sizeof(Uuid) == 16);
static_assert(sizeof(IpcHandle) == 64 && alignof(IpcHandle) == 1);
static_assert(sizeof(Location) == 8);
static_assert(sizeof(AccessDescription) == 12);
static_assert(sizeof(AllocationProperties) == 32);
static_assert(offsetof(AllocationProperties, location) == 8);
static_assert(offsetof(AllocationProperties, windows_attributes) == 16);
static_assert(offsetof(AllocationProperties, flags) == 24);
static_assert(sizeof(Address) == sizeof(void *) && sizeof(Allocation) == 8);

namespace {

constexpr char default_library[] = "libcuda.so.1";
constexpr char variable[] = "UNISONO_CUDA_DRIVER";
// CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND and CUDA_ERROR_SHARED_OBJECT_INIT_FAILED
constexpr Result no_symbol = 302, no_library = 303;
constexpr Result not_initialized = 3; // what the driver returns in a fork

constexpr std::uint64_t never = ~std::uint64_t(0);
std::atomic<std::uint64_t> used_in = never; // the process, by its fork_epoch()

std::string loader_error() {
  const char *const text = ::dlerror();
  return text == nullptr ? "no reason was given" : text;
}

void *open_library(const char *path, bool chosen) {
  void *const library = ::dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library != nullptr)
    return library;
  const std::string tried = std::string("CUDA's driver library could not be opened: ") +
                            (chosen ? variable + std::string("=") : "") + path + ": " +
                            loader_error() + ". ";
  throw Error(tried + (chosen ? std::string("Unset ") + variable + " to use " +
                                    default_library + ", or set it to the library's path."
                              : std::string("It is part of NVIDIA's driver: install the "
                                            "driver, or set ") +
                                    variable + " to the path of the library."),
              no_library);
}

template <class F>
void look_up(void *library, const char *path, const char *name, F &into) {
  into = reinterpret_cast<F>(::dlsym(library, name));
  if (into == nullptr)
    throw Error(std::string("CUDA's driver library ") + path + " has no function " + name +
                    ": " + loader_error() +
                    ". A driver for CUDA 11.4 or newer is needed: update the driver.",
                no_symbol);
}

Api open_driver(const char *path, bool chosen) {
  void *const library = open_library(path, chosen);
  Api made;
#define UNISONO_CUDA_LOOK_UP(name, arguments) look_up(library, path, #name, made.name);
  UNISONO_CUDA_FUNCTIONS(UNISONO_CUDA_LOOK_UP)
#undef UNISONO_CUDA_LOOK_UP
#define UNISONO_CUDA_LOOK_UP(name, arguments)                                                  \
  made.name = reinterpret_cast<decltype(made.name)>(::dlsym(library, #name));
  UNISONO_CUDA_OPTIONAL_FUNCTIONS(UNISONO_CUDA_LOOK_UP)
#undef UNISONO_CUDA_LOOK_UP
  return made;
}

Api find_driver() {
  const char *const value = std::getenv(variable);
  if (value == nullptr || *value == '\0')
    return open_driver(default_library, false);
  if (std::strcmp(value, "emulated") == 0)
    return emulated_api();
  return open_driver(value, true);
}

} // namespace

const Api &api() {
  static const Api found = find_driver();
  return found;
}

void mark_used() { used_in.store(fork_epoch(), std::memory_order_relaxed); }

bool is_used() { return used_in.load(std::memory_order_relaxed) != never; }

bool is_used_before() {
  const std::uint64_t used = used_in.load(std::memory_order_relaxed);
  return used != never && used != fork_epoch();
}

void refuse_fork() {
  if (is_used_before())
    throw Error("this process is a fork of one that has used CUDA, which CUDA does not "
                "support: start processes with unisono.spawn or unisono run, or use CUDA "
                "in the child alone",
                not_initialized);
}

void check(Result result, const char *function) {
  if (result != success)
    throw Error(in_words(result, function), result);
}

std::string in_words(Result result, const char *function) {
  // Both leave null behind for a number that the driver does not know.
  const char *name = nullptr, *text = nullptr;
  (void)api().cuGetErrorName(result, &name);
  (void)api().cuGetErrorString(result, &text);
  return std::string(function) + ": " + (name == nullptr ? "unknown error" : name) + " (" +
         std::to_string(result) + ")" +
         (text == nullptr ? std::string() : std::string(": ") + text);
}

} // namespace unisono::cuda

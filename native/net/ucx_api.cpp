#include "net/ucx_api.hpp"

#include <array>
#include <atomic>
#include <csignal>
#include <mutex>
#include <stdexcept>

#include <dlfcn.h>

namespace unisono::ucx {

namespace {

constexpr const char *usual = "libucp.so.0";

std::atomic<const Api *> loaded = nullptr;

// libucs installs handlers for these signals when it is loaded. Here they are put back:
// what a crash does is for the program to say.
class HandlersKept {
public:
  HandlersKept() {
    for (std::size_t i = 0; i < signals.size(); ++i)
      ::sigaction(signals[i], nullptr, &before_[i]);
  }
  ~HandlersKept() {
    for (std::size_t i = 0; i < signals.size(); ++i)
      ::sigaction(signals[i], &before_[i], nullptr);
  }

private:
  static constexpr std::array<int, 5> signals = {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT};
  std::array<struct sigaction, signals.size()> before_;
};

std::string last_error() {
  const char *why = ::dlerror();
  return why != nullptr ? why : "it cannot be loaded";
}

// Its modules find libucs only if its symbols are visible to all.
void *open_globally(const std::string &path) {
  const std::size_t slash = path.rfind('/');
  const std::string folder = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  if (::dlopen((folder + "libucs.so.0").c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr)
    throw std::runtime_error(last_error());
  void *found = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (found == nullptr)
    throw std::runtime_error(last_error());
  return found;
}

template <typename F> void look_up(void *library, const char *name, F &into) {
  into = reinterpret_cast<F>(::dlsym(library, name));
  if (into == nullptr)
    throw std::runtime_error(std::string("it has no ") + name);
}

void look_up_all(void *library, Api &to) {
#define UNISONO_LOOK_UP(name) look_up(library, "ucp_" #name, to.name)
  UNISONO_LOOK_UP(get_version);
  to.get_version(&to.major, &to.minor, &to.release);
  if (to.major != 1 || to.minor < least_minor)
    throw std::runtime_error("it is UCX " + std::to_string(to.major) + "." +
                             std::to_string(to.minor) + "; 1." +
                             std::to_string(least_minor) + " or a later 1.x is needed");
  UNISONO_LOOK_UP(config_read);
  UNISONO_LOOK_UP(config_modify);
  UNISONO_LOOK_UP(config_release);
  UNISONO_LOOK_UP(init_version);
  UNISONO_LOOK_UP(cleanup);
  UNISONO_LOOK_UP(worker_create);
  UNISONO_LOOK_UP(worker_destroy);
  UNISONO_LOOK_UP(worker_get_address);
  UNISONO_LOOK_UP(worker_release_address);
  UNISONO_LOOK_UP(worker_get_efd);
  UNISONO_LOOK_UP(worker_arm);
  UNISONO_LOOK_UP(worker_progress);
  UNISONO_LOOK_UP(worker_set_am_recv_handler);
  UNISONO_LOOK_UP(ep_create);
  UNISONO_LOOK_UP(ep_close_nbx);
  UNISONO_LOOK_UP(am_send_nbx);
  UNISONO_LOOK_UP(am_recv_data_nbx);
  UNISONO_LOOK_UP(request_check_status);
  UNISONO_LOOK_UP(request_free);
#undef UNISONO_LOOK_UP
  look_up(library, "ucs_status_string", to.status_string); // of a library it depends on
  Dl_info where{};
  if (::dladdr(reinterpret_cast<void *>(to.get_version), &where) != 0)
    to.path = where.dli_fname;
}

} // namespace

std::string load(const std::vector<std::string> &paths) {
  static std::mutex loading;
  const std::lock_guard lock(loading);
  if (loaded.load(std::memory_order_acquire) != nullptr)
    return "";
  const HandlersKept kept;
  std::string why;
  void *found = ::dlopen(usual, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);
  const std::vector<std::string> tried =
      found != nullptr ? std::vector<std::string>{usual} : paths;
  for (const std::string &path : tried) {
    void *library = found;
    try {
      if (library == nullptr)
        library = open_globally(path);
      auto made = Api{};
      look_up_all(library, made);
      loaded.store(new Api(made), std::memory_order_release);
      return "";
    } catch (const std::runtime_error &error) {
      why += (why.empty() ? "" : "; ") + path + ": " + error.what();
    }
    if (library != nullptr) // it is in this process now, and another would not get along
      break;
  }
  return why.empty() ? "no library was named" : why;
}

const Api &api() {
  const Api *found = loaded.load(std::memory_order_acquire);
  if (found == nullptr)
    throw std::runtime_error("libucp has not been loaded");
  return *found;
}

} // namespace unisono::ucx

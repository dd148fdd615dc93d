// The part of UCX that is used (libucp, its layer UCP), declared here and looked up at run
// time: the module needs neither its headers nor its library to be built or imported.
//
// UCX keeps its structs compatible: a caller says by a mask which fields it has set, and new
// ones are added at the end. So the declarations here hold for every version from 1.13 on;
// tests/transports/test_ucx_layout.py compares them with the headers of an installed one.

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace unisono::ucx {

// A status has one byte; an error is negative.
using Status = std::int8_t;
constexpr Status ok = 0, in_progress = 1, busy = -15;

// What a call returns that may go on: null if it is complete, an error, or a request.
using Pending = void *;
inline bool failed(Pending pending) {
  return reinterpret_cast<std::uintptr_t>(pending) >= std::uintptr_t(std::intptr_t(-100));
}
inline Status error_of(Pending pending) {
  return Status(reinterpret_cast<std::intptr_t>(pending));
}

struct Params { // ucp_params_t
  std::uint64_t mask = 1;
  std::uint64_t features = 0;
  std::uint64_t unused[9] = {};
};
constexpr std::uint64_t feature_wakeup = 1 << 4, feature_am = 1 << 6;

struct WorkerParams { // ucp_worker_params_t
  std::uint64_t mask = 1;
  int thread_mode = 1; // serialized: one thread at a time
  std::uint64_t cpu_mask[16] = {};
  unsigned events = 0;
  std::uint64_t unused[6] = {};
};

using ErrorHandler = void (*)(void *arg, void *endpoint, Status status);
struct EndpointParams { // ucp_ep_params_t
  std::uint64_t mask = 1 | 2 | 4;
  const void *address = nullptr;
  int error_mode = 1; // of the peer: an endpoint fails, and the others go on
  ErrorHandler error_handler = nullptr;
  void *error_arg = nullptr;
  std::uint64_t unused[8] = {};
};

struct RequestParams { // ucp_request_param_t
  std::uint32_t mask = 0;
  std::uint32_t flags = 0;
  std::uint64_t unused[11] = {};
};
constexpr std::uint32_t has_flags = 1 << 4;
constexpr std::uint32_t close_by_force = 1;

struct ReceiveInfo { // ucp_am_recv_param_t
  std::uint64_t attributes;
  void *reply_endpoint;
};
constexpr std::uint64_t by_rendezvous = 1 << 17;

using MessageHandler = Status (*)(void *arg, const void *header, std::size_t header_bytes,
                                  void *data, std::size_t bytes, const ReceiveInfo *info);
struct HandlerParams { // ucp_am_handler_param_t
  std::uint64_t mask = 1 | 2 | 4 | 8;
  unsigned id = 0;
  std::uint32_t flags = 1; // whole messages only
  MessageHandler handler = nullptr;
  void *arg = nullptr;
};

// The functions, by their names without "ucp_".
struct Api {
  void (*get_version)(unsigned *, unsigned *, unsigned *);
  Status (*config_read)(const char *, const char *, void **);
  Status (*config_modify)(void *, const char *, const char *);
  void (*config_release)(void *);
  Status (*init_version)(unsigned, unsigned, const Params *, const void *, void **);
  void (*cleanup)(void *);
  Status (*worker_create)(void *, const WorkerParams *, void **);
  void (*worker_destroy)(void *);
  Status (*worker_get_address)(void *, void **, std::size_t *);
  void (*worker_release_address)(void *, void *);
  Status (*worker_get_efd)(void *, int *);
  Status (*worker_arm)(void *);
  unsigned (*worker_progress)(void *);
  Status (*worker_set_am_recv_handler)(void *, const HandlerParams *);
  Status (*ep_create)(void *, const EndpointParams *, void **);
  Pending (*ep_close_nbx)(void *, const RequestParams *);
  Pending (*am_send_nbx)(void *, unsigned, const void *, std::size_t, const void *,
                         std::size_t, const RequestParams *);
  Pending (*am_recv_data_nbx)(void *, void *, void *, std::size_t, const RequestParams *);
  Status (*request_check_status)(void *);
  void (*request_free)(void *);
  const char *(*status_string)(Status); // of libucs
  unsigned major = 0, minor = 0, release = 0;
  std::string path; // of the library that was loaded
};

constexpr unsigned least_minor = 13; // of version 1

// Loads the first of these libraries that there is, unless one is loaded already: two in one
// process do not get along. It stays loaded. Returns why there is none, or "".
std::string load(const std::vector<std::string> &paths);
// What was loaded; std::runtime_error if nothing was.
const Api &api();

} // namespace unisono::ucx

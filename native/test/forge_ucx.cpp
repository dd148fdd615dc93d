// Messages that no peer has sent: a worker of UCX's that knows the address of another one
// sends it headers of any kind. And how structs of UCX are declared here, for a comparison
// with its headers.

#include <cstddef>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

#include <nanobind/stl/string.h>

#include "bindings/bind.hpp"
#include "bindings/ucx_holder.hpp"
#include "test/bind_test_hooks.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

using Numbers = nb::typed<nb::dict, nb::str, int>;

constexpr std::size_t most_data = 256 << 10;

// A header for one of the links, or for none. With a key its checksum is right, but what it
// says cannot be: bytes beyond the window.
UcxHead forged(std::mt19937_64 &chance, const std::vector<std::uint64_t> &ids,
               std::size_t bytes, const Key *key) {
  UcxHead head;
  head.link = ids.empty() || chance() % 4 == 0 ? chance() : ids[chance() % ids.size()];
  head.kind = UcxHead::Kind(chance() % 4);
  head.offset = chance() % (4 * UcxLink::window);
  head.bytes = std::uint32_t(bytes);
  head.mac = chance();
  if (key != nullptr) {
    head.kind = UcxHead::Kind::data;
    head.offset = UcxLink::window + chance() % (1 << 30);
    head.mac = siphash(*key, &head, offsetof(UcxHead, mac));
  }
  return head;
}

void advance(UcxWorker &worker) {
  const std::lock_guard lock(worker.mutex());
  worker.progress();
}

void forge(const UcxHolder &target, std::uint64_t count, std::uint64_t seed,
           const nb::bytes &key) {
  const bool keyed = key.size() > 0;
  const Key used = keyed ? key_of(key) : Key{};
  nb::gil_scoped_release unlocked;
  UcxWorker attacker;
  const ucx::Api &api = ucx::api();
  ucx::EndpointParams params;
  params.address = target.worker->address().data();
  params.error_handler = [](void *, void *, ucx::Status) {};
  void *endpoint = nullptr;
  if (api.ep_create(attacker.handle(), &params, &endpoint) != ucx::ok)
    throw std::runtime_error("no endpoint");
  std::mt19937_64 chance(seed);
  const std::vector<std::byte> data(most_data);
  const std::vector<std::uint64_t> ids = target.worker->ids();
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::size_t bytes = chance() % (i % 100 == 0 ? most_data : 200);
    const UcxHead head = forged(chance, ids, bytes, keyed ? &used : nullptr);
    const std::size_t length = !keyed && chance() % 8 == 0 ? chance() % 32 : sizeof head;
    const ucx::RequestParams none;
    ucx::Pending sent =
        api.am_send_nbx(endpoint, 0, &head, length, data.data(), bytes, &none);
    while (sent != nullptr && !ucx::failed(sent) &&
           api.request_check_status(sent) == ucx::in_progress) {
      (void)api.worker_progress(attacker.handle());
      advance(*target.worker);
    }
    if (ucx::failed(sent))
      throw std::runtime_error("a forged message was not sent");
    if (sent != nullptr)
      api.request_free(sent);
  }
  for (int i = 0; i < 1000; ++i) { // UCX may hold some
    (void)api.worker_progress(attacker.handle());
    advance(*target.worker);
  }
  ucx::RequestParams close;
  close.mask = ucx::has_flags;
  close.flags = ucx::close_by_force;
  ucx::Pending closing = api.ep_close_nbx(endpoint, &close);
  while (closing != nullptr && !ucx::failed(closing) &&
         api.request_check_status(closing) == ucx::in_progress)
    (void)api.worker_progress(attacker.handle());
  if (closing != nullptr && !ucx::failed(closing))
    api.request_free(closing);
}

Numbers layout() {
  nb::dict found;
#define UNISONO_AT(type, field, theirs) found[theirs] = offsetof(type, field)
  UNISONO_AT(ucx::Params, features, "ucp_params_t.features");
  UNISONO_AT(ucx::WorkerParams, thread_mode, "ucp_worker_params_t.thread_mode");
  UNISONO_AT(ucx::WorkerParams, cpu_mask, "ucp_worker_params_t.cpu_mask");
  UNISONO_AT(ucx::WorkerParams, events, "ucp_worker_params_t.events");
  UNISONO_AT(ucx::EndpointParams, address, "ucp_ep_params_t.address");
  UNISONO_AT(ucx::EndpointParams, error_mode, "ucp_ep_params_t.err_mode");
  UNISONO_AT(ucx::EndpointParams, error_handler, "ucp_ep_params_t.err_handler.cb");
  UNISONO_AT(ucx::EndpointParams, error_arg, "ucp_ep_params_t.err_handler.arg");
  UNISONO_AT(ucx::RequestParams, mask, "ucp_request_param_t.op_attr_mask");
  UNISONO_AT(ucx::RequestParams, flags, "ucp_request_param_t.flags");
  UNISONO_AT(ucx::HandlerParams, id, "ucp_am_handler_param_t.id");
  UNISONO_AT(ucx::HandlerParams, flags, "ucp_am_handler_param_t.flags");
  UNISONO_AT(ucx::HandlerParams, handler, "ucp_am_handler_param_t.cb");
  UNISONO_AT(ucx::HandlerParams, arg, "ucp_am_handler_param_t.arg");
  UNISONO_AT(ucx::ReceiveInfo, attributes, "ucp_am_recv_param_t.recv_attr");
#undef UNISONO_AT
  return found;
}

Numbers sizes() {
  nb::dict found;
  found["ucs_status_t"] = sizeof(ucx::Status);
  found["ucp_params_t"] = sizeof(ucx::Params);
  found["ucp_worker_params_t"] = sizeof(ucx::WorkerParams);
  found["ucp_ep_params_t"] = sizeof(ucx::EndpointParams);
  found["ucp_request_param_t"] = sizeof(ucx::RequestParams);
  return found;
}

Numbers constants() {
  nb::dict found;
  found["UCS_OK"] = int(ucx::ok);
  found["UCS_INPROGRESS"] = int(ucx::in_progress);
  found["UCS_ERR_BUSY"] = int(ucx::busy);
  found["UCP_FEATURE_WAKEUP"] = ucx::feature_wakeup;
  found["UCP_FEATURE_AM"] = ucx::feature_am;
  found["UCS_THREAD_MODE_SERIALIZED"] = ucx::WorkerParams{}.thread_mode;
  found["UCP_ERR_HANDLING_MODE_PEER"] = ucx::EndpointParams{}.error_mode;
  found["UCP_EP_CLOSE_FLAG_FORCE"] = ucx::close_by_force;
  found["UCP_OP_ATTR_FIELD_FLAGS"] = ucx::has_flags;
  found["UCP_AM_RECV_ATTR_FLAG_RNDV"] = ucx::by_rendezvous;
  found["UCP_AM_FLAG_WHOLE_MSG"] = ucx::HandlerParams{}.flags;
  found["UCP_PARAM_FIELD_FEATURES"] = ucx::Params{}.mask;
  found["UCP_WORKER_PARAM_FIELD_THREAD_MODE"] = ucx::WorkerParams{}.mask;
  found["UCP_EP_PARAM_FIELD_REMOTE_ADDRESS|UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE|"
        "UCP_EP_PARAM_FIELD_ERR_HANDLER"] = ucx::EndpointParams{}.mask;
  found["UCP_AM_HANDLER_PARAM_FIELD_ID|UCP_AM_HANDLER_PARAM_FIELD_FLAGS|"
        "UCP_AM_HANDLER_PARAM_FIELD_CB|UCP_AM_HANDLER_PARAM_FIELD_ARG"] =
      ucx::HandlerParams{}.mask;
  return found;
}

} // namespace

void bind_forge_ucx(nb::module_ &m) {
  m.def("forge_ucx", &forge, nb::arg("target"), nb::arg("count"), nb::arg("seed"),
        nb::arg("key") = nb::bytes("", 0));
  m.def("ucx_layout", &layout);
  m.def("ucx_sizes", &sizes);
  m.def("ucx_constants", &constants);
}

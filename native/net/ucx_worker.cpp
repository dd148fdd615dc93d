#include "net/ucx_worker.hpp"

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <utility>

#include <unistd.h>

#include "support/clock.hpp"

namespace unisono {

namespace {

constexpr unsigned least_minor_configured = 19;
constexpr unsigned most_rounds = 64; // of progress at once
constexpr std::int64_t tended_soon = 50'000'000, longest_end = 2'000'000'000,
                       sockets_every = 20'000'000;
constexpr std::chrono::milliseconds soon(1), later(20);

void require(ucx::Status status, const char *what) {
  if (status != ucx::ok)
    throw std::runtime_error(std::string(what) + ": " + ucx::api().status_string(status));
}

// Set for what UCX reads from its environment, unless the user has set it there.
void set(void *config, const char *name, const char *value) {
  if (std::getenv((std::string("UCX_") + name).c_str()) == nullptr)
    (void)ucx::api().config_modify(config, name, value); // an older one may not have it
}

} // namespace

UcxWorker::UcxWorker() {
  try {
    open();
  } catch (...) {
    destroy();
    throw;
  }
}

void UcxWorker::open() {
  const ucx::Api &api = ucx::api();
  void *config = nullptr;
  require(api.config_read(nullptr, nullptr, &config), "reading the variables UCX_*");
  // Endpoints that can fail one by one, over shared memory as well. Older ones take these
  // from the environment alone, and otherwise do not use shared memory.
  if (api.minor >= least_minor_configured)
    for (const char *name : {"POSIX_ERROR_HANDLING", "SYSV_ERROR_HANDLING", "CMA_ERROR_HANDLING"})
      set(config, name, "y");
  // The receiver fetches: a sender never writes into memory that is used again by then.
  set(config, "RNDV_SCHEME", "get_zcopy");
  ucx::Params params;
  params.features = ucx::feature_am | ucx::feature_wakeup;
  const ucx::Status made = api.init_version(1, ucx::least_minor, &params, config, &context_);
  api.config_release(config);
  require(made, "starting UCX");
  const ucx::WorkerParams of_worker;
  require(api.worker_create(context_, &of_worker, &worker_), "making a worker of UCX");
  require(api.worker_get_efd(worker_, &events_), "UCX's descriptor to sleep on");
  ucx::HandlerParams handler;
  handler.handler = &UcxWorker::take;
  handler.arg = this;
  require(api.worker_set_am_recv_handler(worker_, &handler), "UCX's active messages");
  void *address = nullptr;
  std::size_t bytes = 0;
  require(api.worker_get_address(worker_, &address, &bytes), "UCX's address of this rank");
  address_.assign(static_cast<const char *>(address), bytes);
  api.worker_release_address(worker_, address);
  if (bytes > UcxLink::most_address)
    throw std::runtime_error("UCX's address of this rank has " + std::to_string(bytes) +
                             " bytes: name fewer devices by UCX_NET_DEVICES");
}

UcxWorker::~UcxWorker() { close(0); }

void UcxWorker::close(std::int64_t most_ns) {
  if (origin_.forked())
    return;
  const std::int64_t until = now_ns() + most_ns;
  {
    std::unique_lock lock(mutex_);
    stop_ = true;
    retire_all();
    while (worker_ != nullptr && !retired_.empty() && now_ns() < until) {
      tend_once();
      if (!retired_.empty())
        changed_.wait_for(lock, soon);
    }
    end_thread_ = true;
    changed_.notify_all();
  }
  thread_.join();
  const std::lock_guard lock(mutex_);
  destroy();
}

void UcxWorker::retire_all() {
  for (auto &[id, link] : links_) {
    link->finish_sending();
    retired_.push_back(std::move(link));
  }
  links_.clear();
}

// UCX ends only when it has let go of every link.
void UcxWorker::destroy() {
  if (worker_ != nullptr) {
    const std::int64_t until = now_ns() + longest_end;
    bool left = true;
    while (std::exchange(left, false) && now_ns() < until) {
      for (auto &link : retired_)
        left = !link->closed() || left;
      if (left)
        (void)ucx::api().worker_progress(worker_);
    }
    ucx::api().worker_destroy(std::exchange(worker_, nullptr));
  }
  retired_.clear();
  by_id_.clear();
  if (context_ != nullptr)
    ucx::api().cleanup(std::exchange(context_, nullptr));
}

UcxLink &UcxWorker::add(int fd, const UcxKeys &keys) {
  if (closed()) {
    ::close(fd);
    throw std::runtime_error("UCX of this rank has been closed");
  }
  auto made = std::make_unique<UcxLink>(worker_, fd, keys, address_);
  UcxLink &link = *made;
  by_id_[link.id()] = &link;
  links_[link.id()] = std::move(made);
  touched();
  return link;
}

void UcxWorker::retire(std::uint64_t id) {
  const auto found = links_.find(id);
  if (closed() || found == links_.end())
    return;
  found->second->finish_sending();
  retired_.push_back(std::move(found->second));
  links_.erase(found);
  progress();
  reap();
  touched();
}

// Frees links that have sent everything, and that UCX has let go of.
void UcxWorker::reap() {
  std::erase_if(retired_, [this](std::unique_ptr<UcxLink> &link) {
    link->pump_socket();
    link->settle();
    if (!link->finished() || !link->closed())
      return false;
    by_id_.erase(link->id());
    return true;
  });
}

std::size_t UcxWorker::num_links() {
  const std::lock_guard lock(mutex_);
  return links_.size() + retired_.size();
}

std::vector<std::uint64_t> UcxWorker::ids() {
  const std::lock_guard lock(mutex_);
  std::vector<std::uint64_t> found;
  for (const auto &[id, link] : by_id_)
    found.push_back(id);
  return found;
}

ucx::Status UcxWorker::take(void *self, const void *header, std::size_t header_bytes, void *data,
                            std::size_t bytes, const ucx::ReceiveInfo *info) {
  UcxWorker &worker = *static_cast<UcxWorker *>(self);
  UcxHead head;
  bool accepted = false;
  if (header_bytes == sizeof head) {
    std::memcpy(&head, header, sizeof head);
    const auto found = worker.by_id_.find(head.link);
    accepted = found != worker.by_id_.end() &&
               found->second->deliver(head, data, bytes,
                                      (info->attributes & ucx::by_rendezvous) != 0);
  }
  if (!accepted)
    worker.refused_.fetch_add(1, std::memory_order_relaxed);
  return ucx::ok;
}

void UcxWorker::progress() {
  unsigned rounds = 0;
  while (rounds < most_rounds && ucx::api().worker_progress(worker_) != 0)
    ++rounds;
  if (rounds == 0) // nothing has come, and nothing has ended
    return;
  for (auto &[id, link] : links_) {
    link->settle();
    link->wake_if_ready();
  }
  for (auto &link : retired_)
    link->settle();
}

bool UcxWorker::arm(std::vector<pollfd> &into) {
  for (unsigned tries = 0; tries < most_rounds; ++tries) {
    progress();
    const ucx::Status armed = ucx::api().worker_arm(worker_);
    if (armed == ucx::ok) {
      into.push_back({events_, POLLIN, 0});
      return true;
    }
    if (armed != ucx::busy)
      break;
  }
  return false;
}

void UcxWorker::touched() {
  sent_at_ = now_ns();
  if (!started_) {
    started_ = true;
    thread_.start("unisono-ucx", [this] { tend(); });
  } else if (std::exchange(idle_, false)) {
    changed_.notify_all();
  }
}

void UcxWorker::tend() {
  std::unique_lock lock(mutex_);
  while (!end_thread_) {
    if (!stop_)
      tend_once();
    const bool recently = now_ns() - sent_at_ < tended_soon || !retired_.empty();
    idle_ = !recently;
    changed_.wait_for(lock, recently ? soon : later);
  }
}

void UcxWorker::tend_once() {
  progress();
  const std::int64_t now = now_ns();
  const bool look = now - looked_at_ >= sockets_every;
  if (look)
    looked_at_ = now;
  for (auto &[id, link] : links_) {
    if (look)
      link->pump_socket();
    link->settle();
    link->wake_if_ready();
  }
  reap();
}

// --- wires

UcxWire::UcxWire(std::shared_ptr<UcxWorker> worker, int fd, const UcxKeys &keys)
    : worker_(std::move(worker)) {
  const std::lock_guard lock(worker_->mutex());
  link_ = &worker_->add(fd, keys);
}

// The socket tells little, and seldom: it is looked at when nothing has come for a while.
void UcxWire::look() const {
  worker_->progress();
  link_->settle();
  if (looks_++ % 32 == 0)
    link_->pump_socket();
}

ssize_t UcxWire::send(const iovec *parts, std::size_t count) {
  if (worker_->forked())
    return errno = EPIPE, -1;
  const std::lock_guard lock(worker_->mutex());
  if (lost())
    return errno = EPIPE, -1;
  link_->end_sleep();
  if (!link_->can_send())
    look();
  const ssize_t sent = link_->send(parts, count);
  if (sent > 0)
    worker_->touched();
  return sent;
}

ssize_t UcxWire::receive(void *into, std::size_t bytes) {
  if (worker_->forked())
    return errno = ECONNRESET, -1;
  const std::lock_guard lock(worker_->mutex());
  if (lost())
    return errno = ECONNRESET, -1;
  link_->end_sleep();
  if (!link_->can_receive())
    look();
  return link_->receive(into, bytes);
}

void UcxWire::await_send(std::vector<pollfd> &into) { await(UcxLink::Awaits::room, into); }

void UcxWire::await_receive(std::size_t, std::vector<pollfd> &into) {
  await(UcxLink::Awaits::bytes, into);
}

void UcxWire::await(UcxLink::Awaits what, std::vector<pollfd> &into) {
  if (worker_->forked()) {
    into.push_back(ready_now());
    return;
  }
  const std::lock_guard lock(worker_->mutex());
  if (lost()) {
    into.push_back(ready_now());
    return;
  }
  link_->begin_sleep(what);
  link_->pump_socket();
  const auto ready = [&] {
    return what == UcxLink::Awaits::bytes ? link_->can_receive() : link_->can_send();
  };
  if (ready() || !worker_->arm(into) || ready()) {
    into.push_back(ready_now());
    return;
  }
  into.push_back({link_->event(), POLLIN, 0});
  if (!link_->socket_ended())
    into.push_back({link_->fd(), POLLIN, 0});
}

bool UcxWire::has_pending() const {
  if (worker_->forked())
    return false;
  const std::lock_guard lock(worker_->mutex());
  return !lost() && link_->has_bytes();
}

bool UcxWire::peer_closed() const {
  if (worker_->forked())
    return true;
  const std::lock_guard lock(worker_->mutex());
  if (lost())
    return true;
  worker_->progress();
  link_->pump_socket();
  return link_->peer_closed();
}

void UcxWire::finish_sending() {
  if (worker_->forked())
    return;
  const std::lock_guard lock(worker_->mutex());
  if (!lost())
    link_->finish_sending();
}

void UcxWire::close() {
  if (link_ == nullptr)
    return;
  if (worker_->forked()) { // the child's copies alone
    if (!worker_->closed())
      link_->close_descriptors();
  } else {
    const std::lock_guard lock(worker_->mutex());
    if (!worker_->closed())
      worker_->retire(link_->id());
  }
  link_ = nullptr;
}

} // namespace unisono

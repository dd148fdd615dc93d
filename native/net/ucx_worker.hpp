// UCX for one rank: a worker of UCX's, through which all links of the rank move their bytes.
//
// UCX moves nothing by itself: a thread must call it. The threads that use the wires do, and
// each moves the bytes of all links: one that gets some for another thread wakes that. A
// thread of the worker's own does it besides, every millisecond while something was sent not
// long ago, and else every 20: so what was sent leaves though its sender computes, and what
// comes is accepted, up to the window. The mutex makes them one at a time.

#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include <poll.h>

#include "net/ucx_link.hpp"
#include "net/wire.hpp"
#include "support/fork.hpp"

namespace unisono {

class UcxWorker {
public:
  UcxWorker();
  ~UcxWorker(); // no link is used any more
  UcxWorker(const UcxWorker &) = delete;
  UcxWorker &operator=(const UcxWorker &) = delete;

  bool forked() const { return origin_.forked(); }
  // Waits, for so long at most, until the peers of all links have what was sent to them; then
  // closes all. Wires that are made or used from now on fail.
  void close(std::int64_t most_ns);

  // The rest is for UcxWire, which holds the mutex while it uses a link.
  std::mutex &mutex() { return mutex_; }
  UcxLink &add(int fd, const UcxKeys &keys);
  void retire(std::uint64_t id);
  bool closed() const { return stop_; }
  void progress();
  // After progress, adds what to poll for; false if it must not be slept on.
  bool arm(std::vector<pollfd> &into);
  // Something was sent: the thread looks after it.
  void touched();

  // Messages that no link has accepted.
  std::uint64_t refused() const { return refused_.load(std::memory_order_relaxed); }
  std::size_t num_links();
  // For tests: UCX's own worker, how it is reached, and the names of its links.
  void *handle() const { return worker_; }
  const std::string &address() const { return address_; }
  std::vector<std::uint64_t> ids();

private:
  static ucx::Status take(void *self, const void *header, std::size_t header_bytes, void *data,
                          std::size_t bytes, const ucx::ReceiveInfo *info);
  void open();
  void retire_all();
  void tend();
  void tend_once();
  void reap();
  void destroy();

  Origin origin_;
  std::mutex mutex_;
  std::condition_variable changed_;
  void *context_ = nullptr, *worker_ = nullptr;
  int events_ = -1; // UCX's own descriptor
  std::string address_;
  std::unordered_map<std::uint64_t, std::unique_ptr<UcxLink>> links_;
  std::vector<std::unique_ptr<UcxLink>> retired_;
  std::unordered_map<std::uint64_t, UcxLink *> by_id_;
  std::int64_t sent_at_ = 0, looked_at_ = 0;
  bool stop_ = false, started_ = false, idle_ = false, end_thread_ = false;
  std::atomic<std::uint64_t> refused_ = 0;
  Worker thread_; // the last: it uses the others
};

class UcxWire : public Wire {
public:
  // Takes the descriptor over.
  UcxWire(std::shared_ptr<UcxWorker> worker, int fd, const UcxKeys &keys);
  ~UcxWire() override { UcxWire::close(); }

  ssize_t send(const iovec *parts, std::size_t count) override;
  ssize_t receive(void *into, std::size_t bytes) override;
  void await_send(std::vector<pollfd> &into) override;
  void await_receive(std::size_t bytes, std::vector<pollfd> &into) override;
  bool has_pending() const override;
  bool peer_closed() const override;
  void finish_sending() override;
  void close() override;

private:
  bool lost() const { return link_ == nullptr || worker_->forked() || worker_->closed(); }
  void look() const;
  void await(UcxLink::Awaits what, std::vector<pollfd> &into);

  const std::shared_ptr<UcxWorker> worker_;
  UcxLink *link_;
  mutable unsigned looks_ = 0;
};

} // namespace unisono

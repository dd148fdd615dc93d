// A wire over a connected stream socket, TCP or Unix: bytes travel as they are.

#pragma once

#include <cstdint>

#include "net/wire.hpp"

namespace unisono {

class SocketWire : public Wire {
public:
  // Takes the descriptor over and makes it non-blocking.
  explicit SocketWire(int fd);
  ~SocketWire() override { SocketWire::close(); }

  ssize_t send(const iovec *parts, std::size_t count) override;
  ssize_t receive(void *into, std::size_t bytes) override;
  void await_send(std::vector<pollfd> &into) override;
  void await_receive(std::size_t bytes, std::vector<pollfd> &into) override;
  int descriptor() const override { return fd_; }
  void limit_unsent(std::size_t bytes) override;
  std::size_t queued() const override;
  bool peer_closed() const override;
  bool failed() const override;
  void finish_sending() override;
  void abort() override;
  void close() override;

private:
  bool is_silent() const;

  int fd_;
  // Since when it is asked without a pause whether the peer is silent, and the last time.
  mutable std::int64_t watched_since_ = 0, watched_last_ = 0;
  int low_water_ = 1; // bytes that must have come before the kernel calls it readable
};

} // namespace unisono

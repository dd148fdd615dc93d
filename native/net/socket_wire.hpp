// A wire over a connected stream socket, TCP or Unix: bytes travel as they are.

#pragma once

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
  bool peer_closed() const override;
  void finish_sending() override;
  void close() override;

private:
  int fd_;
  int low_water_ = 1; // bytes that must have come before the kernel calls it readable
};

} // namespace unisono

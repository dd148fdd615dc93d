// A wire over a socket whose bytes are encrypted (tls.hpp).

#pragma once

#include <algorithm>
#include <memory>
#include <utility>

#include "net/socket_wire.hpp"
#include "net/tls.hpp"

namespace unisono {

class TlsWire : public SocketWire {
public:
  // Takes the descriptor over; `tls` works on it, and its handshake is complete.
  TlsWire(int fd, std::shared_ptr<Tls> tls) : SocketWire(fd), tls_(std::move(tls)) {}

  ssize_t send(const iovec *parts, std::size_t count) override {
    return tls_->send(parts, count);
  }
  ssize_t receive(void *into, std::size_t bytes) override { return tls_->recv(into, bytes); }
  bool has_pending() const override { return tls_->has_pending(); }
  void await_receive(std::size_t bytes, std::vector<pollfd> &into) override {
    if (has_pending())
      into.push_back(ready_now());
    else // part of a record may have been read that cannot be decrypted yet
      SocketWire::await_receive(bytes - std::min(bytes, Tls::sealed_bytes), into);
  }

private:
  const std::shared_ptr<Tls> tls_;
};

} // namespace unisono

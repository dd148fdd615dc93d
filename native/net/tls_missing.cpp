// Tls in a build without OpenSSL's headers: it says so.

#include "net/tls.hpp"

#include <cerrno>
#include <stdexcept>

namespace unisono {

const std::string &Tls::missing() {
  static const std::string why =
      "this build of unisono has no TLS: the headers of OpenSSL 3 were not found when it was "
      "compiled (install them, as libssl-dev on Debian, and build it again)";
  return why;
}

Tls::Tls(int fd, const Key &key, Side, std::uint64_t lifetime)
    : fd_(fd), key_(key), lifetime_(lifetime) {
  throw std::runtime_error(missing());
}

Tls::~Tls() = default;

// No object exists to call these on.
int Tls::handshake() {
  errno = ENOSYS;
  return -1;
}
ssize_t Tls::send(const iovec *, std::size_t) { return handshake(); }
ssize_t Tls::recv(void *, std::size_t) { return handshake(); }
bool Tls::has_pending() const { return false; }

} // namespace unisono

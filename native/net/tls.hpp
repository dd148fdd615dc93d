// Encryption of what goes between hosts: TLS 1.3, by a key that both ends have.
//
// The key comes from the handshake that went before (transports/handshake.py): who holds it
// holds the job's secret, so both ends know each other and no certificates are needed. It
// is mixed with a fresh Diffie-Hellman exchange (psk_dhe_ke): who learns the secret later
// cannot read what was recorded.
//
// OpenSSL 3 does the work. It is loaded when it is first asked for, so that neither to build
// unisono nor to import it takes OpenSSL. The calls are those of a socket that never waits;
// one thread at a time may make them. The descriptor stays its owner's.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include <sys/types.h>
#include <sys/uio.h>

struct ssl_st; // OpenSSL's own name

namespace unisono {

class Tls {
public:
  enum class Side { dialer, answerer };
  using Key = std::array<std::uint8_t, 32>;

  // What a record holds at most.
  static constexpr std::size_t record_bytes = 16 << 10;
  // And what it is at most on the wire.
  static constexpr std::size_t sealed_bytes = record_bytes + 5 + 256;
  // After so much sent the key is changed: AES-GCM is good for some 380 GB by one key.
  static constexpr std::uint64_t usual_lifetime = std::uint64_t(64) << 30;

  // Why there is no TLS on this machine; nothing if there is.
  static const std::string &missing();

  Tls(int fd, const Key &key, Side side, std::uint64_t lifetime = usual_lifetime);
  ~Tls();
  Tls(const Tls &) = delete;
  Tls &operator=(const Tls &) = delete;

  // Goes on with the opening: 0 when it is done, POLLIN or POLLOUT when it waits for that;
  // or -1 and errno, EBADMSG if the other is not who it should be.
  int shake();
  // Both as of the socket: a count of bytes, 0 when the other has ended; or -1 and errno,
  // EAGAIN if it would have to wait, EBADMSG if bytes came that the other has not sent.
  // What could not be sent is to be offered again from the same byte on, at least as much.
  ssize_t send(const iovec *parts, std::size_t count);
  ssize_t recv(void *into, std::size_t bytes);
  // Whether bytes are here that the socket does not show any more.
  bool holds_bytes() const;
  // How often the key for sending was changed.
  std::uint64_t changes() const { return changes_; }

private:
  friend struct TlsCallbacks;
  ssize_t outcome(int result);

  ssl_st *ssl_ = nullptr;
  const int fd_;
  const Key key_;
  const std::uint64_t lifetime_;
  std::uint64_t sent_ = 0, changes_ = 0; // by the present key; of keys
  int error_ = 0;      // of the last call to the socket
  bool ended_ = false; // the other will send no more
  std::unique_ptr<std::byte[]> gathered_; // parts that are smaller than a record
};

} // namespace unisono

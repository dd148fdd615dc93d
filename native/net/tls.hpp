// Encryption between hosts: TLS 1.3 with a pre-shared key.
//
// The key comes from the preceding handshake (transports/handshake.py): its holder knows
// the job's secret, so both sides are authenticated and no certificates are needed. It is
// combined with a fresh Diffie-Hellman exchange (psk_dhe_ke): recorded traffic cannot be
// decrypted by someone who learns the secret later.
//
// OpenSSL 3 implements it. It is loaded on first use, so unisono is imported without it.
// The calls are non-blocking, as on a socket; only one thread at a time may make them. The
// descriptor remains its owner's.

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
  enum class Side { client, server };
  using Key = std::array<std::uint8_t, 32>;

  // The most that a record holds.
  static constexpr std::size_t record_bytes = 16 << 10;
  // And its largest size on the wire.
  static constexpr std::size_t sealed_bytes = record_bytes + 5 + 256;
  // After so many bytes the key is updated: AES-GCM is safe for about 380 GB per key.
  static constexpr std::uint64_t usual_lifetime = std::uint64_t(64) << 30;

  // Why there is no TLS on this machine; empty if there is.
  static const std::string &missing();

  Tls(int fd, const Key &key, Side side, std::uint64_t lifetime = usual_lifetime);
  ~Tls();
  Tls(const Tls &) = delete;
  Tls &operator=(const Tls &) = delete;

  // Continues the handshake: 0 when it is done, POLLIN or POLLOUT when it waits for that;
  // or -1 and errno, EBADMSG if the peer does not have the key.
  int handshake();
  // Like the socket calls: a number of bytes, 0 when the peer has ended; or -1 and errno,
  // EAGAIN if it would block, EBADMSG if bytes arrived that the peer has not sent. What
  // could not be sent must be passed again from the same byte on, with at least as many
  // bytes.
  ssize_t send(const iovec *parts, std::size_t count);
  ssize_t recv(void *into, std::size_t bytes);
  // Whether there are bytes that the socket no longer shows as readable.
  bool has_pending() const;
  // How often the sending key was updated.
  std::uint64_t key_updates() const { return key_updates_; }

private:
  friend struct TlsCallbacks;
  ssize_t result_of(int result);

  ssl_st *ssl_ = nullptr;
  const int fd_;
  const Key key_;
  const std::uint64_t lifetime_;
  std::uint64_t sent_ = 0, key_updates_ = 0; // with the current key; number of updates
  int error_ = 0;      // of the last call to the socket
  bool ended_ = false; // the peer will send no more
  std::unique_ptr<std::byte[]> gathered_; // parts that are smaller than a record
};

} // namespace unisono

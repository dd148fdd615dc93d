#include "net/tls.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <dlfcn.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <sys/socket.h>

#include "net/socket_error.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

// The functions of OpenSSL 3 that are used. Their types and all constants come from its headers;
// the functions themselves are looked up at run time (see docs/architecture/network.md).
#define UNISONO_OPENSSL(USE)                                                   \
  USE(OPENSSL_init_ssl) USE(TLS_method) USE(SSL_CTX_new) USE(SSL_CTX_ctrl)     \
  USE(SSL_CTX_set_ciphersuites) USE(SSL_CTX_set_num_tickets)                   \
  USE(SSL_CTX_set_psk_client_callback) USE(SSL_CTX_set_psk_server_callback)    \
  USE(SSL_new) USE(SSL_free) USE(SSL_set_bio) USE(SSL_set_verify)              \
  USE(SSL_set_connect_state) USE(SSL_set_accept_state) USE(SSL_set_ex_data)    \
  USE(SSL_get_ex_data) USE(SSL_do_handshake) USE(SSL_version)                  \
  USE(SSL_session_reused) USE(SSL_write) USE(SSL_read) USE(SSL_has_pending)    \
  USE(SSL_key_update) USE(SSL_get_error) USE(ERR_clear_error)                  \
  USE(BIO_get_new_index) USE(BIO_meth_new) USE(BIO_meth_set_write)             \
  USE(BIO_meth_set_read) USE(BIO_meth_set_ctrl) USE(BIO_new) USE(BIO_set_data) \
  USE(BIO_get_data) USE(BIO_set_init) USE(BIO_set_flags) USE(BIO_clear_flags)

struct OpenSsl {
#define UNISONO_DECLARE(name) decltype(&::name) name = nullptr;
  UNISONO_OPENSSL(UNISONO_DECLARE)
#undef UNISONO_DECLARE

  SSL_CTX *context = nullptr;
  BIO_METHOD *wire = nullptr;
  std::string missing;
};

constexpr int own_data = 0; // the index for application data

constexpr char identity[] = "unisono";

template <typename F> void look_up(void *library, const char *name, F &into) {
  into = reinterpret_cast<F>(::dlsym(library, name));
  if (into == nullptr)
    throw std::runtime_error(std::string("libssl.so.3 has no ") + name);
}

const OpenSsl &openssl();

// How many bytes may be moved at once; tests can simulate that the socket is not ready.
bool may_move(const char *name, int &bytes) {
  if (bytes <= 0)
    return true;
  bytes = int(allowed(name, std::size_t(bytes)));
  if (bytes == 0)
    errno = EAGAIN;
  return bytes > 0;
}

} // namespace

// The callbacks by which OpenSSL accesses the socket and the key.
struct TlsCallbacks {
  static Tls &of(const SSL *ssl) {
    return *static_cast<Tls *>(openssl().SSL_get_ex_data(ssl, own_data));
  }
  static int done(BIO *bio, Tls &tls, ssize_t count, int flag) {
    tls.error_ = count < 0 ? errno : 0;
    openssl().BIO_clear_flags(bio, BIO_FLAGS_RWS | BIO_FLAGS_SHOULD_RETRY);
    if (count < 0 && passes(socket_error(errno)))
      openssl().BIO_set_flags(bio, flag | BIO_FLAGS_SHOULD_RETRY);
    return int(count);
  }
  static int write(BIO *bio, const char *from, int bytes) {
    Tls &tls = *static_cast<Tls *>(openssl().BIO_get_data(bio));
    const ssize_t sent =
        may_move("tls.send", bytes)
            ? ::send(tls.fd_, from, std::size_t(bytes), MSG_DONTWAIT | MSG_NOSIGNAL)
            : -1;
    return done(bio, tls, sent, BIO_FLAGS_WRITE);
  }
  static int read(BIO *bio, char *into, int bytes) {
    Tls &tls = *static_cast<Tls *>(openssl().BIO_get_data(bio));
    const ssize_t got = may_move("tls.receive", bytes)
                            ? ::recv(tls.fd_, into, std::size_t(bytes), MSG_DONTWAIT)
                            : -1;
    tls.ended_ = tls.ended_ || (got == 0 && bytes > 0);
    return done(bio, tls, got, BIO_FLAGS_READ);
  }
  static long ctrl(BIO *, int what, long, void *) { return what == BIO_CTRL_FLUSH; }

  static unsigned offer(SSL *ssl, const char *, char *name, unsigned room, unsigned char *key,
                        unsigned key_room) {
    const Tls::Key &ours = of(ssl).key_;
    if (room < sizeof identity || key_room < ours.size())
      return 0;
    std::memcpy(name, identity, sizeof identity);
    std::memcpy(key, ours.data(), ours.size());
    return unsigned(ours.size());
  }
  static unsigned answer(SSL *ssl, const char *name, unsigned char *key, unsigned key_room) {
    const Tls::Key &ours = of(ssl).key_;
    if (std::strcmp(name, identity) != 0 || key_room < ours.size())
      return 0;
    std::memcpy(key, ours.data(), ours.size());
    return unsigned(ours.size());
  }
};

namespace {

void look_up_all(OpenSsl &to) {
  // RTLD_LOCAL: other libraries may have their own OpenSSL in this process.
  void *library = ::dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char *why = ::dlerror();
    throw std::runtime_error(why != nullptr ? why : "libssl.so.3 cannot be loaded");
  }
#define UNISONO_LOOK_UP(name) look_up(library, #name, to.name);
  UNISONO_OPENSSL(UNISONO_LOOK_UP)
#undef UNISONO_LOOK_UP
}

// TLS 1.3 only; no certificates, since the key authenticates both sides; no tickets, which
// the server would send to a client that may never read them.
void set_up(OpenSsl &ssl) {
  // A thread may still be using it when the process exits.
  bool fine = ssl.OPENSSL_init_ssl(OPENSSL_INIT_NO_ATEXIT, nullptr) == 1;
  ssl.context = ssl.SSL_CTX_new(ssl.TLS_method());
  ssl.wire = ssl.BIO_meth_new(ssl.BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "unisono");
  if (!fine || ssl.context == nullptr || ssl.wire == nullptr)
    throw std::runtime_error("libssl.so.3 does not start");
  fine = ssl.SSL_CTX_ctrl(ssl.context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1 &&
         ssl.SSL_CTX_ctrl(ssl.context, SSL_CTRL_SET_MAX_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1 &&
         // Both with SHA-256, which an external PSK requires.
         ssl.SSL_CTX_set_ciphersuites(
             ssl.context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") == 1 &&
         ssl.SSL_CTX_set_num_tickets(ssl.context, 0) == 1 &&
         ssl.BIO_meth_set_write(ssl.wire, &TlsCallbacks::write) == 1 &&
         ssl.BIO_meth_set_read(ssl.wire, &TlsCallbacks::read) == 1 &&
         ssl.BIO_meth_set_ctrl(ssl.wire, &TlsCallbacks::ctrl) == 1;
  if (!fine)
    throw std::runtime_error("libssl.so.3 has no TLS 1.3 with AES-128-GCM or ChaCha20");
  ssl.SSL_CTX_ctrl(ssl.context, SSL_CTRL_MODE, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER, nullptr);
  ssl.SSL_CTX_set_psk_client_callback(ssl.context, &TlsCallbacks::offer);
  ssl.SSL_CTX_set_psk_server_callback(ssl.context, &TlsCallbacks::answer);
}

// Loaded once, never unloaded.
const OpenSsl &openssl() {
  static const OpenSsl *const loaded = [] {
    auto *made = new OpenSsl{};
    try {
      look_up_all(*made);
      set_up(*made);
    } catch (const std::runtime_error &why) {
      made->missing = why.what();
    }
    return made;
  }();
  return *loaded;
}

} // namespace

const std::string &Tls::missing() { return openssl().missing; }

Tls::Tls(int fd, const Key &key, Side side, std::uint64_t lifetime)
    : fd_(fd), key_(key), lifetime_(lifetime),
      gathered_(std::make_unique_for_overwrite<std::byte[]>(record_bytes)) {
  const OpenSsl &ssl = openssl();
  if (!ssl.missing.empty())
    throw std::runtime_error(ssl.missing);
  ssl_ = ssl.SSL_new(ssl.context);
  BIO *bio = ssl_ == nullptr ? nullptr : ssl.BIO_new(ssl.wire);
  if (bio == nullptr) {
    ssl.SSL_free(ssl_);
    throw std::bad_alloc();
  }
  ssl.BIO_set_data(bio, this);
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_, bio, bio);
  ssl.SSL_set_ex_data(ssl_, own_data, this);
  if (side == Side::client) {
    ssl.SSL_set_verify(ssl_, SSL_VERIFY_PEER, nullptr); // no certificate is accepted
    ssl.SSL_set_connect_state(ssl_);
  } else {
    ssl.SSL_set_accept_state(ssl_);
  }
}

Tls::~Tls() { openssl().SSL_free(ssl_); }

int Tls::handshake() {
  const OpenSsl &ssl = openssl();
  ssl.ERR_clear_error();
  const int result = ssl.SSL_do_handshake(ssl_);
  if (result == 1) { // authenticated by the key, and by nothing else
    const bool right =
        ssl.SSL_session_reused(ssl_) == 1 && ssl.SSL_version(ssl_) == TLS1_3_VERSION;
    errno = EBADMSG;
    return right ? 0 : -1;
  }
  const int why = ssl.SSL_get_error(ssl_, result);
  if (why == SSL_ERROR_WANT_READ)
    return POLLIN;
  if (why == SSL_ERROR_WANT_WRITE)
    return POLLOUT;
  errno = ended_ ? ECONNRESET : why == SSL_ERROR_SSL || error_ == 0 ? EBADMSG : error_;
  return -1;
}

ssize_t Tls::send(const iovec *parts, std::size_t count) {
  while (count > 0 && parts->iov_len == 0)
    ++parts, --count;
  if (count == 0)
    return 0;
  const void *from = parts->iov_base;
  std::size_t bytes = std::min(parts->iov_len, record_bytes);
  if (bytes < record_bytes && count > 1) {
    bytes = 0;
    for (; count > 0 && bytes < record_bytes; ++parts, --count) {
      const std::size_t some = std::min(parts->iov_len, record_bytes - bytes);
      if (some > 0)
        std::memcpy(gathered_.get() + bytes, parts->iov_base, some);
      bytes += some;
    }
    from = gathered_.get();
  }
  const OpenSsl &ssl = openssl();
  ssl.ERR_clear_error();
  const int result = ssl.SSL_write(ssl_, from, int(bytes));
  if (result <= 0) {
    const ssize_t failed = result_of(result);
    return failed == 0 ? (errno = EPIPE, -1) : failed;
  }
  sent_ += std::size_t(result);
  if (sent_ >= lifetime_ && ssl.SSL_key_update(ssl_, SSL_KEY_UPDATE_NOT_REQUESTED) == 1) { // before the next record
    sent_ = 0;
    ++key_updates_;
  }
  return result;
}

ssize_t Tls::recv(void *into, std::size_t bytes) {
  const OpenSsl &ssl = openssl();
  ssl.ERR_clear_error();
  const int result = ssl.SSL_read(ssl_, into, int(std::min(bytes, std::size_t(1) << 30)));
  return result > 0 ? result : result_of(result);
}

bool Tls::has_pending() const { return openssl().SSL_has_pending(ssl_) == 1; }

ssize_t Tls::result_of(int result) {
  const int why = openssl().SSL_get_error(ssl_, result);
  const bool waits = why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE;
  if (!waits && (ended_ || why == SSL_ERROR_ZERO_RETURN))
    return 0;
  errno = waits ? EAGAIN : why == SSL_ERROR_SSL || error_ == 0 ? EBADMSG : error_;
  return -1;
}

} // namespace unisono

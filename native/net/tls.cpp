#include "net/tls.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>

#include <dlfcn.h>
#include <poll.h>
#include <sys/socket.h>

#include "net/socket_error.hpp"
#include "support/failpoint.hpp"

struct ssl_ctx_st;
struct bio_st;
struct bio_method_st;

namespace unisono {

namespace {

using Ssl = ssl_st;
using Context = ssl_ctx_st;
using Bio = bio_st;
using BioMethod = bio_method_st;

// The little of OpenSSL 3 that is needed. Its interface is stable for all of version 3, and
// the library's name says which it is.
struct OpenSsl {
  int (*OPENSSL_init_ssl)(std::uint64_t, const void *);
  const void *(*TLS_method)();
  Context *(*SSL_CTX_new)(const void *);
  long (*SSL_CTX_ctrl)(Context *, int, long, void *);
  int (*SSL_CTX_set_ciphersuites)(Context *, const char *);
  int (*SSL_CTX_set_num_tickets)(Context *, std::size_t);
  void (*SSL_CTX_set_psk_client_callback)(
      Context *, unsigned (*)(Ssl *, const char *, char *, unsigned, unsigned char *, unsigned));
  void (*SSL_CTX_set_psk_server_callback)(
      Context *, unsigned (*)(Ssl *, const char *, unsigned char *, unsigned));
  Ssl *(*SSL_new)(Context *);
  void (*SSL_free)(Ssl *);
  void (*SSL_set_bio)(Ssl *, Bio *, Bio *);
  void (*SSL_set_verify)(Ssl *, int, void *);
  void (*SSL_set_connect_state)(Ssl *);
  void (*SSL_set_accept_state)(Ssl *);
  int (*SSL_set_ex_data)(Ssl *, int, void *);
  void *(*SSL_get_ex_data)(const Ssl *, int);
  int (*SSL_do_handshake)(Ssl *);
  int (*SSL_version)(const Ssl *);
  int (*SSL_session_reused)(const Ssl *);
  int (*SSL_write)(Ssl *, const void *, int);
  int (*SSL_read)(Ssl *, void *, int);
  int (*SSL_has_pending)(const Ssl *);
  int (*SSL_key_update)(Ssl *, int);
  int (*SSL_get_error)(const Ssl *, int);
  void (*ERR_clear_error)();
  BioMethod *(*BIO_meth_new)(int, const char *);
  int (*BIO_meth_set_write)(BioMethod *, int (*)(Bio *, const char *, int));
  int (*BIO_meth_set_read)(BioMethod *, int (*)(Bio *, char *, int));
  int (*BIO_meth_set_ctrl)(BioMethod *, long (*)(Bio *, int, long, void *));
  Bio *(*BIO_new)(const BioMethod *);
  void (*BIO_set_data)(Bio *, void *);
  void *(*BIO_get_data)(Bio *);
  void (*BIO_set_init)(Bio *, int);
  void (*BIO_set_flags)(Bio *, int);
  void (*BIO_clear_flags)(Bio *, int);

  Context *context = nullptr;
  BioMethod *wire = nullptr;
  std::string missing;
};

// Numbers of OpenSSL's headers.
constexpr std::uint64_t no_atexit = 0x80000;
constexpr int tls_1_3 = 0x0304;
constexpr int ctrl_mode = 33, ctrl_min_version = 123, ctrl_max_version = 124;
constexpr long partial_write = 1, moving_buffer = 2;
constexpr int verify_peer = 1;
constexpr int error_ssl = 1, error_want_read = 2, error_want_write = 3, error_ended = 6;
constexpr int bio_of_ours = 0x400 | 100; // a source and sink
constexpr int flag_read = 1, flag_write = 2, flag_retry = 8;
constexpr int bio_ctrl_flush = 11;
constexpr int own_data = 0;

constexpr char identity[] = "unisono";

template <typename F> void look_up(void *library, const char *name, F *&into) {
  into = reinterpret_cast<F *>(::dlsym(library, name));
  if (into == nullptr)
    throw std::runtime_error(std::string("libssl.so.3 has no ") + name);
}

const OpenSsl &openssl();

// How many bytes may pass at once; as if the socket were not ready if a test wants none.
bool may_move(const char *name, int &bytes) {
  if (bytes <= 0)
    return true;
  bytes = int(allowed(name, std::size_t(bytes)));
  if (bytes == 0)
    errno = EAGAIN;
  return bytes > 0;
}

} // namespace

// How OpenSSL reaches the socket and the key.
struct TlsCallbacks {
  static Tls &of(const Ssl *ssl) {
    return *static_cast<Tls *>(openssl().SSL_get_ex_data(ssl, own_data));
  }
  static int done(Bio *bio, Tls &tls, ssize_t count, int flag) {
    tls.error_ = count < 0 ? errno : 0;
    openssl().BIO_clear_flags(bio, flag_read | flag_write | flag_retry);
    if (count < 0 && passes(socket_error(errno)))
      openssl().BIO_set_flags(bio, flag | flag_retry);
    return int(count);
  }
  static int write(Bio *bio, const char *from, int bytes) {
    Tls &tls = *static_cast<Tls *>(openssl().BIO_get_data(bio));
    const ssize_t sent =
        may_move("tls.send", bytes)
            ? ::send(tls.fd_, from, std::size_t(bytes), MSG_DONTWAIT | MSG_NOSIGNAL)
            : -1;
    return done(bio, tls, sent, flag_write);
  }
  static int read(Bio *bio, char *into, int bytes) {
    Tls &tls = *static_cast<Tls *>(openssl().BIO_get_data(bio));
    const ssize_t got = may_move("tls.receive", bytes)
                            ? ::recv(tls.fd_, into, std::size_t(bytes), MSG_DONTWAIT)
                            : -1;
    tls.ended_ = tls.ended_ || (got == 0 && bytes > 0);
    return done(bio, tls, got, flag_read);
  }
  static long ctrl(Bio *, int what, long, void *) { return what == bio_ctrl_flush; }

  static unsigned offer(Ssl *ssl, const char *, char *name, unsigned room, unsigned char *key,
                        unsigned key_room) {
    const Tls::Key &ours = of(ssl).key_;
    if (room < sizeof identity || key_room < ours.size())
      return 0;
    std::memcpy(name, identity, sizeof identity);
    std::memcpy(key, ours.data(), ours.size());
    return unsigned(ours.size());
  }
  static unsigned answer(Ssl *ssl, const char *name, unsigned char *key, unsigned key_room) {
    const Tls::Key &ours = of(ssl).key_;
    if (std::strcmp(name, identity) != 0 || key_room < ours.size())
      return 0;
    std::memcpy(key, ours.data(), ours.size());
    return unsigned(ours.size());
  }
};

namespace {

void look_up_all(OpenSsl &to) {
  // Others may have their own OpenSSL in this process; names are kept apart.
  void *library = ::dlopen("libssl.so.3", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char *why = ::dlerror();
    throw std::runtime_error(why != nullptr ? why : "libssl.so.3 cannot be loaded");
  }
#define UNISONO_LOOK_UP(name) look_up(library, #name, to.name)
  UNISONO_LOOK_UP(OPENSSL_init_ssl);
  UNISONO_LOOK_UP(TLS_method);
  UNISONO_LOOK_UP(SSL_CTX_new);
  UNISONO_LOOK_UP(SSL_CTX_ctrl);
  UNISONO_LOOK_UP(SSL_CTX_set_ciphersuites);
  UNISONO_LOOK_UP(SSL_CTX_set_num_tickets);
  UNISONO_LOOK_UP(SSL_CTX_set_psk_client_callback);
  UNISONO_LOOK_UP(SSL_CTX_set_psk_server_callback);
  UNISONO_LOOK_UP(SSL_new);
  UNISONO_LOOK_UP(SSL_free);
  UNISONO_LOOK_UP(SSL_set_bio);
  UNISONO_LOOK_UP(SSL_set_verify);
  UNISONO_LOOK_UP(SSL_set_connect_state);
  UNISONO_LOOK_UP(SSL_set_accept_state);
  UNISONO_LOOK_UP(SSL_set_ex_data);
  UNISONO_LOOK_UP(SSL_get_ex_data);
  UNISONO_LOOK_UP(SSL_do_handshake);
  UNISONO_LOOK_UP(SSL_version);
  UNISONO_LOOK_UP(SSL_session_reused);
  UNISONO_LOOK_UP(SSL_write);
  UNISONO_LOOK_UP(SSL_read);
  UNISONO_LOOK_UP(SSL_has_pending);
  UNISONO_LOOK_UP(SSL_key_update);
  UNISONO_LOOK_UP(SSL_get_error);
  UNISONO_LOOK_UP(ERR_clear_error);
  UNISONO_LOOK_UP(BIO_meth_new);
  UNISONO_LOOK_UP(BIO_meth_set_write);
  UNISONO_LOOK_UP(BIO_meth_set_read);
  UNISONO_LOOK_UP(BIO_meth_set_ctrl);
  UNISONO_LOOK_UP(BIO_new);
  UNISONO_LOOK_UP(BIO_set_data);
  UNISONO_LOOK_UP(BIO_get_data);
  UNISONO_LOOK_UP(BIO_set_init);
  UNISONO_LOOK_UP(BIO_set_flags);
  UNISONO_LOOK_UP(BIO_clear_flags);
#undef UNISONO_LOOK_UP
}

// TLS 1.3 and nothing else; no certificates, so who has not the key has nothing to show; no
// tickets, which the answerer would send to one who never reads.
void set_up(OpenSsl &ssl) {
  // A thread may still be at work when the process exits.
  bool fine = ssl.OPENSSL_init_ssl(no_atexit, nullptr) == 1;
  ssl.context = ssl.SSL_CTX_new(ssl.TLS_method());
  ssl.wire = ssl.BIO_meth_new(bio_of_ours, "unisono");
  if (!fine || ssl.context == nullptr || ssl.wire == nullptr)
    throw std::runtime_error("libssl.so.3 does not start");
  fine = ssl.SSL_CTX_ctrl(ssl.context, ctrl_min_version, tls_1_3, nullptr) == 1 &&
         ssl.SSL_CTX_ctrl(ssl.context, ctrl_max_version, tls_1_3, nullptr) == 1 &&
         // Both by SHA-256, as a key that is given so must be.
         ssl.SSL_CTX_set_ciphersuites(
             ssl.context, "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256") == 1 &&
         ssl.SSL_CTX_set_num_tickets(ssl.context, 0) == 1 &&
         ssl.BIO_meth_set_write(ssl.wire, &TlsCallbacks::write) == 1 &&
         ssl.BIO_meth_set_read(ssl.wire, &TlsCallbacks::read) == 1 &&
         ssl.BIO_meth_set_ctrl(ssl.wire, &TlsCallbacks::ctrl) == 1;
  if (!fine)
    throw std::runtime_error("libssl.so.3 has no TLS 1.3 with AES-128-GCM or ChaCha20");
  ssl.SSL_CTX_ctrl(ssl.context, ctrl_mode, partial_write | moving_buffer, nullptr);
  ssl.SSL_CTX_set_psk_client_callback(ssl.context, &TlsCallbacks::offer);
  ssl.SSL_CTX_set_psk_server_callback(ssl.context, &TlsCallbacks::answer);
}

// Loaded once, and never let go.
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
  Bio *bio = ssl_ == nullptr ? nullptr : ssl.BIO_new(ssl.wire);
  if (bio == nullptr) {
    ssl.SSL_free(ssl_);
    throw std::bad_alloc();
  }
  ssl.BIO_set_data(bio, this);
  ssl.BIO_set_init(bio, 1);
  ssl.SSL_set_bio(ssl_, bio, bio);
  ssl.SSL_set_ex_data(ssl_, own_data, this);
  if (side == Side::dialer) {
    ssl.SSL_set_verify(ssl_, verify_peer, nullptr); // no certificate will do
    ssl.SSL_set_connect_state(ssl_);
  } else {
    ssl.SSL_set_accept_state(ssl_);
  }
}

Tls::~Tls() { openssl().SSL_free(ssl_); }

int Tls::shake() {
  const OpenSsl &ssl = openssl();
  ssl.ERR_clear_error();
  const int result = ssl.SSL_do_handshake(ssl_);
  if (result == 1) { // and by the key, whatever else could have been agreed on
    const bool right =
        ssl.SSL_session_reused(ssl_) == 1 && ssl.SSL_version(ssl_) == tls_1_3;
    errno = EBADMSG;
    return right ? 0 : -1;
  }
  const int why = ssl.SSL_get_error(ssl_, result);
  if (why == error_want_read)
    return POLLIN;
  if (why == error_want_write)
    return POLLOUT;
  errno = ended_ ? ECONNRESET : why == error_ssl || error_ == 0 ? EBADMSG : error_;
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
    const ssize_t failed = outcome(result);
    return failed == 0 ? (errno = EPIPE, -1) : failed;
  }
  sent_ += std::size_t(result);
  if (sent_ >= lifetime_ && ssl.SSL_key_update(ssl_, 0) == 1) { // before what comes next
    sent_ = 0;
    ++changes_;
  }
  return result;
}

ssize_t Tls::recv(void *into, std::size_t bytes) {
  const OpenSsl &ssl = openssl();
  ssl.ERR_clear_error();
  const int result = ssl.SSL_read(ssl_, into, int(std::min(bytes, std::size_t(1) << 30)));
  return result > 0 ? result : outcome(result);
}

bool Tls::holds_bytes() const { return openssl().SSL_has_pending(ssl_) == 1; }

ssize_t Tls::outcome(int result) {
  const int why = openssl().SSL_get_error(ssl_, result);
  const bool waits = why == error_want_read || why == error_want_write;
  if (!waits && (ended_ || why == error_ended))
    return 0;
  errno = waits ? EAGAIN : why == error_ssl || error_ == 0 ? EBADMSG : error_;
  return -1;
}

} // namespace unisono

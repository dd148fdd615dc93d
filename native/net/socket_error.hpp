// What a socket error means for a connection to a rank of another host.

#pragma once

#include <cerrno>

namespace unisono {

enum class SocketError {
  later,       // nothing is wrong: the same call is made again
  scarce,      // the kernel is short of memory just now: again, a little later
  ended,       // the other end has ended the connection, or its host has
  unreachable, // no byte arrives any more, for an unknown reason
  forged,      // bytes came that the other end has not sent (tls.hpp)
  misused,     // of this process alone: a descriptor that is none, a wrong argument
};

inline SocketError socket_error(int error) {
#if EAGAIN != EWOULDBLOCK
  if (error == EWOULDBLOCK)
    return SocketError::later;
#endif
  switch (error) {
  case EAGAIN:
  case EINTR:
    return SocketError::later;
  case ENOMEM:
  case ENOBUFS:
    return SocketError::scarce;
  case ECONNRESET:
  case ECONNABORTED:
  case ECONNREFUSED:
  case EPIPE:
  case ENOTCONN:
  case ESHUTDOWN:
    return SocketError::ended;
  case ETIMEDOUT:
  case EHOSTUNREACH:
  case EHOSTDOWN:
  case ENETUNREACH:
  case ENETDOWN:
  case ENETRESET:
  case ENOPROTOOPT: // as ICMP says that no such protocol is spoken there
  case EACCES:      // and that a filter stands between
  case EPERM:
    return SocketError::unreachable;
  case EBADMSG:
    return SocketError::forged;
  default:
    return SocketError::misused;
  }
}

// Whether the call is to be repeated.
inline bool passes(SocketError error) {
  return error == SocketError::later || error == SocketError::scarce;
}

} // namespace unisono

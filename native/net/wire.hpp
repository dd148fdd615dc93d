// A connection that carries bytes between two ranks, in order and in both directions.
//
// Streams (stream.hpp) and lifelines (lifeline.hpp) move their frames over wires and know
// nothing else about a transport. A transport adds one class that derives from Wire: a socket
// (socket_wire.hpp), an encrypted socket (tls_wire.hpp), and what comes later.
//
// No call waits. One thread at a time uses a wire. It owns what it works on: its destructor
// closes the connection.

#pragma once

#include <cstddef>
#include <vector>

#include <poll.h>
#include <sys/types.h>
#include <sys/uio.h>

namespace unisono {

class Wire {
public:
  virtual ~Wire() = default;

  // Sends as many bytes of the parts as can be sent now. Returns how many, or -1 and errno:
  // EAGAIN if none, another (socket_error.hpp) if the connection has failed. After EAGAIN the
  // caller offers the same bytes again, at least as many; they may lie elsewhere.
  virtual ssize_t send(const iovec *parts, std::size_t count) = 0;
  // Receives what has come, up to `bytes`. Returns how many, 0 if the peer has closed, or -1
  // and errno: EAGAIN if nothing has come, EBADMSG if it is not what the peer has sent.
  virtual ssize_t receive(void *into, std::size_t bytes) = 0;

  // Adds what to poll for until `send` can go on. A wire that must not be slept on adds
  // `ready_now()`.
  virtual void await_send(std::vector<pollfd> &into) = 0;
  // The same for `receive`. The caller needs `bytes` more; a wire may wait until a good part
  // of them has come, but must not wait for more than these.
  virtual void await_receive(std::size_t bytes, std::vector<pollfd> &into) = 0;
  // Whether received bytes are held here, of which a poll would not tell.
  virtual bool has_pending() const { return false; }
  // A descriptor that polls readable when bytes come and writable when they can be sent; -1
  // if there is none. A lifeline needs one.
  virtual int descriptor() const { return -1; }

  // No more than about so many bytes are to be accepted that cannot be sent yet, so that they
  // may take another wire. A wire that cannot limit them ignores it.
  virtual void limit_unsent(std::size_t bytes) { (void)bytes; }

  // How many bytes were accepted that the peer has not acknowledged; 0 if that is not known.
  virtual std::size_t queued() const { return 0; }

  // Whether the peer has closed and everything it sent has been received.
  virtual bool peer_closed() const = 0;
  // Whether it is known that the connection has failed, also if nothing is being sent.
  virtual bool failed() const { return peer_closed(); }
  // Closes the sending direction: the peer receives what was sent, then the end.
  virtual void finish_sending() = 0;
  // Closes the connection so that the peer learns it at once, also if a child of fork has a
  // copy of it, and if the peer waits for room to send more. Else as `close`.
  virtual void abort() { close(); }
  // Closes the connection; nothing else is called afterwards. In a child after fork this
  // closes the child's copy and the parent's connection goes on.
  virtual void close() = 0;

protected:
  Wire() = default;
  Wire(const Wire &) = delete;
  Wire &operator=(const Wire &) = delete;
};

// What makes a poll return at once.
pollfd ready_now();

} // namespace unisono

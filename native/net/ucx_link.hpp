// One end of a connection between two ranks whose bytes move by UCX's active messages.
//
// The authenticated socket over which the two ranks met stays open. It carries three frames
// (frame.hpp): a hello with the address of this rank's worker, the end with the number of all
// bytes, and that all of them have arrived. Its own end tells that the peer has closed or died.
//
// A message says in its header which link it is for, which bytes of the direction it has, and
// a keyed checksum of that. UCX keeps no order between messages: each is stored at its place
// in a ring of `window` bytes. A sender has at most `window` bytes on their way that the
// receiver has not consumed (it says how many these are); what lies outside, has come before,
// or was made without the key is dropped. So a ring is all the memory that a peer can use.
//
// The bytes of a sender are copied into a ring of its own before UCX sees them, since UCX
// reads them later. Everything here is guarded by the mutex of the worker (ucx_worker.hpp).

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include <sys/types.h>
#include <sys/uio.h>

#include "net/frame.hpp"
#include "net/ucx_api.hpp"

namespace unisono {

// The header of a message.
struct UcxHead {
  enum class Kind : std::uint32_t { data = 1, consumed = 2 };
  std::uint64_t link = 0;   // of the receiver
  std::uint64_t offset = 0; // of the first byte; or how many bytes have been consumed
  Kind kind = Kind::data;
  std::uint32_t bytes = 0;
  std::uint64_t mac = 0; // of all before it
};
static_assert(sizeof(UcxHead) == 32 && offsetof(UcxHead, mac) == 24);
static_assert(std::has_unique_object_representations_v<UcxHead>);

// The keys of a link, different in each direction and for each use.
struct UcxKeys {
  Key send_control, send_messages, receive_control, receive_messages;
};

class UcxLink {
public:
  static constexpr std::size_t window = 1 << 20;
  static constexpr std::size_t largest_message = window / 4;
  static constexpr std::size_t most_address = 16 << 10;

  // Takes the descriptor over. `worker` is UCX's, `address` how it is reached.
  UcxLink(void *worker, int fd, const UcxKeys &keys, const std::string &address);
  ~UcxLink();
  UcxLink(const UcxLink &) = delete;
  UcxLink &operator=(const UcxLink &) = delete;

  std::uint64_t id() const { return id_; }
  int fd() const { return fd_; }
  int event() const { return event_; }

  // As Wire's, after progress.
  ssize_t send(const iovec *parts, std::size_t count);
  ssize_t receive(void *into, std::size_t bytes);
  void finish_sending();
  bool can_send() const {
    return broken() || socket_ended_ || (endpoint_ != nullptr && room() >= least_room);
  }
  bool can_receive() const { return available() > 0 || at_end() || broken(); }
  bool peer_closed() const { return available() == 0 && (at_end() || socket_ended_); }
  bool has_bytes() const { return available() > 0; }
  bool socket_ended() const { return socket_ended_; }

  // A message for this link has come; false if it is none that the peer has sent.
  bool deliver(const UcxHead &head, void *data, std::size_t bytes, bool by_rendezvous);
  // Reads and writes what it can of the socket's frames.
  void pump_socket();
  // Looks which transfers have ended, and tells the peer what has been consumed.
  void settle();
  // Whether UCX holds bytes or requests of it that it must still work on.
  bool busy() const { return !sending_.empty() || receiving_ > 0; }
  std::uint64_t bytes_sent() const { return sent_; }

  // Before a thread sleeps: what wakes it if another thread makes progress.
  enum class Awaits { nothing, room, bytes };
  void begin_sleep(Awaits what);
  void end_sleep() { awaits_ = Awaits::nothing; }
  void wake_if_ready();

  // Whether the peer has everything that was sent before `finish_sending`, or is gone.
  bool finished() const;
  // Closes its endpoint, at once; true when UCX uses nothing of it any more.
  bool closed();
  void close_descriptors();

private:
  static constexpr std::size_t least_room = window / 8;
  enum Control : std::uint16_t { hello = 1, end = 2, arrived = 3 };
  struct Sent { // a message that UCX has not sent yet
    UcxHead head;
    ucx::Pending request;
  };
  struct Part { // of what has arrived beyond a gap, or is being fetched
    std::uint64_t end;
    ucx::Pending request;
  };

  static void endpoint_failed(void *self, void *, ucx::Status);
  std::size_t available() const { return std::size_t(arrived_ - consumed_); }
  bool at_end() const { return end_ && consumed_ == *end_; }
  bool broken() const {
    return failed_ || flaw_ || (socket_ended_ && (!end_ || endpoint_ == nullptr));
  }
  std::size_t room() const {
    return window - std::size_t(sent_ - std::min(acknowledged_, reusable_));
  }
  bool post(UcxHead head, const void *data);
  void send_control(Control what, std::uint64_t word, const std::string &payload);
  void write_socket();
  void take_control(const FrameHeader &header, std::span<const std::byte> payload);
  void connect(std::uint64_t peer, const std::string &address);
  void tell_consumed();

  void *const worker_;
  const UcxKeys keys_;
  const std::uint64_t id_;
  int fd_, event_ = -1;
  Awaits awaits_ = Awaits::nothing;
  bool signalled_ = false;

  // The socket.
  Seal control_;
  std::vector<std::byte> place_;
  FrameReader reader_;
  std::string unwritten_;
  bool socket_ended_ = false, flaw_ = false, finished_sending_ = false;
  bool peer_has_all_ = false, said_all_ = false;

  // The endpoint.
  void *endpoint_ = nullptr;
  ucx::Pending closing_ = nullptr;
  bool failed_ = false, is_closing_ = false;
  std::uint64_t peer_ = 0;

  std::unique_ptr<std::byte[]> out_, in_; // the rings
  std::uint64_t sent_ = 0, acknowledged_ = 0, reusable_ = 0;
  std::deque<Sent> sending_;
  std::uint64_t arrived_ = 0, consumed_ = 0, told_ = 0;
  std::map<std::uint64_t, Part> parts_; // by their first byte
  std::size_t receiving_ = 0;           // requests of parts
  std::optional<std::uint64_t> end_;
};

} // namespace unisono

#include "net/ucx_link.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include "net/socket_error.hpp"
#include "support/fail.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

std::uint64_t random_id() {
  std::uint64_t made = 0;
  if (::getrandom(&made, sizeof made, 0) != sizeof made)
    fail("a random number for a link");
  return made;
}

std::uint64_t mac_of(const Key &key, const UcxHead &head) {
  return siphash(key, &head, offsetof(UcxHead, mac));
}

constexpr unsigned message_id = 0; // of UCX's handlers

// Frees a request that has ended. Whether it has, and without an error.
bool ended(ucx::Pending request, bool &fine) {
  const ucx::Status status = ucx::api().request_check_status(request);
  if (status == ucx::in_progress)
    return false;
  fine = fine && status == ucx::ok;
  ucx::api().request_free(request);
  return true;
}

} // namespace

UcxLink::UcxLink(void *worker, int fd, const UcxKeys &keys, const std::string &address)
    : worker_(worker), keys_(keys), id_(random_id()), fd_(fd), control_(keys.send_control, 0),
      place_(sizeof id_ + most_address), reader_(Seal(keys.receive_control, 0), place_) {
  event_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (event_ < 0)
    fail("a descriptor that wakes a thread");
  ::fcntl(fd_, F_SETFL, ::fcntl(fd_, F_GETFL) | O_NONBLOCK);
  send_control(Control::hello, id_, address);
}

UcxLink::~UcxLink() { close_descriptors(); }

void UcxLink::close_descriptors() {
  for (int *fd : {&fd_, &event_})
    if (const int was = std::exchange(*fd, -1); was >= 0)
      ::close(was);
}

// --- the socket

void UcxLink::send_control(Control what, std::uint64_t word, const std::string &payload) {
  FrameHeader header;
  header.kind = FrameKind::control;
  header.flags = what;
  header.call = word;
  header.fingerprint = siphash(keys_.send_control, payload.data(), payload.size());
  header.length = std::uint32_t(payload.size());
  control_.seal(header, payload.data());
  unwritten_.append(reinterpret_cast<const char *>(&header), sizeof header);
  unwritten_ += payload;
  write_socket();
}

void UcxLink::write_socket() {
  while (!unwritten_.empty() && fd_ >= 0 && !socket_ended_) {
    const ssize_t sent =
        ::send(fd_, unwritten_.data(), unwritten_.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0) {
      socket_ended_ = !passes(socket_error(errno));
      return;
    }
    unwritten_.erase(0, std::size_t(sent));
  }
}

void UcxLink::pump_socket() {
  write_socket();
  while (!socket_ended_ && !flaw_) {
    std::byte bytes[1024];
    const ssize_t got = ::recv(fd_, bytes, sizeof bytes, MSG_DONTWAIT);
    if (got < 0 && passes(socket_error(errno)))
      break;
    if (got <= 0) {
      socket_ended_ = true;
      break;
    }
    std::span<const std::byte> left(bytes, std::size_t(got));
    while (reader_.take(left))
      take_control(reader_.header(), reader_.payload());
    flaw_ = flaw_ || reader_.flaw() != Flaw::none;
  }
}

void UcxLink::take_control(const FrameHeader &header, std::span<const std::byte> payload) {
  const bool genuine =
      header.kind == FrameKind::control &&
      header.fingerprint == siphash(keys_.receive_control, payload.data(), payload.size());
  if (genuine && header.flags == Control::hello && endpoint_ == nullptr && !payload.empty())
    connect(header.call, std::string(reinterpret_cast<const char *>(payload.data()), payload.size()));
  else if (genuine && header.flags == Control::end && !end_ && header.call >= arrived_)
    end_ = header.call;
  else if (genuine && header.flags == Control::arrived && finished_sending_)
    peer_has_all_ = true;
  else
    flaw_ = true;
}

void UcxLink::connect(std::uint64_t peer, const std::string &address) {
  peer_ = peer;
  if (is_closing_)
    return;
  ucx::EndpointParams params;
  params.address = address.data();
  params.error_handler = &UcxLink::endpoint_failed;
  params.error_arg = this;
  failed_ = ucx::api().ep_create(worker_, &params, &endpoint_) != ucx::ok;
  if (failed_)
    endpoint_ = nullptr;
}

// Nothing but its end may be asked of a failed endpoint. The peer's may be well: it learns of
// it by the socket.
void UcxLink::endpoint_failed(void *self, void *, ucx::Status) {
  auto *const link = static_cast<UcxLink *>(self);
  link->failed_ = true;
  ::shutdown(link->fd_, SHUT_RDWR);
}

// --- sending

bool UcxLink::post(UcxHead head, const void *data) {
  failpoint("ucx.send");
  head.link = peer_;
  head.mac = mac_of(keys_.send_messages, head);
  sending_.push_back({head, nullptr}); // UCX reads the header later, too
  Sent &made = sending_.back();
  const ucx::RequestParams params;
  made.request = ucx::api().am_send_nbx(endpoint_, message_id, &made.head, sizeof made.head,
                                        data, data == nullptr ? 0 : head.bytes, &params);
  if (ucx::failed(made.request)) {
    made.request = nullptr;
    failed_ = true;
  }
  return !failed_;
}

ssize_t UcxLink::send(const iovec *parts, std::size_t count) {
  if (broken() || socket_ended_ || finished_sending_) {
    errno = flaw_ ? EBADMSG : EPIPE;
    return -1;
  }
  std::size_t most = allowed("socket.send", largest_message);
  ssize_t taken = 0;
  std::size_t skip = 0;
  while (count > 0 && most > 0 && can_send()) {
    if (!out_)
      out_ = std::make_unique_for_overwrite<std::byte[]>(window);
    const std::size_t at = std::size_t(sent_ % window);
    const std::size_t limit = std::min({room(), most, window - at});
    std::size_t bytes = 0;
    while (count > 0 && bytes < limit) {
      const std::size_t some = std::min(parts->iov_len - skip, limit - bytes);
      if (some > 0)
        std::memcpy(out_.get() + at + bytes, static_cast<std::byte *>(parts->iov_base) + skip, some);
      bytes += some;
      skip += some;
      if (skip == parts->iov_len)
        ++parts, --count, skip = 0;
    }
    if (bytes == 0)
      break;
    UcxHead head;
    head.offset = sent_;
    head.bytes = std::uint32_t(bytes);
    sent_ += bytes;
    if (!post(head, out_.get() + at)) {
      errno = EPIPE;
      return -1;
    }
    taken += ssize_t(bytes);
    settle();
    if (most < largest_message)
      break; // a test has cut what is sent
  }
  if (taken > 0)
    return taken;
  errno = EAGAIN;
  return -1;
}

void UcxLink::finish_sending() {
  if (std::exchange(finished_sending_, true) || failed_)
    return;
  send_control(Control::end, sent_, "");
}

// --- receiving

ssize_t UcxLink::receive(void *into, std::size_t bytes) {
  std::size_t taken = 0;
  while (taken < bytes && available() > 0) {
    const std::size_t at = std::size_t(consumed_ % window);
    const std::size_t some = std::min({bytes - taken, available(), window - at});
    std::memcpy(static_cast<std::byte *>(into) + taken, in_.get() + at, some);
    consumed_ += some;
    taken += some;
  }
  if (taken > 0) {
    tell_consumed();
    return ssize_t(taken);
  }
  if (at_end() || (socket_ended_ && !end_ && !flaw_))
    return 0;
  errno = flaw_ ? EBADMSG : broken() ? ECONNRESET : EAGAIN;
  return -1;
}

void UcxLink::tell_consumed() {
  if (consumed_ - told_ < window / 4 || endpoint_ == nullptr || failed_ || is_closing_)
    return;
  UcxHead head;
  head.kind = UcxHead::Kind::consumed;
  head.offset = told_ = consumed_;
  (void)post(head, nullptr);
}

bool UcxLink::deliver(const UcxHead &head, void *data, std::size_t bytes, bool rendezvous) {
  if (head.mac != mac_of(keys_.receive_messages, head))
    return false;
  if (head.kind == UcxHead::Kind::consumed) {
    if (bytes != 0 || head.offset < acknowledged_ || head.offset > sent_)
      return false;
    acknowledged_ = head.offset;
    return true;
  }
  const std::uint64_t first = head.offset, last = first + bytes;
  const std::size_t at = std::size_t(first % window);
  const auto next = parts_.lower_bound(first);
  if (head.kind != UcxHead::Kind::data || bytes != head.bytes || bytes == 0 ||
      bytes > largest_message || first < arrived_ || last > consumed_ + window ||
      last < first || at + bytes > window || (end_ && last > *end_) ||
      (next != parts_.end() && next->first < last) ||
      (next != parts_.begin() && std::prev(next)->second.end > first))
    return false;
  failpoint("ucx.receive");
  if (!in_)
    in_ = std::make_unique_for_overwrite<std::byte[]>(window);
  ucx::Pending request = nullptr;
  if (rendezvous) {
    const ucx::RequestParams params;
    request = ucx::api().am_recv_data_nbx(worker_, data, in_.get() + at, bytes, &params);
    if (ucx::failed(request)) {
      failed_ = true;
      return true;
    }
    receiving_ += request != nullptr;
  } else {
    std::memcpy(in_.get() + at, data, bytes);
  }
  parts_.emplace(first, Part{last, request});
  return true;
}

void UcxLink::settle() {
  bool fine = true;
  while (!sending_.empty() &&
         (sending_.front().request == nullptr || ended(sending_.front().request, fine))) {
    const UcxHead &head = sending_.front().head;
    if (head.kind == UcxHead::Kind::data)
      reusable_ = head.offset + head.bytes;
    sending_.pop_front();
  }
  if (receiving_ > 0)
    for (auto &[first, part] : parts_)
      if (part.request != nullptr && ended(part.request, fine)) {
        part.request = nullptr;
        --receiving_;
      }
  failed_ = failed_ || !fine;
  while (fine && !parts_.empty() && parts_.begin()->first == arrived_ &&
         parts_.begin()->second.request == nullptr) {
    arrived_ = parts_.begin()->second.end;
    parts_.erase(parts_.begin());
  }
  if (end_ && arrived_ == *end_ && !said_all_) {
    said_all_ = true;
    send_control(Control::arrived, arrived_, "");
  }
}

// --- sleeping

void UcxLink::begin_sleep(Awaits what) {
  if (std::exchange(signalled_, false)) {
    std::uint64_t count;
    (void)!::read(event_, &count, sizeof count);
  }
  awaits_ = what;
}

void UcxLink::wake_if_ready() {
  const bool ready = awaits_ == Awaits::bytes  ? can_receive()
                     : awaits_ == Awaits::room ? can_send()
                                               : false;
  if (!ready || signalled_)
    return;
  signalled_ = true;
  const std::uint64_t one = 1;
  (void)!::write(event_, &one, sizeof one);
}

// --- the end

bool UcxLink::finished() const {
  return peer_has_all_ || sent_ == 0 || broken() || socket_ended_;
}

bool UcxLink::closed() {
  if (!std::exchange(is_closing_, true) && endpoint_ != nullptr) {
    ucx::RequestParams params;
    params.mask = ucx::has_flags;
    params.flags = ucx::close_by_force;
    closing_ = ucx::api().ep_close_nbx(endpoint_, &params);
    if (ucx::failed(closing_))
      closing_ = nullptr;
  }
  bool fine = true;
  if (closing_ != nullptr && ended(closing_, fine))
    closing_ = nullptr;
  settle();
  return closing_ == nullptr && !busy();
}

} // namespace unisono

#include "lifeline.hpp"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstring>
#include <ctime>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

namespace unisono {

namespace {

constexpr std::size_t frame_bytes = sizeof(FrameHeader) + sizeof(Event); // the largest
constexpr std::size_t queue_bytes = 65536; // more than this unsent for the limit is slow
constexpr std::size_t log_size = 65536;    // so many events unsent is slow at once
constexpr std::int64_t farewell_ns = 80'000'000;
constexpr int reads_at_once = 4; // of one peer, before it is the turn of the next
constexpr std::size_t max_ready = 64;

std::int64_t monotonic_ns() {
  timespec t;
  ::clock_gettime(CLOCK_MONOTONIC, &t);
  return std::int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

[[noreturn]] void fail(const char *what) {
  throw std::system_error(errno, std::generic_category(), what);
}

// How much of an event travels.
std::size_t bytes_of(const Event &event) {
  const bool noted = event.kind == Event::Kind::called || event.kind == Event::Kind::waits;
  return noted ? sizeof event : offsetof(Event, note);
}

// What the kernel does for one who must be heard. Where a socket or a kernel does not know
// an option the heartbeats alone must do, a little later.
void prepare(int fd, std::int64_t limit) {
  ::fcntl(fd, F_SETFL, ::fcntl(fd, F_GETFL) | O_NONBLOCK);
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  const auto set = [fd](int option, int value) {
    ::setsockopt(fd, IPPROTO_TCP, option, &value, sizeof value);
  };
  set(TCP_NODELAY, 1);
  set(TCP_USER_TIMEOUT, int(std::min<std::int64_t>(limit / 1'000'000, 1 << 30)));
  // A partition that is over a little before the limit must heal, so what was lost is sent
  // again after a second at most, and not after pauses that double each time.
#if defined(TCP_THIN_LINEAR_TIMEOUTS)
  set(TCP_THIN_LINEAR_TIMEOUTS, 1);
#endif
  constexpr int rto_max_ms = 44; // TCP_RTO_MAX_MS: Linux 6.15, and no header has it yet
  set(rto_max_ms, 1000);
}

// Signals are for the threads of Python: one that begins under this has none.
class NoSignals {
public:
  NoSignals() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  NoSignals(const NoSignals &) = delete;
  NoSignals &operator=(const NoSignals &) = delete;

private:
  sigset_t before_;
};

Cause cause_of(Flaw flaw) {
  return flaw == Flaw::mac ? Cause::not_authentic : Cause::corrupted;
}

// A host that cannot be reached is silent; one that answers that nobody is there is gone.
Cause cause_of_error(int error) {
  if (error == EBADMSG) // by TLS
    return Cause::not_authentic;
  const bool vanished =
      error == ETIMEDOUT || error == EHOSTUNREACH || error == ENETUNREACH;
  return vanished ? Cause::silent : Cause::gone;
}

} // namespace

const char *cause_name(Cause cause) {
  constexpr const char *names[num_causes] = {"none", "gone",      "silent",
                                             "slow", "corrupted", "not authentic"};
  return names[std::size_t(cause)];
}

const char *event_name(Event::Kind kind) {
  constexpr const char *names[num_event_kinds] = {"beat",    "dead",   "left",
                                                  "verdict", "called", "closed", "waits"};
  return names[std::size_t(kind)];
}

struct Lifeline::Peer {
  Peer(std::size_t r, const Connection &c, std::uint32_t epoch, std::int64_t now)
      : rank(r), fd(c.fd), tls(c.tls), heard(now), outgoing(c.outgoing, epoch),
        reader(Seal(c.incoming, epoch), place) {}

  bool open() const { return fd.load(std::memory_order_relaxed) >= 0; }
  std::size_t queued() const { return end - begin; }

  ssize_t recv(void *into, std::size_t bytes) {
    return tls ? tls->recv(into, bytes)
               : ::recv(fd.load(std::memory_order_relaxed), into, bytes, 0);
  }
  ssize_t send() {
    const iovec part{out.data() + begin, queued()};
    return tls ? tls->send(&part, 1)
               : ::send(fd.load(std::memory_order_relaxed), part.iov_base, part.iov_len,
                        MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  // Bytes that the socket does not show any more.
  bool holds_bytes() const { return tls && tls->holds_bytes(); }

  const std::size_t rank;
  std::atomic<int> fd; // -1 when it is over; only the lifeline's thread ends it
  const std::shared_ptr<Tls> tls;
  std::atomic<std::int64_t> heard;
  Seal outgoing;
  std::array<std::byte, sizeof(Event)> place;
  FrameReader reader;
  std::array<std::byte, 4096> out; // sealed and unsent, from `begin` to `end`
  std::size_t begin = 0, end = 0;
  std::uint64_t next = 0; // which event of the log it is sent next
  std::int64_t behind = 0; // since when there is too much that it was not sent
  bool wants_writable = false;
  int error = 0; // of a write; what came before it is still read
};

struct Lifeline::Log {
  struct Entry {
    Event event;
    std::size_t source; // whence it came, where it need not go
  };
  static_assert(std::is_trivially_copyable_v<Entry>);
  Entry at(std::uint64_t i) const {
    Entry entry;
    std::memcpy(&entry, &ring[i % log_size * sizeof entry], sizeof entry);
    return entry;
  }
  void add(const Entry &entry) {
    std::memcpy(&ring[end++ % log_size * sizeof entry], &entry, sizeof entry);
  }
  bool full() const { return end - begin == log_size; }

  std::uint64_t begin = 0, end = 0;

private:
  // Not touched before it is needed, so it costs nothing while nothing happens.
  std::unique_ptr<std::byte[]> ring =
      std::make_unique_for_overwrite<std::byte[]>(log_size * sizeof(Entry));
};

// A forked child would keep the connections open when the parent dies, and nobody would
// hear of it. Never destroyed: a thread may outlive the statics of its process.
struct Lifeline::Watch {
  std::mutex mutex;
  std::vector<Lifeline *> all;

  static Watch &instance() {
    static Watch *watch = [] {
      ::pthread_atfork([] { instance().mutex.lock(); }, [] { instance().mutex.unlock(); },
                       [] {
                         instance().in_child();
                         instance().mutex.unlock();
                       });
      return new Watch;
    }();
    return *watch;
  }
  void in_child() {
    for (Lifeline *one : all) {
      one->forked_.store(true, std::memory_order_release);
      for (auto &peer : one->peers_)
        if (peer && peer->open())
          ::close(peer->fd.exchange(-1));
      ::close(std::exchange(one->epoll_, -1));
      ::close(std::exchange(one->wake_, -1));
      if (one->thread_.joinable())
        one->thread_.detach(); // it belongs to the parent
    }
    all.clear();
  }
  // Begins its thread; no fork comes between.
  void add(Lifeline *one) {
    std::lock_guard lock(mutex);
    all.reserve(all.size() + 1);
    one->thread_ = std::thread([one] { one->run(); });
    all.push_back(one);
  }
  void remove(Lifeline *one) {
    std::lock_guard lock(mutex);
    std::erase(all, one);
  }
};

Lifeline::Lifeline(std::size_t rank, const std::vector<Connection> &connections,
                   Options options, Sink sink)
    : rank_(rank), options_(options), sink_(std::move(sink)),
      fates_(connections.size(), Fate::living), log_(std::make_unique<Log>()) {
  if (rank >= connections.size())
    throw std::invalid_argument("a lifeline: its rank must be below the number of ranks");
  for (std::size_t r = 0; r < connections.size(); ++r)
    if (connections[r].fd >= 0 && (r == rank || (rank != 0 && r != 0)))
      throw std::invalid_argument("a lifeline: a leaf is connected to rank 0 alone, and "
                                  "nobody to itself");
  if (options.beat <= 0 || options.limit <= options.beat)
    throw std::invalid_argument("a lifeline: the limit must be longer than a beat");
  try {
    open(connections);
    NoSignals while_it_begins;
    Watch::instance().add(this);
  } catch (...) {
    for (int fd : {epoll_, wake_})
      if (fd >= 0)
        ::close(fd);
    throw;
  }
}

void Lifeline::open(const std::vector<Connection> &connections) {
  epoll_ = ::epoll_create1(EPOLL_CLOEXEC);
  wake_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0)
    fail("a lifeline: making a descriptor to wait with");
  epoll_event woken{EPOLLIN, {}};
  if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, wake_, &woken) != 0)
    fail("a lifeline: waiting for a wake");
  const std::int64_t now = monotonic_ns();
  for (std::size_t r = 0; r < connections.size(); ++r) {
    peers_.emplace_back();
    if (connections[r].fd < 0)
      continue;
    prepare(connections[r].fd, options_.limit);
    peers_[r] = std::make_unique<Peer>(r, connections[r], options_.epoch, now);
    epoll_event ready{EPOLLIN, {}};
    ready.data.ptr = peers_[r].get();
    if (::epoll_ctl(epoll_, EPOLL_CTL_ADD, connections[r].fd, &ready) != 0)
      fail("a lifeline: waiting for a connection");
  }
}

Lifeline::~Lifeline() { close(); }

void Lifeline::close() {
  if (closed_.exchange(true))
    return;
  if (forked())
    return;
  const std::uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
  thread_.join();
  Watch::instance().remove(this); // from here on a fork does not see what is closed here
  ::close(epoll_);
  ::close(wake_);
}

bool Lifeline::tell_dead(std::size_t rank, Cause cause) {
  if (rank >= fates_.size() || std::size_t(cause) >= num_causes)
    throw std::invalid_argument("a lifeline: told of a rank or a cause that does not exist");
  Event event;
  event.kind = Event::Kind::dead;
  event.rank = std::uint32_t(rank);
  event.cause = cause;
  return tell(event);
}

bool Lifeline::tell_verdict(std::uint64_t comm, std::uint64_t word) {
  Event event;
  event.kind = Event::Kind::verdict;
  event.rank = std::uint32_t(rank_);
  event.comm = comm;
  event.word = word;
  return tell(event);
}

bool Lifeline::tell_called(std::uint64_t comm, std::size_t rank, const Note &note) {
  Event event;
  event.kind = Event::Kind::called;
  event.rank = std::uint32_t(rank);
  event.comm = comm;
  std::memcpy(event.note.data(), &note, sizeof note);
  return tell(event);
}

bool Lifeline::tell_closed(std::uint64_t comm) {
  Event event;
  event.kind = Event::Kind::closed;
  event.rank = std::uint32_t(rank_);
  event.comm = comm;
  return tell(event);
}

bool Lifeline::tell_waits(std::uint64_t comm, std::uint64_t word, const Note &note) {
  Event event;
  event.kind = Event::Kind::waits;
  event.rank = std::uint32_t(rank_);
  event.comm = comm;
  event.word = word;
  std::memcpy(event.note.data(), &note, sizeof note);
  return tell(event);
}

bool Lifeline::tell(const Event &event) {
  if (forked() || closed_.load(std::memory_order_acquire))
    return false;
  std::lock_guard lock(mutex_);
  if (closed_.load(std::memory_order_acquire))
    return false;
  inbox_.push_back(event);
  inbox_.back().reporter = std::uint32_t(rank_);
  // Under the lock, so that close() cannot have ended the descriptor meanwhile: the
  // thread takes the lock once more before it ends.
  const std::uint64_t one = 1;
  (void)!::write(wake_, &one, sizeof one);
  return true;
}

std::vector<std::int64_t> Lifeline::silence() const {
  const std::int64_t now = monotonic_ns();
  std::vector<std::int64_t> all(peers_.size(), -1);
  for (std::size_t r = 0; r < peers_.size(); ++r)
    if (peers_[r] && peers_[r]->open())
      all[r] = std::max<std::int64_t>(
          0, (now - peers_[r]->heard.load(std::memory_order_relaxed)) / 1'000'000);
  return all;
}

// --- the lifeline's thread

void Lifeline::run() {
  const std::int64_t pause = std::max<std::int64_t>(options_.limit / 10, 1'000'000);
  std::int64_t now = monotonic_ns();
  std::int64_t next_beat = now, next_look = now + pause;
  while (!closed_.load(std::memory_order_acquire)) {
    wait(std::min(next_beat, next_look));
    take_inbox();
    flood();
    now = monotonic_ns();
    if (now >= next_beat) {
      beat();
      next_beat = std::max(next_beat + options_.beat, now);
    }
    if (now >= next_look) {
      look();
      flood();
      next_look = now + pause;
    }
  }
  wait(0); // what has come by now is still heard
  take_inbox();
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, wake_, nullptr);
  farewell();
}

// Waits until `until` at most, then takes in what has come, from all who are ready.
void Lifeline::wait(std::int64_t until) {
  epoll_event ready[max_ready];
  const std::int64_t left = std::max<std::int64_t>(until - monotonic_ns(), 0);
  auto ms = int(std::min<std::int64_t>((left + 999'999) / 1'000'000, 1 << 30));
  for (std::size_t seen = 0; seen <= peers_.size(); ms = 0) {
    const int count = ::epoll_wait(epoll_, ready, max_ready, ms);
    if (count < 0)
      continue; // it was stopped, or traced, and goes on
    for (int i = 0; i < count; ++i)
      attend(static_cast<Peer *>(ready[i].data.ptr), ready[i].events);
    if (count < int(max_ready))
      return;
    seen += max_ready;
  }
}

void Lifeline::attend(Peer *peer, std::uint32_t events) {
  if (peer == nullptr) {
    std::uint64_t rung;
    (void)!::read(wake_, &rung, sizeof rung);
    return;
  }
  if (peer->open() && (events & EPOLLOUT) != 0)
    write(*peer);
  if (peer->open() && (events & ~std::uint32_t(EPOLLOUT)) != 0)
    hear(*peer);
}

void Lifeline::take_inbox() {
  {
    std::lock_guard lock(mutex_);
    std::swap(inbox_, taken_);
  }
  for (const Event &event : taken_)
    learn(event, rank_, false);
  taken_.clear();
}

void Lifeline::hear(Peer &peer) {
  std::byte bytes[4096];
  for (int i = 0; (i < reads_at_once || peer.holds_bytes()) && peer.open(); ++i) {
    const ssize_t got = peer.recv(bytes, sizeof bytes);
    if (got < 0 && errno == EINTR)
      continue;
    if (got < 0 && errno == EAGAIN)
      return;
    if (got <= 0)
      return lose(peer, cause_of_error(got < 0 ? errno : peer.error));
    peer.heard.store(monotonic_ns(), std::memory_order_relaxed);
    if (!understand(peer, {bytes, std::size_t(got)}))
      return;
    if (std::size_t(got) < sizeof bytes && !peer.tls)
      return;
  }
}

// Reads frames; false when that was the end of the peer.
bool Lifeline::understand(Peer &peer, std::span<const std::byte> bytes) {
  while (peer.reader.take(bytes)) {
    Event event;
    const auto payload = peer.reader.payload();
    std::memcpy(static_cast<void *>(&event), payload.data(), payload.size());
    const bool whole = peer.reader.header().kind == FrameKind::control &&
                       payload.size() == bytes_of(event);
    if (!whole || !sound(peer, event)) {
      lose(peer, Cause::corrupted);
      return false;
    }
    learn(event, peer.rank, true);
    if (!peer.open())
      return false;
  }
  if (peer.reader.flaw() == Flaw::none)
    return true;
  lose(peer, cause_of(peer.reader.flaw()));
  return false;
}

// Whether the peer may say this: a leaf speaks for itself alone, the hub for all.
bool Lifeline::sound(const Peer &peer, const Event &event) const {
  const std::size_t n = fates_.size();
  if (std::size_t(event.kind) >= num_event_kinds || event.rank >= n ||
      std::size_t(event.cause) >= num_causes || event.reporter >= n)
    return false;
  if (event.kind == Event::Kind::beat || peer.rank == 0)
    return true;
  const bool of_others =
      event.kind == Event::Kind::dead || event.kind == Event::Kind::called;
  return event.reporter == peer.rank && (of_others || event.rank == peer.rank);
}

// Something new, from a peer or from this process itself: it goes into the log for all
// others, and to the sink unless this process has said it.
void Lifeline::learn(const Event &event, std::size_t source, bool is_news) {
  if (event.kind == Event::Kind::beat || alone_)
    return;
  const bool parts = event.kind == Event::Kind::dead || event.kind == Event::Kind::left;
  if (parts) {
    Fate &fate = fates_[event.rank];
    if (fate != Fate::living)
      return;
    fate = event.kind == Event::Kind::left ? Fate::left : Fate::dead;
  }
  append(event, source);
  if (is_news)
    sink_(event);
  if (parts)
    bury(event);
}

// Ends the connection to one who is dead or has left; or all, if it is this one.
void Lifeline::bury(const Event &event) {
  if (event.rank == rank_) {
    flood();
    alone_ = true;
    for (auto &peer : peers_)
      if (peer)
        drop(*peer);
  } else if (auto &peer = peers_[event.rank]; peer && peer->open()) {
    if (event.kind == Event::Kind::dead)
      dismiss(*peer, event);
    drop(*peer);
  }
}

// A connection is over: news for all, if it was not expected.
void Lifeline::lose(Peer &peer, Cause cause) {
  Event event;
  event.kind = Event::Kind::dead;
  event.rank = std::uint32_t(peer.rank);
  event.cause = cause;
  event.reporter = std::uint32_t(rank_);
  learn(event, rank_, true);
  drop(peer);
}

// One who is declared dead is told so, if it can still hear. What it said last is taken off
// the connection: bytes that nobody reads would make its end a reset.
void Lifeline::dismiss(Peer &peer, const Event &news) {
  if (put(peer, news))
    write(peer);
  std::byte bytes[4096];
  for (int i = 0; i < reads_at_once; ++i)
    if (peer.recv(bytes, sizeof bytes) <= 0)
      return;
}

void Lifeline::drop(Peer &peer) {
  const int fd = peer.fd.exchange(-1, std::memory_order_relaxed);
  if (fd < 0)
    return;
  // By name, since another copy of the descriptor may still be open somewhere.
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, fd, nullptr);
  ::close(fd);
}

// Seals one event into what is to be sent; false if there is no room.
bool Lifeline::put(Peer &peer, const Event &event) {
  if (peer.begin > 0) {
    std::memmove(peer.out.data(), peer.out.data() + peer.begin, peer.queued());
    peer.end = peer.queued();
    peer.begin = 0;
  }
  if (peer.out.size() - peer.end < frame_bytes)
    return false;
  FrameHeader header;
  header.kind = FrameKind::control;
  header.length = std::uint32_t(bytes_of(event));
  peer.outgoing.seal(header, &event);
  std::memcpy(peer.out.data() + peer.end, &header, sizeof header);
  std::memcpy(peer.out.data() + peer.end + sizeof header, &event, header.length);
  peer.end += sizeof header + header.length;
  return true;
}

// Sends what the kernel takes. An error is left for the reader to find, after what the
// peer may have said before: perhaps it was goodbye.
void Lifeline::write(Peer &peer) {
  while (peer.queued() > 0) {
    const ssize_t sent = peer.send();
    if (sent >= 0) {
      peer.begin += std::size_t(sent);
    } else if (errno == EAGAIN) {
      return want_writable(peer, true);
    } else if (errno != EINTR) {
      peer.error = errno;
      peer.begin = peer.end;
    }
  }
  want_writable(peer, false);
}

void Lifeline::want_writable(Peer &peer, bool wanted) {
  if (peer.wants_writable == wanted)
    return;
  peer.wants_writable = wanted;
  epoll_event ready{EPOLLIN | (wanted ? std::uint32_t(EPOLLOUT) : 0), {}};
  ready.data.ptr = &peer;
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, peer.fd.load(std::memory_order_relaxed), &ready);
}

// Puts an event into the log. If that is full, somebody has not been sent any of it.
void Lifeline::append(const Event &event, std::size_t source) {
  if (log_->full())
    flood();
  while (log_->full()) {
    const auto slowest = std::find_if(peers_.begin(), peers_.end(), [this](auto &peer) {
      return peer && peer->open() && peer->next == log_->begin;
    });
    Peer &peer = **slowest;
    drop(peer);
    flood();
    lose(peer, Cause::slow);
  }
  log_->add({event, source});
}

// Sends every peer what it has not been sent, as far as it takes it.
void Lifeline::flood() {
  if (log_->begin == log_->end)
    return;
  std::uint64_t begin = log_->end;
  for (auto &peer : peers_)
    if (peer && peer->open()) {
      feed(*peer);
      begin = std::min(begin, peer->next);
    }
  log_->begin = begin;
}

void Lifeline::feed(Peer &peer) {
  for (; peer.next < log_->end; ++peer.next) {
    const Log::Entry entry = log_->at(peer.next);
    if (entry.source == peer.rank || put(peer, entry.event))
      continue;
    write(peer);
    if (!put(peer, entry.event))
      return;
  }
  write(peer);
}

void Lifeline::beat() {
  for (auto &peer : peers_)
    if (peer && peer->open()) {
      if (peer->queued() == 0) // whatever is sent is as good
        put(*peer, Event{});
      write(*peer);
    }
}

// Who has been silent, or behind, for too long. It may be this process that was stopped
// for long: so what has come by now is heard first, and the time is taken before that.
void Lifeline::look() {
  const std::int64_t now = monotonic_ns();
  wait(0);
  for (auto &peer : peers_) {
    if (!peer || !peer->open())
      continue;
    const std::uint64_t unsent =
        (log_->end - peer->next) * frame_bytes + peer->queued();
    if (unsent <= queue_bytes)
      peer->behind = 0;
    else if (peer->behind == 0)
      peer->behind = now;
    if (now - peer->heard.load(std::memory_order_relaxed) > options_.limit)
      lose(*peer, Cause::silent);
    else if (peer->behind != 0 && now - peer->behind > options_.limit)
      lose(*peer, Cause::slow);
  }
}

// Says goodbye to all, and waits a little until they have ended their side: what they sent
// meanwhile and nobody read would turn the goodbye into a reset.
void Lifeline::farewell() {
  if (!alone_) {
    Event goodbye;
    goodbye.kind = Event::Kind::left;
    goodbye.rank = goodbye.reporter = std::uint32_t(rank_);
    alone_ = true; // nothing is news from here on
    append(goodbye, rank_);
  }
  const std::int64_t until = monotonic_ns() + farewell_ns;
  for (std::int64_t left = farewell_ns; left > 0; left = until - monotonic_ns()) {
    flood();
    std::size_t still = 0;
    for (auto &peer : peers_)
      still += peer && peer->open() && !parted(*peer);
    if (still == 0)
      return;
    epoll_event ready[max_ready];
    ::epoll_wait(epoll_, ready, max_ready, int((left + 999'999) / 1'000'000));
  }
  for (auto &peer : peers_)
    if (peer)
      drop(*peer);
}

// Ends this side of a connection when all is sent, and the whole when the other side ends.
bool Lifeline::parted(Peer &peer) {
  const int fd = peer.fd.load(std::memory_order_relaxed);
  write(peer);
  if (peer.next == log_->end && peer.queued() == 0)
    ::shutdown(fd, SHUT_WR);
  std::byte bytes[4096];
  ssize_t got = 1;
  for (int i = 0; i < reads_at_once && got > 0; ++i)
    got = peer.recv(bytes, sizeof bytes);
  if (got > 0 || (got < 0 && (errno == EAGAIN || errno == EINTR)))
    return false;
  drop(peer);
  return true;
}

} // namespace unisono

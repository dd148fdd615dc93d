// The lifeline's thread: it waits for what comes, beats, looks who has been silent for too
// long, and says goodbye at the end.

#include <algorithm>
#include <cerrno>

#include <sys/epoll.h>
#include <unistd.h>

#include "net/lifeline_log.hpp"
#include "net/lifeline_peer.hpp"
#include "net/socket_error.hpp"
#include "support/clock.hpp"

namespace unisono {

namespace {

constexpr std::size_t queue_bytes = 65536; // more than this unsent for the limit is slow
constexpr std::int64_t farewell_ns = 80'000'000;
constexpr std::size_t max_ready = 64;

} // namespace

void Lifeline::run() {
  const std::int64_t pause = std::max<std::int64_t>(options_.limit / 10, 1'000'000);
  std::int64_t now = now_ns();
  std::int64_t next_beat = now, next_look = now + pause;
  while (!closed_.load(std::memory_order_acquire)) {
    wait(std::min(next_beat, next_look));
    take_inbox();
    flood();
    now = now_ns();
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
  const std::int64_t left = std::max<std::int64_t>(until - now_ns(), 0);
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
    peer->write();
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

void Lifeline::beat() {
  for (auto &peer : peers_)
    if (peer && peer->open()) {
      if (peer->queued() == 0) // whatever is sent is as good
        peer->put(Event{});
      peer->write();
    }
}

// Who has been silent, or behind, for too long. It may be this process that was stopped
// for long: so what has come by now is heard first, and the time is taken before that.
void Lifeline::look() {
  const std::int64_t now = now_ns();
  wait(0);
  for (auto &peer : peers_) {
    if (!peer || !peer->open())
      continue;
    const std::uint64_t unsent =
        (log_->end - peer->next) * Peer::frame_bytes + peer->queued();
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
    alone_ = true; // nothing is news from here on
    const auto me = std::uint32_t(rank_);
    append({.kind = Event::Kind::left, .rank = me, .reporter = me}, rank_);
  }
  const std::int64_t until = now_ns() + farewell_ns;
  for (std::int64_t left = farewell_ns; left > 0; left = until - now_ns()) {
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
      peer->drop();
}

// Ends this side of a connection when all is sent, and the whole when the other side ends.
bool Lifeline::parted(Peer &peer) {
  peer.write();
  if (peer.next == log_->end && peer.queued() == 0)
    peer.wire->finish_sending();
  const ssize_t got = peer.skim();
  if (got > 0 || (got < 0 && passes(socket_error(errno))))
    return false;
  peer.drop();
  return true;
}

} // namespace unisono

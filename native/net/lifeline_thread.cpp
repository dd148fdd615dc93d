// The lifeline's thread: receives events, sends heartbeats, detects silent peers, and
// announces at the end that this rank leaves.

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

// a peer with more than this unsent for the limit is slow
constexpr std::size_t queue_bytes = 65536;
constexpr std::int64_t close_grace_ns = 80'000'000;
constexpr std::size_t max_ready = 64;

} // namespace

void Lifeline::run() {
  const std::int64_t pause = std::max<std::int64_t>(options_.limit / 10, 1'000'000);
  std::int64_t now = now_ns();
  std::int64_t next_beat = now, next_look = now + pause;
  while (!closed_.load(std::memory_order_acquire)) {
    wait(std::min(next_beat, next_look));
    take_inbox();
    send_log();
    now = now_ns();
    if (now >= next_beat) {
      send_heartbeats();
      next_beat = std::max(next_beat + options_.beat, now);
    }
    if (now >= next_look) {
      check_silence();
      send_log();
      next_look = now + pause;
    }
  }
  wait(0); // what has arrived by now is still handled
  take_inbox();
  ::epoll_ctl(epoll_, EPOLL_CTL_DEL, wake_, nullptr);
  close_connections();
}

// Waits until `until` at most, then handles all peers that are ready.
void Lifeline::wait(std::int64_t until) {
  epoll_event ready[max_ready];
  const std::int64_t left = std::max<std::int64_t>(until - now_ns(), 0);
  auto ms = int(std::min<std::int64_t>((left + 999'999) / 1'000'000, 1 << 30));
  for (std::size_t seen = 0; seen <= peers_.size(); ms = 0) {
    const int count = ::epoll_wait(epoll_, ready, max_ready, ms);
    if (count < 0)
      continue; // interrupted by a signal or a tracer
    for (int i = 0; i < count; ++i)
      handle_ready(static_cast<Peer *>(ready[i].data.ptr), ready[i].events);
    if (count < int(max_ready))
      return;
    seen += max_ready;
  }
}

void Lifeline::handle_ready(Peer *peer, std::uint32_t events) {
  if (peer == nullptr) {
    std::uint64_t rung;
    (void)!::read(wake_, &rung, sizeof rung);
    return;
  }
  if (peer->open() && (events & EPOLLOUT) != 0)
    peer->write();
  if (peer->open() && (events & ~std::uint32_t(EPOLLOUT)) != 0)
    receive(*peer);
}

void Lifeline::take_inbox() {
  {
    std::lock_guard lock(mutex_);
    std::swap(inbox_, taken_);
  }
  for (const Event &event : taken_)
    record_event(event, rank_, false);
  taken_.clear();
}

void Lifeline::send_heartbeats() {
  for (auto &peer : peers_)
    if (peer && peer->open()) {
      if (peer->queued() == 0) // any message serves as a heartbeat
        peer->put(Event{});
      peer->write();
    }
}

// Finds peers that were silent or behind for too long. This process itself may have been
// stopped: so the time is taken first, and then what has arrived is handled.
void Lifeline::check_silence() {
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
      mark_lost(*peer, Cause::silent);
    else if (peer->behind != 0 && now - peer->behind > options_.limit)
      mark_lost(*peer, Cause::slow);
  }
}

// Announces to all that this rank leaves, and waits briefly until they have closed their
// side: with unread bytes the connection would end by a reset.
void Lifeline::close_connections() {
  if (!declared_dead_) {
    declared_dead_ = true; // no event is forwarded from here on
    const auto me = std::uint32_t(rank_);
    append({.kind = Event::Kind::left, .rank = me, .reporter = me}, rank_);
  }
  const std::int64_t until = now_ns() + close_grace_ns;
  for (std::int64_t left = close_grace_ns; left > 0; left = until - now_ns()) {
    send_log();
    std::size_t still = 0;
    for (auto &peer : peers_)
      still += peer && peer->open() && !finish_close(*peer);
    if (still == 0)
      return;
    epoll_event ready[max_ready];
    ::epoll_wait(epoll_, ready, max_ready, int((left + 999'999) / 1'000'000));
  }
  for (auto &peer : peers_)
    if (peer)
      peer->drop();
}

// Shuts down the sending side when all is sent, and closes when the other side has ended.
bool Lifeline::finish_close(Peer &peer) {
  peer.write();
  if (peer.next == log_->end && peer.queued() == 0)
    peer.wire->finish_sending();
  const ssize_t got = peer.discard_input();
  if (got > 0 || (got < 0 && passes(socket_error(errno))))
    return false;
  peer.drop();
  return true;
}

} // namespace unisono

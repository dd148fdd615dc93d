// What a lifeline hears, and how it goes round.
//
// A frame that is not sound is the end of whoever it came from. News goes into the log, and
// from there to everybody but whom it came from; a death or a goodbye also ends a connection.

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "net/lifeline_log.hpp"
#include "net/lifeline_peer.hpp"
#include "net/socket_error.hpp"
#include "support/clock.hpp"

namespace unisono {

namespace {

Cause cause_of(Flaw flaw) {
  return flaw == Flaw::mac ? Cause::not_authentic : Cause::corrupted;
}

// A host that cannot be reached is silent; one that answers that nobody is there is gone.
Cause cause_of_error(int error) {
  switch (error == 0 ? SocketError::ended : socket_error(error)) {
  case SocketError::forged:
    return Cause::not_authentic;
  case SocketError::unreachable:
    return Cause::silent;
  default: // ended, or a fault of this process, which is over for the other as well
    return Cause::gone;
  }
}

} // namespace

void Lifeline::hear(Peer &peer) {
  std::byte bytes[4096];
  for (int i = 0; peer.open() && (i < Peer::reads_at_once || peer.wire->holds_bytes()); ++i) {
    const ssize_t got = peer.recv(bytes, sizeof bytes);
    if (got < 0 && errno == EINTR)
      continue;
    if (got < 0 && passes(socket_error(errno)))
      return;
    if (got <= 0)
      return lose(peer, cause_of_error(got < 0 ? errno : peer.error));
    peer.heard.store(now_ns(), std::memory_order_relaxed);
    if (!understand(peer, {bytes, std::size_t(got)}))
      return;
    if (std::size_t(got) < sizeof bytes && !peer.wire->holds_bytes())
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
                       payload.size() == event.bytes();
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
  if (event.parts()) {
    Fate &fate = fates_[event.rank];
    if (fate != Fate::living)
      return;
    fate = event.kind == Event::Kind::left ? Fate::left : Fate::dead;
  }
  append(event, source);
  if (is_news)
    sink_(event);
  if (event.parts())
    bury(event);
}

// Ends the connection to one who is dead or has left; or all, if it is this one.
void Lifeline::bury(const Event &event) {
  if (event.rank == rank_) {
    flood();
    alone_ = true;
    for (auto &peer : peers_)
      if (peer)
        peer->drop();
  } else if (auto &peer = peers_[event.rank]; peer && peer->open()) {
    if (event.kind == Event::Kind::dead)
      dismiss(*peer, event);
    peer->drop();
  }
}

// A connection is over: news for all, if it was not expected.
void Lifeline::lose(Peer &peer, Cause cause) {
  learn({.kind = Event::Kind::dead,
         .rank = std::uint32_t(peer.rank),
         .cause = cause,
         .reporter = std::uint32_t(rank_)},
        rank_, true);
  peer.drop();
}

// One who is declared dead is told so, if it can still hear. What it said last is taken off
// the connection: bytes that nobody reads would make its end a reset.
void Lifeline::dismiss(Peer &peer, const Event &news) {
  if (peer.put(news))
    peer.write();
  (void)peer.skim();
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
    peer.drop();
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
    if (entry.source == peer.rank || peer.put(entry.event))
      continue;
    peer.write();
    if (!peer.put(entry.event))
      return;
  }
  peer.write();
}

} // namespace unisono

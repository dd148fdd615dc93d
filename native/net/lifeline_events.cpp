// Receiving and forwarding events.
//
// An invalid frame ends the connection that it came from. Events go into the log, and from
// there to every peer except the one it came from; a death or a departure also ends a
// connection.

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

// A host that cannot be reached is silent; one that refuses the connection is gone.
Cause cause_of_error(int error) {
  switch (error == 0 ? SocketError::ended : socket_error(error)) {
  case SocketError::forged:
    return Cause::not_authentic;
  case SocketError::unreachable:
    return Cause::silent;
  default: // ended, or a fault of this process, which ends the connection as well
    return Cause::gone;
  }
}

} // namespace

void Lifeline::receive(Peer &peer) {
  std::byte bytes[4096];
  for (int i = 0; peer.open() && (i < Peer::reads_at_once || peer.wire->has_pending()); ++i) {
    const ssize_t got = peer.recv(bytes, sizeof bytes);
    if (got < 0 && errno == EINTR)
      continue;
    if (got < 0 && passes(socket_error(errno)))
      return;
    if (got <= 0)
      return mark_lost(peer, cause_of_error(got < 0 ? errno : peer.error));
    peer.heard.store(now_ns(), std::memory_order_relaxed);
    if (!read_frames(peer, {bytes, std::size_t(got)}))
      return;
    if (std::size_t(got) < sizeof bytes && !peer.wire->has_pending())
      return;
  }
}

// Reads frames; false if the connection has ended by them.
bool Lifeline::read_frames(Peer &peer, std::span<const std::byte> bytes) {
  while (peer.reader.take(bytes)) {
    Event event;
    const auto payload = peer.reader.payload();
    std::memcpy(static_cast<void *>(&event), payload.data(), payload.size());
    const bool whole = peer.reader.header().kind == FrameKind::control &&
                       payload.size() == event.bytes();
    if (!whole || !is_valid(peer, event)) {
      mark_lost(peer, Cause::corrupted);
      return false;
    }
    record_event(event, peer.rank, true);
    if (!peer.open())
      return false;
  }
  if (peer.reader.flaw() == Flaw::none)
    return true;
  mark_lost(peer, cause_of(peer.reader.flaw()));
  return false;
}

// Whether the peer may send this: a leaf reports its own events and deaths, the hub any.
bool Lifeline::is_valid(const Peer &peer, const Event &event) const {
  const std::size_t n = states_.size();
  if (std::size_t(event.kind) >= num_event_kinds || event.rank >= n ||
      std::size_t(event.cause) >= num_causes || event.reporter >= n)
    return false;
  if (event.kind == Event::Kind::beat || peer.rank == 0)
    return true;
  const bool of_others =
      event.kind == Event::Kind::dead || event.kind == Event::Kind::called;
  return event.reporter == peer.rank && (of_others || event.rank == peer.rank);
}

// A new event, of a peer or of this process: it goes into the log for all others, and to
// the sink unless this process has announced it.
void Lifeline::record_event(const Event &event, std::size_t source, bool from_peer) {
  if (event.kind == Event::Kind::beat || declared_dead_)
    return;
  if (event.ends_rank()) {
    RankState &state = states_[event.rank];
    if (state != RankState::alive)
      return;
    state = event.kind == Event::Kind::left ? RankState::left : RankState::dead;
  }
  append(event, source);
  if (from_peer)
    sink_(event);
  if (event.ends_rank())
    end_connection_to(event);
}

// Ends the connection to a rank that is dead or has left; or all, if it is this rank.
void Lifeline::end_connection_to(const Event &event) {
  if (event.rank == rank_) {
    send_log();
    declared_dead_ = true;
    for (auto &peer : peers_)
      if (peer)
        peer->drop();
  } else if (auto &peer = peers_[event.rank]; peer && peer->open()) {
    if (event.kind == Event::Kind::dead)
      notify_dead(*peer, event);
    peer->drop();
  }
}

// A connection is lost: a death for all, if it was not expected.
void Lifeline::mark_lost(Peer &peer, Cause cause) {
  record_event({.kind = Event::Kind::dead,
         .rank = std::uint32_t(peer.rank),
         .cause = cause,
         .reporter = std::uint32_t(rank_)},
        rank_, true);
  peer.drop();
}

// Informs a rank that is declared dead, if it can still receive. Its last messages are
// read: with unread bytes the connection would end by a reset.
void Lifeline::notify_dead(Peer &peer, const Event &news) {
  if (peer.put(news))
    peer.write();
  (void)peer.discard_input();
}

// Adds an event to the log. If that is full, some peer has received none of its entries.
void Lifeline::append(const Event &event, std::size_t source) {
  if (log_->full())
    send_log();
  while (log_->full()) {
    const auto slowest = std::find_if(peers_.begin(), peers_.end(), [this](auto &peer) {
      return peer && peer->open() && peer->next == log_->begin;
    });
    Peer &peer = **slowest;
    peer.drop();
    send_log();
    mark_lost(peer, Cause::slow);
  }
  log_->add({event, source});
}

// Sends every peer the events that it has not been sent, as far as possible.
void Lifeline::send_log() {
  if (log_->begin == log_->end)
    return;
  std::uint64_t begin = log_->end;
  for (auto &peer : peers_)
    if (peer && peer->open()) {
      send_log_to(*peer);
      begin = std::min(begin, peer->next);
    }
  log_->begin = begin;
}

void Lifeline::send_log_to(Peer &peer) {
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

#include "net/event.hpp"

namespace unisono {

const char *cause_name(Cause cause) {
  constexpr const char *names[num_causes] = {"none", "gone",      "silent",
                                             "slow", "corrupted", "not authentic"};
  return names[std::size_t(cause)];
}

const char *event_name(Event::Kind kind) {
  constexpr const char *names[num_event_kinds] = {"beat",    "dead",   "left",
                                                  "failure", "called", "closed", "waits"};
  return names[std::size_t(kind)];
}

std::size_t Event::bytes() const {
  const bool noted = kind == Kind::called || kind == Kind::waits;
  return noted ? sizeof *this : offsetof(Event, note);
}

} // namespace unisono

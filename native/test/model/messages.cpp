// Send and receive through a ring that holds little more than the head of a message, so that it
// is full, wraps round in the middle of a head, and is emptied meanwhile.

#include "test/model/world.hpp"

namespace model {

using namespace unisono;

namespace {

constexpr std::size_t most = 6;

struct Mail {
  Element sent[2][most] = {}, received[2][most] = {};
};

bool transfer(Comm &comm, Transfer::Direction direction, std::size_t peer, Element *data,
              std::size_t elements, bool impatient, Failure *failure) {
  auto op = std::make_shared<Transfer>(comm, direction, peer, 0, data,
                                       elements * sizeof(Element), 1);
  comm.channels().submit(op);
  Status status;
  while ((status = op->advance()) == Status::blocked) {
    if (impatient || comm.check_blocked(*op) != Status::blocked) {
      status = comm.channels().cancel(*op) ? Status::failed : Status::done;
      break;
    }
    await();
  }
  *failure = op->failure;
  return status == Status::done;
}

// Rank 0 sends to the last rank; the ranks between them do nothing.
Scenario messages(int count, std::size_t elements) {
  auto *world = new World(2);
  auto *mail = new Mail;
  name(mail, "mail");
  Scenario scenario;
  scenario.threads.push_back([=] {
    for (int m = 0; m < count; ++m) {
      for (std::size_t e = 0; e < elements; ++e)
        mail->sent[m][e] = Element(m) * 10 + e + 1;
      Failure failure;
      check(transfer((*world)[0], Transfer::Direction::send, 1, mail->sent[m], elements, false,
                     &failure),
            "a send fails");
    }
  });
  scenario.threads.push_back([=] {
    for (int m = 0; m < count; ++m) {
      Failure failure;
      check(transfer((*world)[1], Transfer::Direction::receive, 0, mail->received[m], elements,
                     false, &failure),
            "a receive fails");
      for (std::size_t e = 0; e < elements; ++e)
        check(mail->received[m][e] == Element(m) * 10 + e + 1, "a message is wrong");
    }
  });
  return scenario;
}

// The sender aborts when the ring is full: a receiver that waits for the rest must see the
// failure, and receives the messages that were sent completely before.
Scenario cut(int whole) {
  auto *world = new World(2);
  auto *mail = new Mail;
  name(mail, "mail");
  Scenario scenario;
  scenario.threads.push_back([=] {
    Failure failure;
    for (int m = 0; m < whole; ++m)
      check(transfer((*world)[0], Transfer::Direction::send, 1, mail->sent[m], 2, false,
                     &failure),
            "a send fails");
    const bool done = transfer((*world)[0], Transfer::Direction::send, 1, mail->sent[whole],
                               most, true, &failure);
    outcome(done ? "sent" : "aborted");
    if (!done)
      for (Element &e : mail->sent[whole])
        e = 77;
  });
  scenario.threads.push_back([=] {
    Failure failure;
    for (int m = 0; m < whole; ++m)
      check(transfer((*world)[1], Transfer::Direction::receive, 0, mail->received[m], 2, false,
                     &failure),
            "a message is lost that was sent whole");
    const bool done = transfer((*world)[1], Transfer::Direction::receive, 0,
                               mail->received[whole], most, false, &failure);
    check(done || failure.kind == FailureKind::truncated,
          "a receive fails for another reason");
    outcome(done ? "received" : "cut");
  });
  return scenario;
}

} // namespace

void add_messages(Scenarios &all) {
  all["messages"] = [](int) { return messages(2, 2); };
  all["long message"] = [](int) { return messages(1, 6); };
  all["message aborted"] = [](int) { return cut(0); };
  all["message aborted after another"] = [](int) { return cut(1); };
}

} // namespace model

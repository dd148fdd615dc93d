// Calls that fail: all ranks that fail report the same cause, and no other rank uses the buffers
// of a rank whose call has failed.

#include "test/model/world.hpp"

namespace model {

using namespace unisono;

namespace {

struct Outcome {
  Element input[3][4] = {}, output[3][4] = {};
  Element done[3] = {};
  Failure failure[3];
};

// The first `impatient` ranks abort when they have to wait; the others see the failure.
Scenario aborting(int n, int impatient, Cut cut, const std::string &collective = "direct") {
  auto *world = new World(n);
  auto *what = new Outcome;
  name(what->input, "inputs");
  // No rank waits for readers: they check for a failure when they are done, and discard what
  // they have read if a rank has aborted.
  const bool gathers = collective == "gather";
  if (gathers)
    may_race(what->input, sizeof what->input);
  name(what->output, "outputs");
  Scenario scenario;
  for (int r = 0; r < n; ++r) {
    const auto plan = make_plan(collective, n, r, cut);
    scenario.threads.push_back([=] {
      const int count = int(plan->size.size());
      for (int e = 0; e < count; ++e)
        what->input[r][e] = Element(r + 1);
      what->done[r] = call((*world)[r], plan, what->input[r], what->output[r],
                           r < impatient ? Waits::impatient : Waits::looking,
                           &what->failure[r]);
      for (int e = 0; e < count && what->done[r]; ++e)
        check(what->output[r][e] == Element(gathers ? e + 1 : n * (n + 1) / 2),
              "a result is wrong");
      for (int e = 0; e < count; ++e) // the buffers are in use for other data now
        what->input[r][e] = what->output[r][e] = 77;
    });
  }
  scenario.ended = [=] {
    const std::uint64_t abort = (*world)[0].layout().control().abort.load();
    std::string text;
    for (int r = 0; r < n; ++r) {
      if (!what->done[r])
        check(what->failure[r].word() == abort, "ranks name different causes");
      text += what->done[r] ? "+" : std::to_string(what->failure[r].culprit);
    }
    for (int r = 0; r < n; ++r) {
      check((*world)[r].layout().block(std::size_t(r)).writing.load() == 0,
            "a rank says for ever that it writes");
      for (const Element e : what->output[r])
        check(e == 0 || e == 77, "a buffer was written after its call had ended");
    }
    outcome(text);
  };
  return scenario;
}

// The last rank closes after the call, and has queued another: the others complete the call, or
// name the rank that aborts it.
Scenario closed_later(int n, int impatient) {
  auto *world = new World(n);
  auto *what = new Outcome;
  Scenario scenario;
  for (int r = 0; r < n; ++r) {
    const auto plan = make_plan("naive", n, r, {1, true, false});
    scenario.threads.push_back([=] {
      if (r == n - 1) {
        const auto me = std::uint32_t(r);
        (*world)[r].abort({FailureKind::closed, me, me, 2});
      }
      what->input[r][0] = Element(r + 1);
      what->done[r] = call((*world)[r], plan, what->input[r], what->output[r],
                           r < impatient ? Waits::impatient : Waits::looking,
                           &what->failure[r]);
    });
  }
  scenario.ended = [=] {
    const std::uint64_t abort = (*world)[0].layout().control().abort.load();
    std::string text;
    for (int r = 0; r < n; ++r) {
      check(what->done[r] || impatient > 0, "a call fails by one that comes after it");
      check(what->done[r] || what->failure[r].word() == abort, "ranks name different causes");
      check(what->done[r] || what->failure[r].kind == FailureKind::interrupted,
            "a call fails by one that comes after it");
      text += what->done[r] ? "+" : std::to_string(what->failure[r].culprit);
    }
    outcome(text);
  };
  return scenario;
}

// One rank has called something else.
Scenario mismatch(int n) {
  auto *world = new World(n);
  auto *what = new Outcome;
  Scenario scenario;
  for (int r = 0; r < n; ++r) {
    const auto plan = make_plan("naive", n, r, {1, true, false}, r == 0 ? 1 : 2);
    scenario.threads.push_back([=] {
      what->input[r][0] = Element(r);
      what->done[r] = call((*world)[r], plan, what->input[r], what->output[r],
                           Waits::looking, &what->failure[r]);
      check(!what->done[r] || r != 0, "calls differ, and one of them succeeds");
    });
  }
  scenario.ended = [=] {
    const std::uint64_t abort = (*world)[0].layout().control().abort.load();
    for (int r = 0; r < n; ++r)
      check(!what->done[r] && what->failure[r].word() == abort,
            "ranks name different causes");
  };
  return scenario;
}

// The write guard alone: all others write to a buffer of rank 0, which aborts.
Scenario guard(int n) {
  auto *world = new World(n);
  auto *buffer = new Element[3]();
  name(buffer, "buffer");
  Scenario scenario;
  scenario.threads.push_back([=] {
    Comm &comm = (*world)[0];
    comm.abort({FailureKind::interrupted, 0, 0, 1});
    comm.zero_copy().give_up(1);
    for (int r = 1; r < n; ++r)
      buffer[r] = 77;
  });
  for (int r = 1; r < n; ++r)
    scenario.threads.push_back([=] {
      for (int times = 0; times < 2; ++times) {
        const ZeroCopy::WriteGuard touch((*world)[r].zero_copy(), 1, true);
        if (touch.allowed())
          buffer[r] = Element(r);
      }
    });
  return scenario;
}

} // namespace

void add_failures(Scenarios &all) {
  const Cut one{1, false, false}, exposed{1, false, true};
  all["one aborts"] = [=](int n) { return aborting(n, 1, one); };
  all["several abort"] = [=](int n) { return aborting(n, 2, one); };
  all["one aborts, exposed"] = [=](int n) { return aborting(n, 1, exposed); };
  all["several abort, exposed"] = [=](int n) { return aborting(n, 2, exposed); };
  all["one aborts, read by others"] = [=](int n) {
    return aborting(n, 1, exposed, "gather");
  };
  all["one has closed"] = [](int n) { return closed_later(n, 0); };
  all["one aborts, one has closed"] = [](int n) { return closed_later(n, 1); };
  all["mismatch"] = [](int n) { return mismatch(n); };
  all["guard"] = [](int n) { return guard(n); };
}

} // namespace model

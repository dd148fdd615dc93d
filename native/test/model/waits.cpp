// Sleeping and waking. A wake can be missed, by design, and then costs the time of a short sleep.
// So with sleeps that time out no rank may wait for ever; without timeouts no rank may wait for
// ever under sequential consistency.

#include "memory/wait.hpp"
#include "test/model/world.hpp"

namespace model {

using namespace unisono;

namespace {

constexpr WaitPolicy none{0, 0, 500'000};

// All but rank 0 sleep until it has advanced, each in the loop of Comm::drive.
Scenario sleeping(int n) {
  auto *world = new World(n);
  Scenario scenario;
  scenario.threads.push_back([=] {
    const Layout &layout = (*world)[0].layout();
    layout.block(0).progress.store(1, std::memory_order_release);
    wake_sleepers(layout, std::size_t(n));
  });
  for (int r = 1; r < n; ++r)
    scenario.threads.push_back([=] {
      Comm &comm = (*world)[r];
      const Layout &layout = comm.layout();
      Backoff backoff(none, layout.control(), layout.block(std::size_t(r)).asleep,
                      comm.oversubscription);
      const auto there = [&] {
        return layout.block(0).progress.load(std::memory_order_acquire) == 1;
      };
      while (!there())
        backoff.pause(there);
    });
  return scenario;
}

struct Buffers {
  Element input[3][3] = {}, output[3][3] = {};
};

// A call as the product drives it, with ranks that sleep as soon as they have to wait.
Scenario driven(int n) {
  auto *world = new World(n);
  auto *buffers = new Buffers;
  Scenario scenario;
  for (int r = 0; r < n; ++r) {
    const auto plan = make_plan("direct", n, r, {1, false, true});
    scenario.threads.push_back([=] {
      for (Element &e : buffers->input[r])
        e = Element(r + 1);
      Comm &comm = (*world)[r];
      Collective *op = comm.begin_inline(plan, buffers->input[r], buffers->output[r], 0);
      check(comm.drive(*op, none, nullptr) == Task::succeeded, "a call fails");
      for (int e = 0; e < n; ++e)
        check(buffers->output[r][e] == Element(n * (n + 1) / 2), "a result is wrong");
      comm.end_inline();
    });
  }
  return scenario;
}

} // namespace

void add_waits(Scenarios &all) {
  all["sleeping"] = [](int n) { return sleeping(n); };
  all["driven"] = [](int n) { return driven(n); };
}

} // namespace model

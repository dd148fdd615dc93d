// Tests of the explorer: small programs whose outcomes under C++ are known, and random
// programs, for which the reduced search must find what the full search finds.

#include <atomic>
#include <cstdlib>
#include <random>
#include <string>

#include "test/model/scenarios.hpp"

namespace model {

namespace {

using std::memory_order;
constexpr auto relaxed = std::memory_order_relaxed, acquire = std::memory_order_acquire,
               release = std::memory_order_release, acq_rel = std::memory_order_acq_rel,
               seq_cst = std::memory_order_seq_cst;

struct Words {
  std::atomic<std::uint64_t> x = 0, y = 0;
  std::uint64_t plain = 0;
  std::uint64_t r[6] = {};
};

using Body = std::function<void(Words &)>;

// What the threads read, as the outcome.
Scenario litmus(const std::vector<Body> &bodies, int results) {
  auto *words = new Words;
  Scenario scenario;
  for (const Body &body : bodies)
    scenario.threads.push_back([words, body] { body(*words); });
  scenario.ended = [words, results] {
    std::string text;
    for (int i = 0; i < results; ++i)
      text += std::to_string(words->r[i]);
    outcome(text);
  };
  return scenario;
}

Scenario store_buffering(memory_order store, memory_order load, bool fence) {
  return litmus({[=](Words &w) {
                   w.x.store(1, store);
                   if (fence)
                     std::atomic_thread_fence(seq_cst);
                   w.r[0] = w.y.load(load);
                 },
                 [=](Words &w) {
                   w.y.store(1, store);
                   if (fence)
                     std::atomic_thread_fence(seq_cst);
                   w.r[1] = w.x.load(load);
                 }},
                2);
}

Scenario message(memory_order store, memory_order load, bool fences) {
  return litmus({[=](Words &w) {
                   w.x.store(1, relaxed);
                   if (fences)
                     std::atomic_thread_fence(release);
                   w.y.store(1, store);
                 },
                 [=](Words &w) {
                   w.r[0] = w.y.load(load);
                   if (fences)
                     std::atomic_thread_fence(acquire);
                   w.r[1] = w.x.load(relaxed);
                 }},
                2);
}

// Two writers, and two readers that may disagree on their order.
Scenario independent(memory_order store, memory_order load) {
  return litmus({[=](Words &w) { w.x.store(1, store); }, [=](Words &w) { w.y.store(1, store); },
                 [=](Words &w) {
                   w.r[0] = w.x.load(load);
                   w.r[1] = w.y.load(load);
                 },
                 [=](Words &w) {
                   w.r[2] = w.y.load(load);
                   w.r[3] = w.x.load(load);
                 }},
                4);
}

// Store and load on both sides, as in WriteGuard and ZeroCopy::give_up: one side by a comparison
// and a fence.
Scenario store_and_look(memory_order order) {
  return litmus({[=](Words &w) {
                   w.x.store(1, order == seq_cst ? seq_cst : release);
                   w.r[0] = w.y.load(order == seq_cst ? seq_cst : acquire);
                 },
                 [=](Words &w) {
                   std::uint64_t none = 0;
                   w.y.compare_exchange_strong(none, 1, acq_rel);
                   std::atomic_thread_fence(seq_cst);
                   w.r[1] = w.x.load(order == seq_cst ? seq_cst : acquire);
                 }},
                2);
}

Scenario coherence() {
  return litmus({[](Words &w) {
                   w.x.store(1, relaxed);
                   w.x.store(2, relaxed);
                 },
                 [](Words &w) {
                   w.r[0] = w.x.load(relaxed);
                   w.r[1] = w.x.load(relaxed);
                 }},
                2);
}

// A release sequence: the middle operation is relaxed and continues the release of the first.
Scenario sequence(bool by_store) {
  return litmus({[](Words &w) {
                   w.plain = 1;
                   w.x.store(1, release);
                 },
                 [=](Words &w) {
                   if (by_store && w.x.load(relaxed) == 1)
                     w.x.store(2, relaxed);
                   else if (!by_store)
                     w.x.fetch_add(1, relaxed);
                 },
                 [](Words &w) {
                   w.r[0] = w.x.load(acquire);
                   w.r[1] = w.r[0] == 2 ? w.plain : 0;
                 }},
                2);
}

Scenario adding() {
  const Body add = [](Words &w) {
    for (int i = 0; i < 2; ++i)
      w.x.fetch_add(1, relaxed);
  };
  auto scenario = litmus({add, add, add}, 0);
  return scenario;
}

// A thread that waits for a store that never happens.
Scenario waiting(bool comes) {
  return litmus({[](Words &w) {
                   while (w.x.load(acquire) == 0)
                     await();
                   w.r[0] = w.plain;
                 },
                 [=](Words &w) {
                   w.plain = 7;
                   if (comes)
                     w.x.store(1, release);
                 }},
                1);
}

// A few random operations for each of two or three threads.
Scenario random_program(unsigned seed) {
  std::minstd_rand random(seed * 7919 + 1);
  const auto pick = [&](unsigned n) { return unsigned(random() >> 8) % n; };
  const unsigned threads = 2 + pick(2), length = threads == 2 ? 4 : 3;
  auto *words = new Words;
  auto *results = new std::uint64_t[16]();
  Scenario scenario;
  for (unsigned t = 0; t < threads; ++t) {
    struct Step {
      unsigned kind, which;
      memory_order load, store, both;
    };
    std::vector<Step> steps;
    for (unsigned i = 0; i < length; ++i) {
      constexpr memory_order loads[] = {relaxed, acquire, seq_cst};
      constexpr memory_order stores[] = {relaxed, release, seq_cst};
      constexpr memory_order both[] = {relaxed, acq_rel, seq_cst};
      const unsigned strength = pick(3);
      steps.push_back({pick(8), pick(2), loads[strength], stores[strength], both[strength]});
    }
    scenario.threads.push_back([=] {
      unsigned at = t * 4;
      for (const Step &step : steps) {
        auto &word = step.which == 0 ? words->x : words->y;
        const std::uint64_t value = ++at;
        std::uint64_t &result = results[at - 1];
        if (step.kind < 3)
          result = word.load(step.load);
        else if (step.kind < 6)
          word.store(value, step.store);
        else if (step.kind == 6) {
          std::uint64_t none = 0;
          result = word.compare_exchange_strong(none, value, step.both) ? 99 : none;
        } else if (step.which == 0)
          result = word.fetch_add(100, step.both);
        else
          std::atomic_thread_fence(step.both);
      }
    });
  }
  scenario.ended = [=] {
    std::string text = std::to_string(words->x.load()) + "," + std::to_string(words->y.load());
    for (int i = 0; i < 12; ++i)
      text += "," + std::to_string(results[i]);
    outcome(text);
  };
  return scenario;
}

} // namespace

void add_litmus(Scenarios &all) {
  all["store buffering, release"] = [](int) { return store_buffering(release, acquire, false); };
  all["store buffering, seq_cst"] = [](int) { return store_buffering(seq_cst, seq_cst, false); };
  all["store buffering, fences"] = [](int) { return store_buffering(relaxed, relaxed, true); };
  all["store and look, seq_cst"] = [](int) { return store_and_look(seq_cst); };
  all["store and look, acq_rel"] = [](int) { return store_and_look(acq_rel); };
  all["message, relaxed"] = [](int) { return message(relaxed, relaxed, false); };
  all["message, release"] = [](int) { return message(release, acquire, false); };
  all["message, release only"] = [](int) { return message(release, relaxed, false); };
  all["message, fences"] = [](int) { return message(relaxed, relaxed, true); };
  all["independent, acquire"] = [](int) { return independent(release, acquire); };
  all["independent, seq_cst"] = [](int) { return independent(seq_cst, seq_cst); };
  all["coherence"] = [](int) { return coherence(); };
  all["release sequence, by adding"] = [](int) { return sequence(false); };
  all["release sequence, by storing"] = [](int) { return sequence(true); };
  all["adding"] = [](int) { return adding(); };
  all["waiting"] = [](int) { return waiting(true); };
  all["waiting in vain"] = [](int) { return waiting(false); };
  all["random"] = [](int seed) { return random_program(unsigned(seed)); };
}

} // namespace model

// Collectives that succeed: no value is read before it is written, and no buffer changes while
// other ranks read or write it. The explorer finds a violation as a race.

#include "test/model/world.hpp"

namespace model {

using namespace unisono;

namespace {

constexpr int most_ranks = 3, most_elements = 12;

struct Arrays {
  Element input[most_ranks][most_elements] = {};
  Element output[most_ranks][most_elements] = {};
};

Element value(int call, int rank, int at) {
  return Element(call * 1000 + (rank + 1) * 100 + at);
}

struct Part { // one call of a rank: the elements of all ranks are summed or gathered
  std::string name;
  Cut cut;
};

Scenario calls(int n, const std::vector<Part> &parts) {
  auto *world = new World(n);
  auto *buffers = new Arrays;
  name(buffers->input, "inputs");
  name(buffers->output, "outputs");
  Scenario scenario;
  for (int r = 0; r < n; ++r) {
    auto *plans = new std::vector<std::shared_ptr<const Plan>>;
    for (std::size_t i = 0; i < parts.size(); ++i)
      plans->push_back(make_plan(parts[i].name, n, r, parts[i].cut, i + 1));
    scenario.threads.push_back([=] {
      Element *input = buffers->input[r], *output = buffers->output[r];
      for (std::size_t i = 0; i < parts.size(); ++i) {
        const auto &plan = (*plans)[i];
        const bool gathers = parts[i].name == "gather", casts = parts[i].name == "broadcast";
        const int chunks = int(plan->size.size()), pieces = parts[i].cut.pieces;
        for (int e = 0; e < chunks * pieces; ++e)
          input[e] = value(int(i), r, e);
        check(call((*world)[r], plan, input, output), "a call fails that nothing stands against");
        for (int e = 0; e < chunks * pieces; ++e) {
          Element wanted = gathers ? value(int(i), e / pieces, e % pieces) : 0;
          for (int q = 0; q < (casts ? 1 : n) && !gathers; ++q)
            wanted += value(int(i), q, e);
          check(output[e] == wanted, "a result is wrong");
        }
        // The rank may use its buffers again.
        for (int e = 0; e < chunks * pieces; ++e)
          input[e] = output[e] = 0;
      }
    });
  }
  return scenario;
}

} // namespace

void add_calls(Scenarios &all) {
  const Cut header{1, true, false}, three{3, false, false}, one{1, false, false},
      exposed{1, false, true}, exposed_twice{2, false, true};
  // Other ranks read from the header: the third call uses the header of the first again.
  all["arrival"] = [=](int n) {
    return calls(n, {{"naive", header}, {"naive", header}, {"naive", header}});
  };
  // Three generations in two halves.
  all["windows"] = [=](int n) { return calls(n, {{"direct", three}}); };
  // Only the rank that writes the window again waits for its readers.
  all["windows, one way"] = [=](int n) { return calls(n, {{"broadcast", three}}); };
  // The next call has other readers.
  all["windows, then others"] = [=](int n) {
    return calls(n, {{"direct", one}, {"gather", one}, {"naive", one}});
  };
  // Exposed buffers: other ranks read them in place, and write them in place.
  all["exposed"] = [=](int n) { return calls(n, {{"direct", exposed}, {"gather", exposed}}); };
  all["exposed, in pieces"] = [=](int n) { return calls(n, {{"direct", exposed_twice}}); };
}

} // namespace model

// Explores one scenario, given on the command line as name=value, and prints the report as JSON.

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <sys/single_threaded.h>

#include "test/model/scenarios.hpp"

using namespace model;

namespace {

std::string quoted(const std::string &text) {
  std::string all = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\')
      all += '\\';
    all += c;
  }
  return all + "\"";
}

template <class Texts> void print_list(const char *name, const Texts &texts) {
  std::printf("\"%s\": [", name);
  const char *comma = "";
  for (const auto &text : texts) {
    std::printf("%s%s", comma, quoted(text).c_str());
    comma = ", ";
  }
  std::printf("], ");
}

void print(const Report &report) {
  const auto number = [](const char *name, std::uint64_t value) {
    std::printf("\"%s\": %llu, ", name, static_cast<unsigned long long>(value));
  };
  std::printf("{");
  number("executions", report.executions);
  number("complete", report.complete);
  number("waiting", report.waiting);
  number("pruned", report.pruned);
  number("timeouts", report.timeouts);
  number("events", report.events);
  number("longest", report.longest);
  print_list("trace", report.trace);
  print_list("outcomes", report.outcomes);
  std::printf("\"ordered\": [");
  const char *comma = "";
  for (const auto &[site, order] : report.ordered) {
    std::printf("%s%llu", comma, static_cast<unsigned long long>(site));
    comma = ", ";
  }
  std::printf("], \"all\": %s, \"error\": %s}\n", report.all ? "true" : "false",
              quoted(report.error).c_str());
}

} // namespace

int main(int argc, char **argv) {
  __libc_single_threaded = 0; // so that shared pointers count with atomics
  Scenarios all;
  add_litmus(all);
  add_calls(all);
  add_failures(all);
  add_waits(all);
  add_messages(all);
  Options options;
  std::string name;
  int number = 2;
  for (int a = 1; a < argc; ++a) {
    const std::string text = argv[a];
    const std::size_t equals = text.find('=');
    const std::string key = text.substr(0, equals);
    const std::string value = equals == std::string::npos ? "" : text.substr(equals + 1);
    const auto figure = std::strtoull(value.c_str(), nullptr, 10);
    if (key == "scenario")
      name = value;
    else if (key == "programs")
      read_programs(value.c_str());
    else if (key == "number")
      number = int(figure);
    else if (key == "reduce")
      options.reduce = figure != 0;
    else if (key == "newest")
      options.newest = figure != 0;
    else if (key == "timeouts")
      options.timeouts = figure != 0;
    else if (key == "retries")
      options.retries = unsigned(figure);
    else if (key == "most")
      options.most = figure;
    else if (key == "weakened")
      options.weakened = figure;
    else if (key == "fault")
      options.fault = value;
    else
      return 2;
  }
  if (!all.contains(name))
    return 2;
  print(explore(options, [&] { return all[name](number); }));
}

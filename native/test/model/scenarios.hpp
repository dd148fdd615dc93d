// The scenarios, by name; the number is the number of ranks, or a seed.

#pragma once

#include <functional>
#include <map>
#include <string>

#include "test/model/explorer.hpp"

namespace model {

using Scenarios = std::map<std::string, std::function<Scenario(int)>>;

void add_litmus(Scenarios &all);
void add_calls(Scenarios &all);
void add_failures(Scenarios &all);
void add_waits(Scenarios &all);
void add_messages(Scenarios &all);

// The programs of collectives that scenarios use: world.hpp.
void read_programs(const char *path);

} // namespace model

// How tests arm failpoints (support/failpoint.hpp).
//
// A specification is "name:hit:action,...", from `_native.arm_failpoints` or from the variable
// UNISONO_FAILPOINTS: at the hit-th passage of `name` the action is done once, or at every
// passage if hit is *:
//
//   kill, stop        this process
//   sleep=MS          for so many milliseconds
//   jitter=US         at one passage of eight, for a random time of up to so many microseconds
//   short=BYTES       where bytes move: at most so many, and none at about every second try
//   cut=SEED          the same with random numbers from a seed, most of them small

#pragma once

#include <string>
#include <vector>

namespace unisono {

void arm_failpoints(const std::string &spec);
std::vector<std::string> failpoint_names();
std::vector<std::string> device_names(); // in kernels of emulated devices
std::vector<std::string> fabric_names(); // of other fabrics than sockets
std::vector<std::string> wait_names(); // passed only by ranks that wait
std::vector<std::string> page_names(); // where pages are replaced
std::vector<std::string> cut_names(); // where bytes move

} // namespace unisono

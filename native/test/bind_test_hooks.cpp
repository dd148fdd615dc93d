// What tests need of the core and the product does not: failpoints, the fuzzer of frames,
// frames, streams and lifelines by themselves, and the tables of programs. Compiled only with
// UNISONO_TEST_HOOKS.

#include "test/bind_test_hooks.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "test/crash_stack.hpp"
#include "test/failpoint.hpp"
#include "test/frame_fuzz.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

nb::typed<nb::dict, nb::str, int> fuzz(std::uint64_t seed, std::uint64_t count) {
  FuzzCounts counts;
  {
    nb::gil_scoped_release unlocked;
    counts = fuzz_frames(seed, count);
  }
  nb::dict found;
  found["streams"] = counts.streams;
  found["undamaged"] = counts.undamaged;
  found["frames"] = counts.frames;
  found["wrong"] = counts.wrong;
  found["cut off"] = counts.cut_off;
  for (std::size_t i = 0; i < num_flaws; ++i)
    found[flaw_name(Flaw(i))] = counts.flaws[i];
  return found;
}

} // namespace

void bind_test_hooks(nb::module_ &m) {
  m.def("arm_failpoints", &arm_failpoints, nb::arg("spec"));
  m.def("failpoint_names", &failpoint_names);
  m.def("byte_limit_names", &cut_names);
  m.def("write_stack_on_crash", &write_stack_on_crash, nb::arg("fd"));
  m.def("fuzz_frames", &fuzz, nb::arg("seed"), nb::arg("count"));
  bind_wire(m);
  bind_stream(m);
  bind_device(m);
  bind_emulated(m);
  bind_forge_ucx(m);
  bind_program_tables(m);
}

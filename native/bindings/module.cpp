// The Python module. Nothing here decides anything: arrays are unpacked, the work is done
// without the interpreter lock, and plain numbers are returned.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <string>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind.hpp"
#include "device/sources.hpp"
#include "kernels/reduce.hpp"
#include "verify/step_runner.hpp"

#ifdef UNISONO_TEST_HOOKS
#include "test/bind_test_hooks.hpp"
#endif

namespace nb = nanobind;
using namespace unisono;

namespace {

template <class T> using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::device::cpu>;
using Ints = Array2<std::int64_t>;
using Bools = Array2<bool>;

template <class T> Plane<T> plane(const Array2<T> &array) {
  return {array.data(), array.stride(0), array.stride(1)};
}

template <class T> bool same_shape(const Array2<T> &array, const Ints &model) {
  return array.shape(0) == model.shape(0) && array.shape(1) == model.shape(1);
}

// Runs the steps of one schedule on a state that Python owns and this object keeps alive.
template <class Domain> class Runner {
public:
  using Value = typename Domain::Value;
  using State = nb::ndarray<Value, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

  Runner(State state, Domain domain, World world)
      : state_(state), steps_(domain, world, state.data()) {
    const auto n = static_cast<std::size_t>(world.n);
    if (world.n < 1 || world.lo < 0 || world.hi < world.lo || state.size() % n != 0 ||
        state.size() / n != static_cast<std::size_t>(world.hi - world.lo))
      throw nb::value_error("state must have (hi - lo) * n slots");
    if (world.may_rename && (world.lo != 0 || world.hi != world.num_slots))
      throw nb::value_error("where chunks may be renamed, the state must hold all");
  }

  std::int64_t run(const Ints &src, const Ints &dst, const Ints &chunk,
                   const std::optional<Ints> &into, const std::optional<Bools> &mask,
                   bool all_reduce) {
    if (!same_shape(src, chunk) || !same_shape(dst, chunk) ||
        (into && !same_shape(*into, chunk)) || (mask && !same_shape(*mask, chunk)))
      throw nb::value_error("the arrays of a step must have one shape");
    Transfers step{chunk.shape(0), chunk.shape(1), plane(src), plane(dst), plane(chunk),
                   into ? plane(*into) : Plane<std::int64_t>{},
                   mask ? plane(*mask) : Plane<bool>{}, all_reduce};
    nb::gil_scoped_release unlocked;
    return steps_.run(step);
  }

private:
  State state_;
  StepRunner<Domain> steps_;
};

template <class Domain> auto bind(nb::module_ &m, const char *name) {
  using R = Runner<Domain>;
  return nb::class_<R>(m, name).def(
      "run", &R::run, nb::arg("src").noconvert(), nb::arg("dst").noconvert(),
      nb::arg("chunk").noconvert(), nb::arg("into").noconvert().none(),
      nb::arg("mask").noconvert().none(), nb::arg("all_reduce"));
}

using Bytes = nb::ndarray<std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes =
    nb::ndarray<const std::uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

void reduce(Bytes out, const std::vector<ConstBytes> &sources, std::size_t itemsize,
            unsigned dtype, unsigned op, std::uint32_t divisor,
            std::size_t instruction_set) {
  const bool known = dtype < static_cast<unsigned>(DType::count) &&
                     op < static_cast<unsigned>(Op::count);
  if (!known || itemsize != item_size(static_cast<DType>(dtype)))
    throw nb::value_error("reduce: no such type or operation, or of another size");
  if (sources.empty() || divisor == 0 || out.size() % itemsize != 0)
    throw nb::value_error("reduce: nothing to reduce, or a size that does not fit");
  std::vector<const void *> data;
  for (const ConstBytes &source : sources) {
    if (source.size() != out.size())
      throw nb::value_error("reduce: all arrays must have one size");
    data.push_back(source.data());
  }
  const Kernel kernel =
      find_kernel(static_cast<DType>(dtype), static_cast<Op>(op), instruction_set);
  if (kernel == nullptr)
    throw nb::value_error("reduce: no such operation for this type");
  nb::gil_scoped_release unlocked;
  kernel(out.data(), data.data(), data.size(), out.size() / itemsize, divisor);
}

nb::typed<nb::dict, nb::str, nb::str> device_sources() {
  nb::dict found;
  for (const device::SourceFile &file : device::source_files())
    found[file.name] = file.text;
  return found;
}

#ifndef UNISONO_TEST_HOOKS
[[noreturn]] void missing_attribute(const std::string &name) {
  throw nb::attribute_error(
      ("unisono._native has no " + name + "; what only tests use (failpoints, frames by "
       "themselves) is there in editable installs, and with -DUNISONO_TEST_HOOKS=ON").c_str());
}
#endif

} // namespace

NB_MODULE(_native, m) {
  // A thread that is stopped by the end of the interpreter never releases what it holds;
  // that is no leak to report.
  nb::set_leak_warnings(false);
  m.doc() = "unisono's native core: the streaming verifier, the reductions, the engine, the wire";
  bind_tls(m);
  bind_wires(m);
  bind_program(m);
  bind_lower(m);
  bind_engine(m);
  bind_work(m);
  bind_comm(m);
  bind_simulate(m);
  bind_codec(m);
  bind_cuda(m);
  m.def("instruction_sets", &instruction_sets);
  m.def("reduce", &reduce, nb::arg("out").noconvert(), nb::arg("sources"), nb::arg("itemsize"),
        nb::arg("dtype"), nb::arg("op"), nb::arg("divisor"),
        nb::arg("instruction_set") = 0);
  m.def("device_sources", &device_sources);
#ifdef UNISONO_TEST_HOOKS
  m.attr("TEST_HOOKS") = true;
  bind_test_hooks(m);
#else
  m.attr("TEST_HOOKS") = false;
  m.def("__getattr__", &missing_attribute, nb::arg("name"));
#endif
  using Values = Runner<Modular>;
  bind<Modular>(m, "ValueRunner")
      .def(
          "__init__",
          [](Values *self, Values::State state, std::uint64_t modulus, std::int64_t n,
             std::int64_t num_slots, std::int64_t lo, std::int64_t hi, bool may_rename) {
            new (self) Values(state, Modular{modulus}, {n, num_slots, lo, hi, may_rename});
          },
          nb::arg("state"), nb::arg("modulus"), nb::arg("n"), nb::arg("num_slots"),
          nb::arg("lo"), nb::arg("hi"), nb::arg("may_rename"));
  using Marks = Runner<Presence>;
  bind<Presence>(m, "PresenceRunner")
      .def(
          "__init__",
          [](Marks *self, Marks::State state, std::int64_t n, std::int64_t num_slots,
             std::int64_t lo, std::int64_t hi, bool may_rename) {
            new (self) Marks(state, Presence{}, {n, num_slots, lo, hi, may_rename});
          },
          nb::arg("state"), nb::arg("n"), nb::arg("num_slots"), nb::arg("lo"),
          nb::arg("hi"), nb::arg("may_rename"));
}

// Bindings of the event simulation: arrays in, arrays out.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <optional>
#include <vector>

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "bindings/bind.hpp"
#include "simulate/simulator.hpp"

namespace nb = nanobind;
using namespace unisono::sim;

namespace {

template <class T>
using Array = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints = Array<std::int64_t>;
using Floats = Array<double>;

template <class T> std::vector<T> copied(const Array<T> &array) {
  return {array.data(), array.data() + array.size()};
}

// A NumPy array that owns `values`.
template <class T> auto handed_over(std::vector<T> &&values) {
  auto *kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
  return nb::ndarray<nb::numpy, T, nb::ndim<1>>(kept->data(), {kept->size()}, owner);
}

template <class T, class Get> auto column(const Simulator &self, Get get) {
  std::vector<T> found;
  found.reserve(self.messages().size());
  for (const Message &m : self.messages())
    found.push_back(static_cast<T>(get(m)));
  return handed_over(std::move(found));
}

void construct(Simulator *self, std::int64_t n, Floats sizes, Floats bandwidth, Ints twins,
               double overhead, double encode, double decode, double reduce, double ratio,
               double duplex, bool streams) {
  const auto slots = static_cast<std::int64_t>(sizes.size());
  if (n < 1 || n >= std::int64_t{1} << 31 || slots < 1)
    throw nb::value_error("simulate: expected ranks and slots");
  const auto links = static_cast<std::int64_t>(bandwidth.size());
  const std::vector<std::int64_t> other = copied(twins);
  for (const std::int64_t twin : other)
    if (twin < -1 || twin >= links)
      throw nb::value_error("simulate: a link's other direction is none of the links");
  if (!other.empty() && static_cast<std::int64_t>(other.size()) != links)
    throw nb::value_error("simulate: expected another direction for every link, or none");
  new (self) Simulator(n, slots, copied(sizes), copied(bandwidth), other,
                       Costs{overhead, encode, decode, reduce, ratio, streams, duplex});
}

void add(Simulator &self, const Ints &src, const Ints &dst, const Ints &chunk,
         const Ints &into, const Array<bool> &reduces) {
  const std::size_t count = src.size();
  if (dst.size() != count || chunk.size() != count || into.size() != count ||
      reduces.size() != count)
    throw nb::value_error("simulate: the arrays of a step must have one size");
  std::vector<Transfer> step(count);
  for (std::size_t i = 0; i < count; ++i)
    step[i] = {src.data()[i], dst.data()[i], chunk.data()[i], into.data()[i],
               reduces.data()[i]};
  nb::gil_scoped_release unlocked;
  if (!self.add(step)) {
    nb::gil_scoped_acquire locked;
    throw nb::value_error("simulate: a transfer is out of range");
  }
}

void know(Simulator &self, const Ints &first, const Ints &links, const Floats &latency) {
  if (first.size() == 0 || !self.know(copied(first), copied(links), copied(latency)))
    throw nb::value_error("simulate: paths do not fit what was asked");
}

std::int64_t run(Simulator &self, const Floats &begin, std::int64_t n) {
  if (begin.size() != static_cast<std::size_t>(n) || !self.unknown().empty())
    throw nb::value_error("simulate: a start for each rank, and all paths, come first");
  const std::vector<double> at = copied(begin);
  nb::gil_scoped_release unlocked;
  return self.run(at);
}

} // namespace

void bind_simulate(nb::module_ &m) {
  nb::class_<Simulator>(m, "Simulator")
      .def("__init__", &construct, nb::arg("n"), nb::arg("sizes"), nb::arg("bandwidth"),
           nb::arg("twins"), nb::arg("overhead"), nb::arg("encode"), nb::arg("decode"),
           nb::arg("reduce"), nb::arg("ratio"), nb::arg("duplex"), nb::arg("streams"))
      .def("add", &add, nb::arg("src"), nb::arg("dst"), nb::arg("chunk"), nb::arg("into"),
           nb::arg("reduces"))
      .def("unknown",
           [](const Simulator &self) {
             return handed_over(std::vector<std::int64_t>(self.unknown()));
           })
      .def("know", &know, nb::arg("first"), nb::arg("links"), nb::arg("latency"))
      .def("run", &run, nb::arg("begin"), nb::arg("n"))
      .def("edges", [](const Simulator &self) { return handed_over(self.edges()); })
      .def("carried",
           [](const Simulator &self) {
             return handed_over(std::vector<double>(self.carried()));
           })
      .def("finished",
           [](const Simulator &self) {
             return handed_over(std::vector<double>(self.finished()));
           })
      .def("messages", [](const Simulator &self) {
        return nb::make_tuple(
            column<std::int64_t>(self, [](const Message &x) { return x.step; }),
            column<std::int64_t>(self, [](const Message &x) { return x.src; }),
            column<std::int64_t>(self, [](const Message &x) { return x.dst; }),
            column<double>(self, [](const Message &x) { return x.nbytes; }),
            column<double>(self, [](const Message &x) { return x.start; }),
            column<double>(self, [](const Message &x) { return x.end; }),
            column<std::int64_t>(self, [](const Message &x) { return x.cause; }));
      });
}

// The Python face of what travels between hosts: frames, their checks, and who lives.
//
// Tests compare them with a reference in plain Python, and benchmarks/wire.py measures them; the
// engine uses them from native code alone.

#include "test/bind_test_hooks.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>

#include "bindings/bind.hpp"
#include "bindings/wire_holder.hpp"
#include "net/lifeline.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

// The bytes of anything that has some, one after the other.
class View {
public:
  explicit View(nb::handle data) {
    if (PyObject_GetBuffer(data.ptr(), &view_, PyBUF_SIMPLE) != 0)
      throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&view_); }
  View(const View &) = delete;
  View &operator=(const View &) = delete;
  const void *data() const { return view_.buf; }
  std::size_t size() const { return std::size_t(view_.len); }

private:
  Py_buffer view_;
};

FrameHeader header_of(const nb::bytes &bytes) {
  FrameHeader header;
  if (bytes.size() != sizeof header)
    throw nb::value_error("a header has 64 bytes");
  std::memcpy(&header, bytes.c_str(), sizeof header);
  return header;
}

std::uint32_t checksum(nb::handle data, std::uint32_t seed, std::size_t way) {
  static const std::size_t num_ways = crc32c_ways().size();
  const View view(data);
  if (way >= num_ways)
    throw nb::value_error("crc32c: this machine has no such way");
  nb::gil_scoped_release unlocked;
  return crc32c_by(way, view.data(), view.size(), seed);
}

nb::bytes sealed(Seal &seal, nb::handle payload, std::uint16_t kind, std::uint16_t flags,
                 std::uint64_t call, std::uint64_t fingerprint, std::uint32_t piece,
                 std::uint32_t message) {
  const View view(payload);
  if (view.size() > 0xffffffff)
    throw nb::value_error("the payload of a frame has less than 4 GiB");
  FrameHeader header;
  header.kind = FrameKind(kind);
  header.flags = flags;
  header.length = std::uint32_t(view.size());
  header.call = call;
  header.fingerprint = fingerprint;
  header.piece = piece;
  header.message = message;
  seal.seal(header, view.data());
  return nb::bytes(&header, sizeof header);
}

// A reader together with the place for its payloads.
struct Reader {
  Reader(const Key &key, std::uint32_t epoch, std::size_t limit)
      : place(limit), reader(Seal(key, epoch), place) {}

  nb::list feed(nb::handle data) {
    const View view(data);
    std::span<const std::byte> left(static_cast<const std::byte *>(view.data()), view.size());
    nb::list frames;
    while (reader.take(left))
      frames.append(
          nb::make_tuple(nb::bytes(&reader.header(), sizeof(FrameHeader)),
                         nb::bytes(reader.payload().data(), reader.payload().size())));
    return frames;
  }

  std::vector<std::byte> place;
  FrameReader reader;
};

// A lifeline whose events wait until Python asks for them.
class Listener {
public:
  Listener(std::size_t rank, std::vector<Lifeline::Connection> connections,
           Lifeline::Options options)
      : lifeline(rank, std::move(connections), options, [this](const Event &event) {
          std::lock_guard lock(mutex_);
          heard_.push_back(event);
        }) {}

  nb::list events() {
    std::vector<Event> heard;
    if (!lifeline.forked()) { // where another thread may have held the lock
      std::lock_guard lock(mutex_);
      heard.swap(heard_);
    }
    nb::list all;
    for (const Event &e : heard)
      all.append(nb::make_tuple(event_name(e.kind), e.rank, cause_name(e.cause), e.reporter,
                                e.comm, e.word));
    return all;
  }

private:
  std::mutex mutex_;
  std::vector<Event> heard_;

public:
  Lifeline lifeline; // last, so that its thread ends before what it writes to
};

Cause cause_called(const std::string &name) {
  for (std::size_t i = 0; i < num_causes; ++i)
    if (name == cause_name(Cause(i)))
      return Cause(i);
  throw nb::value_error("a lifeline: there is no such cause of a death");
}

void make_lifeline(Listener *self, std::size_t rank, const std::vector<WireHolder *> &wires,
                   const std::vector<std::pair<nb::bytes, nb::bytes>> &keys,
                   std::uint32_t epoch, std::int64_t beat_ms, std::int64_t limit_ms) {
  if (keys.size() != wires.size())
    throw nb::value_error("a lifeline: needs two keys, outgoing and incoming, for each rank");
  constexpr std::int64_t longest = 1'000'000'000; // eleven days
  if (beat_ms > longest || limit_ms > longest || beat_ms < 1 || limit_ms < 1)
    throw nb::value_error("a lifeline: beat_ms and limit_ms lie between 1 and 1000000000");
  std::vector<Lifeline::Connection> connections(wires.size());
  for (std::size_t r = 0; r < wires.size(); ++r)
    if (wires[r] != nullptr)
      connections[r] = {std::move(wires[r]->held()), key_of(keys[r].first),
                        key_of(keys[r].second)};
  new (self) Listener(rank, std::move(connections),
                      {epoch, beat_ms * 1'000'000, limit_ms * 1'000'000});
}

void bind_frames(nb::module_ &m) {
  m.def("crc32c", &checksum, nb::arg("data"), nb::arg("seed") = 0, nb::arg("way") = 0);
  m.def("crc32c_ways", &crc32c_ways);
  m.def(
      "siphash",
      [](const nb::bytes &key, nb::handle data) {
        const View view(data);
        return siphash(key_of(key), view.data(), view.size());
      },
      nb::arg("key"), nb::arg("data"));
  nb::class_<Seal>(m, "Seal")
      .def(
          "__init__",
          [](Seal *self, const nb::bytes &key, std::uint32_t epoch) {
            new (self) Seal(key_of(key), epoch);
          },
          nb::arg("key"), nb::arg("epoch"))
      .def("seal", &sealed, nb::arg("payload"), nb::arg("kind"), nb::arg("flags") = 0,
           nb::arg("call") = 0, nb::arg("fingerprint") = 0, nb::arg("piece") = 0,
           nb::arg("message") = 0)
      .def(
          "check",
          [](Seal &seal, const nb::bytes &header, std::size_t limit) {
            return flaw_name(seal.check(header_of(header), limit));
          },
          nb::arg("header"), nb::arg("limit"))
      .def(
          "check_payload",
          [](Seal &, const nb::bytes &header, nb::handle payload) {
            const View view(payload);
            const FrameHeader h = header_of(header);
            return h.length == view.size() && Seal::check_payload(h, view.data());
          },
          nb::arg("header"), nb::arg("payload"));
  nb::class_<Reader>(m, "FrameReader")
      .def(
          "__init__",
          [](Reader *self, const nb::bytes &key, std::uint32_t epoch, std::size_t limit) {
            new (self) Reader(key_of(key), epoch, limit);
          },
          nb::arg("key"), nb::arg("epoch"), nb::arg("limit"))
      .def("feed", &Reader::feed, nb::arg("data"))
      .def("flaw", [](const Reader &r) { return flaw_name(r.reader.flaw()); })
      .def("inside", [](const Reader &r) { return r.reader.inside(); });
}

} // namespace

void bind_wire(nb::module_ &m) {
  bind_frames(m);
  nb::class_<Listener>(m, "Lifeline")
      .def("__init__", &make_lifeline, nb::arg("rank"), nb::arg("wires"), nb::arg("keys"),
           nb::arg("epoch") = 0, nb::arg("beat_ms") = 1000, nb::arg("limit_ms") = 10000)
      .def("events", &Listener::events)
      .def(
          "announce_dead",
          [](Listener &l, std::size_t rank, const std::string &cause) {
            return l.lifeline.announce_dead(rank, cause_called(cause));
          },
          nb::arg("rank"), nb::arg("cause"))
      .def(
          "announce_failure",
          [](Listener &l, std::uint64_t comm, std::uint64_t word) {
            return l.lifeline.announce_failure(comm, word);
          },
          nb::arg("comm"), nb::arg("word"))
      .def("silence", [](const Listener &l) { return l.lifeline.silence(); })
      .def("forked", [](const Listener &l) { return l.lifeline.forked(); })
      .def("close", [](Listener &l) { l.lifeline.close(); },
           nb::call_guard<nb::gil_scoped_release>());
}

// The two ends of a stream between hosts, one step at a time.
//
// Tests decide when a lane's bytes are sent, read or lost; the engine uses streams from native
// code alone.

#include "test/bind_test_hooks.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <vector>

#include <nanobind/stl/vector.h>

#include "bindings/bind.hpp"
#include "bindings/wire_holder.hpp"
#include "net/stream.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

const char *io_name(Io io) {
  constexpr std::array<const char *, 7> names = {"done",     "blocked", "lost",     "corrupt",
                                                 "mismatch", "closed",  "truncated"};
  return names[std::size_t(io)];
}

template <class Stream>
void attach_all(Stream &stream, const std::vector<WireHolder *> &wires, bool takes_free_lane) {
  for (std::size_t i = 0; i < wires.size(); ++i)
    if (!stream.attach(i, wires.size(), wires[i]->held(), Key{}, 0, takes_free_lane))
      throw nb::value_error("a stream: 1 to 64 lanes");
}

class Sender {
public:
  Sender(const std::vector<WireHolder *> &wires, bool takes_free_lane) {
    attach_all(stream_, wires, takes_free_lane);
  }
  // Until so many bytes have been sent in all, as far as the lanes take them.
  const char *send(std::size_t bytes) {
    for (std::size_t some = 0; at_ < bytes; at_ += some) {
      some = std::min(frame_bytes, bytes - at_);
      if (!stream_.offer({}, nullptr, frame_.data(), some, at_))
        break;
      if (const Io io = stream_.flush(); io == Io::lost)
        return io_name(io);
    }
    const Io io = stream_.flush();
    return io_name(io == Io::done && at_ < bytes ? Io::blocked : io);
  }
  std::size_t sent() const { return at_; }

private:
  SendStream stream_;
  std::vector<std::byte> frame_ = std::vector<std::byte>(frame_bytes); // all are alike
  std::size_t at_ = 0;
};

class Receiver {
public:
  Receiver(const std::vector<WireHolder *> &wires, bool takes_free_lane) {
    attach_all(stream_, wires, takes_free_lane);
  }
  // What became of the next frame.
  const char *take() {
    std::size_t bytes = 0;
    return io_name(stream_.take_any(frame_.data(), frame_.size(), &bytes));
  }
  void reject() { stream_.reject(); }

private:
  ReceiveStream stream_;
  std::vector<std::byte> frame_ = std::vector<std::byte>(frame_bytes);
};

template <class End> auto bind_end(nb::module_ &m, const char *name) {
  return nb::class_<End>(m, name).def(nb::init<const std::vector<WireHolder *> &, bool>(),
                                      nb::arg("wires"), nb::arg("takes_free_lane"));
}

} // namespace

void bind_stream(nb::module_ &m) {
  bind_end<Sender>(m, "SendStream")
      .def("send", &Sender::send, nb::arg("bytes"))
      .def("sent", &Sender::sent);
  bind_end<Receiver>(m, "ReceiveStream")
      .def("take", &Receiver::take)
      .def("reject", &Receiver::reject);
}

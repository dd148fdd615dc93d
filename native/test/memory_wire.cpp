// A wire between two threads of one process: bytes in memory, and descriptors to sleep on.
//
// It shows what a transport adds in native code, and tests use it (tests/transports). It can
// be broken on purpose, so that the conformance suite can be shown to notice.

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <sys/eventfd.h>
#include <unistd.h>

#include <nanobind/stl/string.h>

#include "bindings/bind.hpp"
#include "bindings/wire_holder.hpp"
#include "support/fail.hpp"

namespace nb = nanobind;
using namespace unisono;

namespace {

constexpr std::size_t capacity = 64 << 10;

enum class Fault { none, drop, swap, sleep };

Fault fault_called(const std::string &name) {
  constexpr std::array<const char *, 4> names = {"", "drop", "swap", "sleep"};
  const auto found = std::find(names.begin(), names.end(), name);
  if (found == names.end())
    throw std::invalid_argument("MemoryWire: expected the fault drop, swap or sleep");
  return Fault(found - names.begin());
}

// An eventfd that is readable while a condition holds.
class Signal {
public:
  Signal() : fd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (fd_ < 0)
      fail("a memory wire: making a descriptor");
  }
  ~Signal() { ::close(fd_); }
  int fd() const { return fd_; }
  void set(bool holds) {
    if (std::exchange(holds_, holds) == holds)
      return;
    std::uint64_t count = 1;
    (void)!(holds ? ::write(fd_, &count, sizeof count) : ::read(fd_, &count, sizeof count));
  }

private:
  const int fd_;
  bool holds_ = false;
};

// One direction.
class Pipe {
public:
  explicit Pipe(Fault fault) : fault_(fault) { signal(); }

  ssize_t send(const iovec *parts, std::size_t count) {
    std::lock_guard lock(mutex_);
    if (closed_) {
      errno = EPIPE;
      return -1;
    }
    std::vector<std::byte> taken;
    std::size_t room = capacity - std::min(capacity, bytes_.size());
    for (std::size_t i = 0; i < count && room > 0; ++i) {
      const auto *from = static_cast<const std::byte *>(parts[i].iov_base);
      const std::size_t some = std::min(room, parts[i].iov_len);
      taken.insert(taken.end(), from, from + some);
      room -= some;
    }
    const auto accepted = ssize_t(taken.size());
    put(std::move(taken));
    signal();
    if (accepted > 0)
      return accepted;
    errno = EAGAIN;
    return -1;
  }

  ssize_t receive(void *into, std::size_t bytes) {
    std::lock_guard lock(mutex_);
    const std::size_t some = sleeps() ? 0 : std::min(bytes, bytes_.size());
    std::copy_n(bytes_.begin(), some, static_cast<std::byte *>(into));
    bytes_.erase(bytes_.begin(), bytes_.begin() + std::ptrdiff_t(some));
    received_ += some;
    signal();
    if (some > 0 || closed_)
      return ssize_t(some);
    errno = EAGAIN;
    return -1;
  }

  void close() {
    std::lock_guard lock(mutex_);
    closed_ = true;
    signal();
  }
  bool ended() {
    std::lock_guard lock(mutex_);
    return closed_ && bytes_.empty();
  }
  pollfd readable() const { return {readable_.fd(), POLLIN, 0}; }
  pollfd writable() const { return {writable_.fd(), POLLIN, 0}; }

private:
  void put(std::vector<std::byte> taken) {
    if (fault_ == Fault::drop && sent_ < 1000 && sent_ + taken.size() >= 1000)
      taken.pop_back();
    sent_ += taken.size();
    if (fault_ == Fault::swap && sent_ >= 1000 && !taken.empty() && !swapped_) {
      if (held_.empty()) {
        held_ = std::move(taken);
        return;
      }
      taken.insert(taken.end(), held_.begin(), held_.end());
      swapped_ = true;
    }
    bytes_.insert(bytes_.end(), taken.begin(), taken.end());
  }
  bool sleeps() const { return fault_ == Fault::sleep && received_ >= 1000; }
  void signal() {
    readable_.set(!sleeps() && (closed_ || !bytes_.empty()));
    writable_.set(closed_ || bytes_.size() < capacity);
  }

  const Fault fault_;
  std::mutex mutex_;
  std::deque<std::byte> bytes_;
  std::vector<std::byte> held_;
  std::size_t sent_ = 0, received_ = 0;
  bool closed_ = false, swapped_ = false;
  Signal readable_, writable_;
};

class MemoryWire : public Wire {
public:
  MemoryWire(std::shared_ptr<Pipe> out, std::shared_ptr<Pipe> in)
      : out_(std::move(out)), in_(std::move(in)) {}
  ~MemoryWire() override { MemoryWire::close(); }

  ssize_t send(const iovec *parts, std::size_t count) override {
    return out_->send(parts, count);
  }
  ssize_t receive(void *into, std::size_t bytes) override { return in_->receive(into, bytes); }
  void await_send(std::vector<pollfd> &into) override { into.push_back(out_->writable()); }
  void await_receive(std::size_t, std::vector<pollfd> &into) override {
    into.push_back(in_->readable());
  }
  bool peer_closed() const override { return in_->ended(); }
  void finish_sending() override { out_->close(); }
  void close() override {
    out_->close();
    in_->close();
  }

private:
  const std::shared_ptr<Pipe> out_, in_;
};

struct MemoryWireHolder : WireHolder {
  using WireHolder::WireHolder;
};

nb::tuple make_pair(const std::string &fault) {
  const auto there = std::make_shared<Pipe>(fault_called(fault));
  const auto back = std::make_shared<Pipe>(fault_called(fault));
  return nb::make_tuple(MemoryWireHolder(std::make_unique<MemoryWire>(there, back)),
                        MemoryWireHolder(std::make_unique<MemoryWire>(back, there)));
}

const WireKind kind("MemoryWire", [](nb::module_ &m, const char *name) {
  nb::class_<MemoryWireHolder, WireHolder>(m, name)
      .def_static("pair", &make_pair, nb::arg("fault") = "");
});

} // namespace

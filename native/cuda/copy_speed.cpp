// How fast a device copies within its own memory, as its driver does it.

#include "cuda/device.hpp"

namespace unisono::cuda {

namespace {

class TimedEvent {
public:
  TimedEvent() { UNISONO_CUDA(cuEventCreate, &event_, 0); }
  ~TimedEvent() { (void)api().cuEventDestroy_v2(event_); }
  TimedEvent(const TimedEvent &) = delete;
  void record(Stream stream) { UNISONO_CUDA(cuEventRecord, event_, stream); }
  double seconds_since(const TimedEvent &earlier) const {
    float milliseconds = 0;
    UNISONO_CUDA(cuEventSynchronize, event_);
    UNISONO_CUDA(cuEventElapsedTime, &milliseconds, earlier.event_, event_);
    return double(milliseconds) / 1e3;
  }

private:
  Event event_ = nullptr;
};

class CopyStream {
public:
  CopyStream() { UNISONO_CUDA(cuStreamCreate, &stream_, stream_non_blocking); }
  ~CopyStream() { (void)api().cuStreamDestroy_v2(stream_); }
  CopyStream(const CopyStream &) = delete;
  Stream handle() const { return stream_; }

private:
  Stream stream_ = nullptr;
};

} // namespace

double copy_seconds(Device &device, std::size_t bytes, int repeats) {
  const DeviceMemory from(device, bytes), to(device, bytes);
  const CurrentDevice current(device);
  const CopyStream stream;
  TimedEvent begin, end;
  const auto copy = [&] {
    UNISONO_CUDA(cuMemcpyAsync, to.address(), from.address(), bytes, stream.handle());
  };
  copy(); // the first one may be slower
  begin.record(stream.handle());
  for (int i = 0; i < repeats; ++i)
    copy();
  end.record(stream.handle());
  return end.seconds_since(begin) / repeats;
}

} // namespace unisono::cuda

#include "cuda/device_comm.hpp"

#include <algorithm>

#include <unistd.h>

namespace unisono::cuda {

using device::Launch;
using device::most_segments;
using device::Peer;
using device::RankWords;

namespace {

constexpr std::size_t windows_at = (sizeof(RankWords) + 255) / 256 * 256;
const char *const kernel_name = "unisono_interpret";

std::uint64_t this_process() {
  static const int place = 0;
  return reinterpret_cast<std::uintptr_t>(&place) ^ std::uint64_t(now_ns());
}

// The same for all communicators of this process.
std::uint64_t process_number() {
  static const std::uint64_t number = this_process();
  return number;
}

std::vector<std::size_t> ranks_of(const Comm &comm) {
  std::vector<std::size_t> ranks;
  for (std::size_t q = 0; q < comm.size(); ++q)
    ranks.push_back(comm.world_rank(q));
  return ranks;
}

} // namespace

Kernel::Kernel(const Device &device, const void *image) : Kernel(device) {
  const CurrentDevice current(device);
  UNISONO_CUDA(cuModuleLoadData, &module_, image);
  UNISONO_CUDA(cuModuleGetFunction, &function_, module_, kernel_name);
}

Kernel::~Kernel() {
  if (module_ == nullptr)
    return;
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuModuleUnload(module_);
}

int Kernel::blocks_per_multiprocessor(int threads) const {
  const CurrentDevice current(device_);
  int blocks = 0;
  UNISONO_CUDA(cuOccupancyMaxActiveBlocksPerMultiprocessor, &blocks, function_, threads, 0);
  return blocks;
}

DevicePlan::DevicePlan(Device &device, std::shared_ptr<const Plan> plan)
    : packed_(std::move(plan)), memory_(device, packed_.bytes().size()) {
  memory_.write(0, packed_.bytes().data(), packed_.bytes().size());
}

DeviceComm::DeviceComm(Comm &comm, Device &device, std::size_t half,
                       std::shared_ptr<Memory> board)
    : comm_(comm), rank_(comm.rank()), world_ranks_(ranks_of(comm)),
      host_peers_(comm.engine().host_peers), device_(device), half_(half),
      arena_(device, windows_at + 2 * half), peers_(device, comm.size() * sizeof(Peer)),
      segments_(device, comm.size() * most_segments * sizeof(Address)),
      host_(device, sizeof(HostWords)), board_memory_(std::move(board)),
      board_(reinterpret_cast<BoardRank *>(board_memory_->data())) {
  const CurrentDevice current(device);
  UNISONO_CUDA(cuEventCreate, &last_, event_without_timing);
}

DeviceComm::~DeviceComm() {
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuEventDestroy_v2(last_);
}

Announcement DeviceComm::announcement() {
  announced_ = true;
  return {::getpid(), process_number(), device_.ordinal(), arena_.address(), arena_.share()};
}

void DeviceComm::connect(const std::vector<Announcement> &ranks) {
  std::vector<Peer> peers(ranks.size());
  one_process_ = true;
  is_unmappable_.resize(ranks.size());
  for (std::size_t q = 0; q < ranks.size(); ++q) {
    const Announcement &rank = ranks[q];
    Address arena = rank.arena;
    is_here_.push_back(rank.pid == ::getpid() && rank.process == process_number());
    if (is_here_[q]) {
      device_.enable_access(Device::of(rank.ordinal));
    } else {
      one_process_ = false;
      imported_.push_back(std::make_unique<ImportedMemory>(device_, rank.handle));
      arena = imported_.back()->address();
    }
    peers[q] = {reinterpret_cast<RankWords *>(arena),
                reinterpret_cast<unsigned char *>(arena + windows_at),
                segments_.as<unsigned char *const>(q * most_segments * sizeof(Address))};
  }
  peers_.write(0, peers.data(), peers.size() * sizeof(Peer));
  watcher_.start([this] { watch(); });
  connected_ = true;
}

std::size_t DeviceComm::ranks_here() const {
  return std::size_t(std::count(is_here_.begin(), is_here_.end(), true));
}

bool DeviceComm::launch(const Arguments &a) {
  refuse_fork();
  const std::lock_guard only(launching_);
  const CurrentDevice current(device_);
  Launch launch = a.plan->packed().launch(a.plan->tables(), rank_, world_ranks_.size());
  launch.input = reinterpret_cast<const unsigned char *>(a.input);
  launch.output = reinterpret_cast<unsigned char *>(a.output);
  const bool captured = order_after_last(a.stream);
  if (!captured) // to map is forbidden during a capture
    map_new_segments();
  expose(launch, 0, a.input);
  expose(launch, 1, a.output);
  launch.peers = peers_.as<const Peer>();
  launch.half = std::int64_t(half_);
  const HostWords *words = host_.device<HostWords>();
  launch.abort = &words->abort;
  launch.failure = const_cast<device::FailureSlot *>(&words->failure);
  launch.done = const_cast<std::uint64_t *>(&words->done);
  launch.timeout_ns = a.timeout_ns > 0 ? std::uint64_t(a.timeout_ns) : ~std::uint64_t(0);
  void *arguments[] = {&launch};
  UNISONO_CUDA(cuLaunchKernel, a.kernel->function(), unsigned(a.blocks), 1, 1,
               unsigned(a.threads), 1, 1, 0, a.stream, arguments, nullptr);
  if (captured)
    return true;
  launched_.fetch_add(1, std::memory_order_release);
  UNISONO_CUDA(cuEventRecord, last_, a.stream);
  return false;
}

// Lets other ranks use the input (0) or the output (1) in place, if all of them can.
void DeviceComm::expose(Launch &launch, int which, Address address) {
  if (const auto place = place_of(address)) {
    launch.flags |= which == 0 ? device::exposes_input : device::exposes_output;
    launch.segment[which] = place->segment;
    launch.offset[which] = place->offset;
  }
}

bool DeviceComm::is_idle() {
  refuse_fork();
  const std::lock_guard only(launching_);
  const CurrentDevice current(device_);
  const Result result = api().cuEventQuery(last_);
  if (result != not_ready)
    check(result, "cuEventQuery");
  return result != not_ready;
}

// Calls of one communicator run one after another, on whichever streams they are made: they
// share the words of this rank. A stream with the handle of the last one may be another one,
// so handles are not compared. What a graph captures is ordered by its user. Whether the
// stream is being captured.
bool DeviceComm::order_after_last(Stream stream) {
  int capturing = 0;
  UNISONO_CUDA(cuStreamIsCapturing, stream, &capturing);
  if (capturing != 0)
    return true;
  if (launched() > 0)
    UNISONO_CUDA(cuStreamWaitEvent, stream, last_, 0);
  return false;
}

std::uint64_t DeviceComm::done() const {
  refuse_fork(); // the memory is not mapped there
  return __atomic_load_n(&host_.host<HostWords>()->done, __ATOMIC_ACQUIRE);
}

} // namespace unisono::cuda

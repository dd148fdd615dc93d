#include "cuda/device_comm.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <utility>

#include <unistd.h>

#include "cuda/deferred_release.hpp"
#include "cuda/launch_gate.hpp"

namespace unisono::cuda {

using device::Launch;
using device::Peer;
using device::RankWords;

namespace {

constexpr std::size_t rounded_up(std::size_t bytes, std::size_t unit) {
  return (bytes + unit - 1) / unit * unit;
}
constexpr std::size_t windows_at = rounded_up(sizeof(RankWords), 256);
constexpr std::size_t packets_at(std::size_t half) {
  return rounded_up(windows_at + 2 * half, 256);
}
// In host memory there are no packets.
constexpr std::size_t arena_bytes(std::size_t half) {
  return packets_at(half) + std::size_t(device::packet_area_bytes);
}
// A call maps so many new segments of each rank; the watcher maps the others.
constexpr std::size_t most_updates = 8;
// The watcher looks so many times whether shared memory is still there, each time it looks.
constexpr std::size_t most_looks = 16;
// Which calls have ended is asked after so many calls for which something is kept, or bytes.
constexpr std::uint64_t most_kept_calls = 16;
constexpr std::size_t most_kept_bytes = std::size_t(1) << 20;
// In host memory, where they follow each other.
constexpr std::size_t arena_stride(std::size_t half) { return rounded_up(packets_at(half), 4096); }

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
  LaunchGate::of_process().run_when_idle([&] { load(image); }, device.ordinal());
}

void Kernel::load(const void *image) {
  const CurrentDevice current(device_);
  UNISONO_CUDA(cuModuleLoadData, &module_, image);
  interpret_ = find("unisono_interpret");
  exchange_ = find("unisono_exchange");
}

Function Kernel::find(const char *name) const {
  Function found = nullptr;
  UNISONO_CUDA(cuModuleGetFunction, &found, module_, name);
  int registers = 0; // to tell that, the driver loads the function
  UNISONO_CUDA(cuFuncGetAttribute, &registers, function_registers, found);
  if (api().cuFuncLoad != nullptr)
    UNISONO_CUDA(cuFuncLoad, found);
  return found;
}

Kernel::~Kernel() {
  if (module_ == nullptr)
    return;
  if (const CurrentDevice current(device_, std::nothrow); current)
    (void)api().cuModuleUnload(module_);
}

DeviceComm::DeviceComm(Comm &comm, Device &device, std::size_t half,
                       std::shared_ptr<Memory> board, const std::atomic<std::int64_t> *timeout_ns)
    : comm_(comm), timeout_ns_(timeout_ns), rank_(comm.rank()), world_ranks_(ranks_of(comm)),
      host_peers_(comm.engine().host_peers), device_(device), half_(half),
      peers_(device, comm.size() * sizeof(Peer)),
      host_(device, sizeof(HostWords)), tables_(std::make_shared<TableMemory>(device)),
      board_memory_(std::move(board)),
      board_(reinterpret_cast<BoardRank *>(board_memory_->data())),
      shared_(device, rank_, world_ranks_, host_peers_, board_),
      mapped_(device, rank_, world_ranks_, host_peers_, board_), last_(device), mark_(device),
      before_(device), last_captured_(device), calls_(comm, device) {}

void DeviceComm::allocate() { arena_ = DeviceMemory(device_, arena_bytes(half_)); }

Announcement DeviceComm::announcement() {
  announced_ = true;
  Announcement made{::getpid(), process_number(), device_.ordinal(), 0, device_.uuid(),
                    arena_.address(), {}};
  const CurrentDevice current(device_);
  if (made.arena != 0)
    made.has_handle = api().cuIpcGetMemHandle(&made.handle, made.arena) == success;
  return made;
}

std::string DeviceComm::connect(const std::vector<Announcement> &ranks) {
  for (const Announcement &rank : ranks)
    is_here_.push_back(rank.pid == ::getpid() && rank.process == process_number());
  one_process_ = ranks_here() == ranks.size();
  for (std::size_t q = 0; q < ranks.size(); ++q)
    if (const std::string why = reach(q, ranks[q]); !why.empty())
      return why;
  return {};
}

// Finds the arena of a rank; why its memory cannot be accessed.
std::string DeviceComm::reach(std::size_t rank, const Announcement &announced) {
  const std::string whose = "the memory of rank " + std::to_string(rank);
  Address arena = announced.arena;
  if (arena == 0)
    return {};
  if (!device_.can_access(announced.uuid))
    return "cuda:" + std::to_string(device_.ordinal()) + " cannot access " + whose +
           ": the devices are no peers";
  if (is_here_[rank]) {
    try {
      device_.enable_access(Device::of(announced.ordinal));
    } catch (const Error &error) {
      return whose + " cannot be accessed: " + error.what();
    }
  } else if (announced.has_handle == 0) {
    return whose + " cannot be shared with other processes";
  } else {
    Result result = success;
    auto memory = ImportedMemory::open(device_, announced.handle, result);
    if (!memory)
      return whose + " cannot be mapped: " + in_words(result, "cuIpcOpenMemHandle_v2");
    arena = memory->address();
    imported_.push_back(std::move(memory));
  }
  arenas_.push_back(arena);
  return {};
}

std::size_t DeviceComm::host_bytes(std::size_t n, std::size_t half) {
  return n * arena_stride(half);
}

// What was mapped is unmapped when no call is in flight: a call of another communicator may
// wait for a rank that waits here.
void DeviceComm::disconnect() {
  using Imported = decltype(imported_);
  release_later([mapped = std::make_shared<Imported>(std::exchange(imported_, {}))] {
    mapped->clear();
  });
  arenas_.clear();
}

void DeviceComm::place_on_host(std::size_t owner, std::uint64_t segment) {
  auto arenas = host_peers_->find(owner, segment);
  if (!arenas || arenas->size() < host_bytes(world_ranks_.size(), half_))
    throw std::invalid_argument("the segment for windows is missing or too small");
  arena_ = DeviceMemory();
  on_host_ = RegisteredMemory::of(device_, std::move(arenas));
  const Address first = on_host_->on(device_);
  for (std::size_t q = 0; q < world_ranks_.size(); ++q)
    arenas_.push_back(first + q * arena_stride(half_));
}

std::byte *DeviceComm::arena_on_host() const {
  return on_host_->host() + rank_ * arena_stride(half_);
}

void DeviceComm::start() {
  std::vector<Peer> peers;
  for (std::size_t q = 0; q < arenas_.size(); ++q)
    peers.push_back({reinterpret_cast<RankWords *>(arenas_[q]),
                     reinterpret_cast<unsigned char *>(arenas_[q] + windows_at),
                     mapped_.table(q),
                     on_host_ ? nullptr
                              : reinterpret_cast<unsigned char *>(arenas_[q] + packets_at(half_))});
  peers_.write(0, peers.data(), peers.size() * sizeof(Peer));
  LaunchGate::of_process().add(this, device_.ordinal(), [this] { return is_in_flight(); });
  watcher_.start("unisono-gpu", [this] { watch(); });
  connected_ = true;
}

std::size_t DeviceComm::ranks_here() const {
  return std::size_t(std::count(is_here_.begin(), is_here_.end(), true));
}

std::optional<std::uint64_t> DeviceComm::launch(const Arguments &a) {
  if (host_peers_->forked())
    return {};
  if (a.packets && (on_host_ || !a.plan->packed().fits_packets(a.blocks)))
    throw std::invalid_argument("the data of this call cannot travel as packets");
  look();
  const auto gate = LaunchGate::of_process().launching();
  const std::lock_guard only(launching_);
  if (is_refused())
    return {};
  const CurrentDevice current(device_);
  if (a.stream != a.current) {
    UNISONO_CUDA(cuEventRecord, before_, a.current);
    UNISONO_CUDA(cuStreamWaitEvent, a.stream, before_, 0);
  }
  const bool captured = order_after_last(a.stream);
  if (!captured) { // to map is forbidden during a capture
    mark_calls(a.stream);
    update_segments(most_updates, nullptr);
  }
  Launch launch = argument(a, captured);
  const Function function = a.kernel->function(a.packets);
  Tables &tables = a.plan->tables();
  tables.copy(a.stream);
  const CallRecords::Call call{&a.plan->packed().plan().note, a.stream, a.site, a.queued};
  if (captured) {
    calls_.capture(call, launch);
  } else {
    calls_.read_clock(a.kernel->function(false));
    calls_.launch(call, launch);
  }
  void *arguments[] = {&launch};
  const Result result =
      api().cuLaunchKernel(function, unsigned(a.blocks), 1, 1, unsigned(a.threads), 1, 1, 0,
                           a.stream, arguments, nullptr);
  if (result != success && !captured)
    calls_.cancel();
  check(result, "cuLaunchKernel");
  exposed_.fetch_add(!a.packets && launch.flags != 0, std::memory_order_relaxed);
  launched_.fetch_add(!captured, std::memory_order_release);
  comm_.count_sent_on_devices(captured ? 0 : a.plan->packed().plan().sent_bytes);
  UNISONO_CUDA(cuEventRecord, captured ? last_captured_ : last_, a.stream);
  if (captured)
    return 0;
  tables.set_copied();
  await_end(a.kept);
  return launched();
}

// Whether no call is possible any more. The memory of a rank that has closed may have vanished.
bool DeviceComm::is_refused() {
  if (closed_ || comm_.failure().kind != FailureKind::none)
    return true;
  const auto rank = find_closed(false);
  if (rank)
    comm_.abort({FailureKind::closed, std::uint32_t(*rank), std::uint32_t(rank_),
                 next_call()});
  return rank.has_value();
}

// What the kernel is given.
Launch DeviceComm::argument(const Arguments &a, bool captured) {
  Launch launch = a.plan->packed().launch(a.plan->tables().address(), rank_,
                                          world_ranks_.size(), a.blocks);
  launch.input = reinterpret_cast<const unsigned char *>(a.input);
  launch.output = reinterpret_cast<unsigned char *>(a.output);
  if (a.packets)
    launch.flags = device::sends_packets;
  else
    expose_buffers(launch, a);
  launch.peers = peers_.as<const Peer>();
  launch.words = reinterpret_cast<RankWords *>(arenas_[rank_]);
  launch.half = std::int64_t(half_);
  const HostWords *words = host_.device<HostWords>();
  launch.abort = &words->abort;
  launch.failure = const_cast<device::FailureSlot *>(&words->failure);
  if (captured) {
    is_captured_ = true;
    launch.begun = const_cast<std::uint64_t *>(&words->begun);
  }
  const std::int64_t limit = a.timeout_ns < 0 ? timeout_ns_->load() : a.timeout_ns;
  launch.timeout_ns = limit > 0 ? std::uint64_t(limit) : ~std::uint64_t(0);
  return launch;
}

// Lets other ranks use the buffers of a call in place, if all of them can.
void DeviceComm::expose_buffers(Launch &launch, const Arguments &a) {
  const Plan &plan = a.plan->packed().plan();
  expose(launch, 0, a.input, plan.input_bytes);
  if (a.output != a.input || plan.output_bytes != plan.input_bytes)
    expose(launch, 1, a.output, plan.output_bytes);
  else if (launch.flags != 0) {
    launch.flags |= device::exposes_output;
    launch.segment[1] = launch.segment[0];
    launch.offset[1] = launch.offset[0];
  }
}

// Lets other ranks use the input (0) or the output (1) in place, if all of them can. In
// segment 0 offsets are addresses; an empty buffer is not read.
void DeviceComm::expose(Launch &launch, int which, Address address, std::size_t bytes) {
  if (on_host_)
    return;
  std::optional<SharedSegments::Place> place = SharedSegments::Place{0, address};
  if (!one_process_ && address != 0 && bytes != 0)
    place = shared_.place_of(address, bytes);
  if (!place)
    return;
  launch.flags |= which == 0 ? device::exposes_input : device::exposes_output;
  launch.segment[which] = place->segment;
  launch.offset[which] = place->offset;
}

SharedSegments::State DeviceComm::sharing_of(Address address, std::size_t bytes) {
  if (on_host_)
    return SharedSegments::State::impossible;
  if (one_process_ || address == 0 || bytes == 0)
    return SharedSegments::State::in_place;
  refuse_fork();
  const std::lock_guard only(launching_);
  const CurrentDevice current(device_);
  return shared_.state_of(address, bytes);
}

void DeviceComm::update_segments(std::size_t most, CallsMade *calls) {
  if (shares_segments())
    mapped_.update(most, calls);
}

// Tells the others of memory that this rank shares and its owner has freed.
void DeviceComm::look_for_freed_memory() {
  const std::unique_lock only(launching_, std::try_to_lock);
  if (!only || shared_.is_empty())
    return;
  const CurrentDevice current(device_);
  shared_.free_some(most_looks);
}

// Something is kept until the last call has ended.
void DeviceComm::await_end(std::size_t kept) {
  if (kept == 0)
    return;
  awaited_ = launched();
  kept_bytes_ += kept;
}

// Records an event behind the calls that were made so far, if somebody waits for their end.
void DeviceComm::mark_calls(Stream stream) {
  if (awaited_ <= ended())
    return;
  if (kept_bytes_ >= most_kept_bytes || launched() - looked_ >= most_kept_calls)
    look_for_ended();
  if (awaited_ <= ended() || marked_ > ended() || launched() == 0)
    return;
  UNISONO_CUDA(cuEventRecord, mark_, stream);
  marked_ = launched();
}

// Which calls have ended; those that a graph repeats are not counted.
void DeviceComm::look_for_ended() {
  looked_ = launched();
  kept_bytes_ = 0;
  if (launched() > ended() && api().cuEventQuery(last_) == success)
    ended_.store(launched(), std::memory_order_relaxed);
  else if (marked_ > ended() && api().cuEventQuery(mark_) == success)
    ended_.store(marked_, std::memory_order_relaxed);
}

bool DeviceComm::have_ended(std::uint64_t calls) {
  const std::unique_lock only(launching_, std::try_to_lock);
  if (!only)
    return false;
  const CurrentDevice current(device_);
  look_for_ended();
  awaited_ = std::max(awaited_, calls);
  return calls <= ended() && comm_.failure().kind == FailureKind::none;
}

bool DeviceComm::is_idle() {
  refuse_fork();
  const std::lock_guard only(launching_);
  const CurrentDevice current(device_);
  const Result result = api().cuEventQuery(last_);
  if (result == not_ready)
    return false;
  check(result, "cuEventQuery");
  ended_.store(launched(), std::memory_order_relaxed);
  return true;
}

// Calls of one communicator run one after another, on whichever streams they are made: they
// share the words of this rank. A stream with the handle of the last one may be another one,
// so handles are not compared. The same holds for the calls that one graph captures; graphs
// and other calls are ordered by their user. Whether the stream is being captured.
bool DeviceComm::order_after_last(Stream stream) {
  int capturing = 0;
  std::uint64_t capture = 0;
  UNISONO_CUDA(cuStreamGetCaptureInfo_v2, stream, &capturing, &capture, nullptr, nullptr,
               nullptr);
  if (capturing == 0)
    UNISONO_CUDA(cuStreamWaitEvent, stream, last_, 0);
  else if (capture == std::exchange(capture_, capture))
    UNISONO_CUDA(cuStreamWaitEvent, stream, last_captured_, 0);
  return capturing != 0;
}

// Whether kernels of this rank may still wait for other ranks. Nothing is launched meanwhile
// by this process, except graphs: of those the kernels tell when they begin and end, and it
// is asked twice, since one may have been launched and not have begun.
bool DeviceComm::is_in_flight() {
  const HostWords &words = *host_.host<HostWords>();
  if (__atomic_load_n(&words.abort, __ATOMIC_ACQUIRE) != 0 ||
      __atomic_load_n(&words.failure.state, __ATOMIC_ACQUIRE) != 0)
    return false; // its kernels end by themselves
  if (is_captured_) {
    const std::uint64_t now = calls_.last(), before = std::exchange(last_seen_, now);
    if (now != before || __atomic_load_n(&words.begun, __ATOMIC_ACQUIRE) > now)
      return true;
  }
  const CurrentDevice current(device_, std::nothrow);
  return api().cuEventQuery(last_) == not_ready;
}

} // namespace unisono::cuda

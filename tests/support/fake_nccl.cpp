// NCCL's functions on the emulated driver, for tests: ranks are threads or processes of one
// host, which exchange data through shared memory. Device memory of the emulation is the
// host's. A function waits for its stream, goes on in a thread, and is in progress until that
// has ended. Arguments are checked as strictly as nccl.h describes them. As with NCCL itself,
// ranks whose calls do not fit together wait for ever.
//
// fake_nccl_driver() gives it functions of the driver, fake_nccl_fault() makes a function of
// one rank fail, hang or report an error later.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

enum Result { success, cuda_error, system_error, internal_error, invalid_argument,
              invalid_usage, remote_error, in_progress };
enum Type { int8, uint8, int32, uint32, int64, uint64, float16, float32, float64, bfloat16,
            num_types };
enum Op { sum, prod, max, min, avg, num_ops };
enum Fault { none = 0, never = -1, later = -2, on_device = -3 }; // positive: a Result

constexpr std::size_t sizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
constexpr int most_ranks = 8;
constexpr std::size_t slot_bytes = 4 << 20, box_bytes = 1 << 20;

struct Call {
  std::string name;
  const void *in = nullptr;
  void *out = nullptr;
  std::size_t count = 0;
  int type = 0, op = 0, root = 0; // root: the peer of a message
};

struct Signature { // what all ranks must call
  char name[24];
  std::uint64_t count;
  int type, op, root;
  bool operator==(const Signature &other) const {
    return std::memcmp(name, other.name, sizeof name) == 0 && count == other.count &&
           type == other.type && op == other.op && root == other.root;
  }
};

struct Box {
  std::atomic<std::uint32_t> full;
  std::uint64_t bytes;
  char data[box_bytes];
};

struct Shared {
  std::atomic<std::uint64_t> joined;
  std::atomic<std::uint64_t> phase[most_ranks];
  Signature calls[most_ranks];
  char slots[most_ranks][slot_bytes];
  Box boxes[most_ranks][most_ranks]; // from, to
};

struct Comm {
  Comm(int n, int rank) : n(n), rank(rank) {}
  const int n, rank;
  Shared *shared = nullptr;
  std::uint64_t phase = 0;
  std::atomic<bool> aborted = false, hangs = false, finalized = false;
  std::atomic<int> state = success;
  std::thread job;
};

struct { // of the driver
  int (*synchronize)(void *) = nullptr;
  int (*is_capturing)(void *, int *) = nullptr;
  int (*copy)(std::uint64_t, std::uint64_t, std::size_t, void *) = nullptr;
  void (*hang)(void *) = nullptr;  // puts something into a stream that does not end
  void (*unhang)() = nullptr;      // ends it
} driver;

std::mutex mutex;
std::map<std::pair<int, std::string>, int> faults;
std::map<std::string, int> counted;
std::string last_error;
thread_local int depth = 0;
thread_local std::vector<Call> group;
thread_local Comm *group_comm = nullptr;
thread_local void *group_stream = nullptr;

Result refuse(const std::string &why) {
  const std::lock_guard lock(mutex);
  last_error = why;
  return invalid_argument;
}

int fault_of(int rank, const std::string &function) {
  const std::lock_guard lock(mutex);
  ++counted[function];
  const auto found = faults.find({rank, function});
  return found == faults.end() ? none : found->second;
}

template <class Condition> bool wait(Comm &comm, Condition condition) {
  while (!condition()) {
    if (comm.aborted)
      return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  return true;
}

// All ranks have come so far.
bool meet(Comm &comm) {
  const std::uint64_t phase = ++comm.phase;
  comm.shared->phase[comm.rank] = phase;
  return wait(comm, [&] {
    for (int r = 0; r < comm.n; ++r)
      if (comm.shared->phase[r] < phase)
        return false;
    return true;
  });
}

struct Bfloat {
  std::uint16_t bits;
  explicit Bfloat(float value) {
    std::uint32_t all;
    std::memcpy(&all, &value, 4);
    bits = std::uint16_t((all + 0x7fff + ((all >> 16) & 1)) >> 16);
  }
  explicit operator float() const {
    const std::uint32_t all = std::uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &all, 4);
    return value;
  }
};

template <class T, class Sum = T>
void fold(Comm &comm, const Call &call, std::size_t from, void *out) {
  for (std::size_t i = 0; i < call.count; ++i) {
    auto at = [&](int r) {
      T value = T(0.f);
      std::memcpy(static_cast<void *>(&value), comm.shared->slots[r] + (from + i) * sizeof(T),
                  sizeof(T));
      return Sum(value);
    };
    Sum total = at(0);
    for (int r = 1; r < comm.n; ++r) {
      const Sum x = at(r);
      total = call.op == sum || call.op == avg ? Sum(total + x)
              : call.op == prod                ? Sum(total * x)
              : call.op == max                 ? (x > total ? x : total)
                                               : (x < total ? x : total);
    }
    if (call.op == avg)
      total = Sum(total / Sum(comm.n));
    const T made = T(total);
    std::memcpy(static_cast<char *>(out) + i * sizeof(T), static_cast<const void *>(&made),
                sizeof(T));
  }
}

void reduce(Comm &comm, const Call &call, std::size_t from, void *out) {
  switch (call.type) {
  case int8: return fold<std::int8_t>(comm, call, from, out);
  case uint8: return fold<std::uint8_t>(comm, call, from, out);
  case int32: return fold<std::int32_t>(comm, call, from, out);
  case uint32: return fold<std::uint32_t>(comm, call, from, out);
  case int64: return fold<std::int64_t>(comm, call, from, out);
  case uint64: return fold<std::uint64_t>(comm, call, from, out);
  case float16: return fold<_Float16, float>(comm, call, from, out);
  case float32: return fold<float>(comm, call, from, out);
  case float64: return fold<double>(comm, call, from, out);
  default: return fold<Bfloat, float>(comm, call, from, out);
  }
}

bool send(Comm &comm, const Call &call) {
  Box &box = comm.shared->boxes[comm.rank][call.root];
  if (!wait(comm, [&] { return box.full == 0; }))
    return false;
  box.bytes = call.count * sizes[call.type];
  std::memcpy(box.data, call.in, box.bytes);
  box.full = 1;
  return true;
}

bool receive(Comm &comm, const Call &call) {
  Box &box = comm.shared->boxes[call.root][comm.rank];
  if (!wait(comm, [&] { return box.full == 1 && box.bytes == call.count * sizes[call.type]; }))
    return false;
  std::memcpy(call.out, box.data, box.bytes);
  box.full = 0;
  return true;
}

bool collective(Comm &comm, const Call &call) {
  Shared &shared = *comm.shared;
  const std::size_t size = sizes[call.type], bytes = call.count * size;
  const bool scatters = call.name == "ncclReduceScatter";
  Signature mine{};
  std::snprintf(mine.name, sizeof mine.name, "%s", call.name.c_str());
  mine.count = call.count;
  mine.type = call.type;
  mine.op = call.op;
  mine.root = call.root;
  shared.calls[comm.rank] = mine;
  if (call.name != "ncclBroadcast" || comm.rank == call.root)
    std::memcpy(shared.slots[comm.rank], call.in, scatters ? bytes * std::size_t(comm.n) : bytes);
  if (!meet(comm))
    return false;
  for (int r = 0; r < comm.n; ++r)
    if (!(shared.calls[r] == mine))
      return wait(comm, [] { return false; }); // as NCCL: for ever
  if (call.name == "ncclAllReduce")
    reduce(comm, call, 0, call.out);
  else if (call.name == "ncclReduce" && comm.rank == call.root)
    reduce(comm, call, 0, call.out);
  else if (scatters)
    reduce(comm, call, std::size_t(comm.rank) * call.count, call.out);
  else if (call.name == "ncclBroadcast")
    std::memcpy(call.out, shared.slots[call.root], bytes);
  else if (call.name == "ncclAllGather")
    for (int r = 0; r < comm.n; ++r)
      std::memcpy(static_cast<char *>(call.out) + std::size_t(r) * bytes, shared.slots[r], bytes);
  return meet(comm); // the slots may be used again
}

void perform(Comm *comm, std::vector<Call> calls) {
  bool done = true;
  for (const Call &call : calls)
    if (call.name == "ncclSend")
      done = done && send(*comm, call);
  for (const Call &call : calls)
    if (call.name == "ncclRecv")
      done = done && receive(*comm, call);
  for (const Call &call : calls)
    if (call.name != "ncclSend" && call.name != "ncclRecv")
      done = done && collective(*comm, call);
  if (done)
    comm->state = success;
}

// What a stream that is captured gets: a world of one only copies.
Result capture(Comm &comm, const std::vector<Call> &calls, void *stream) {
  if (comm.n != 1)
    return success;
  for (const Call &call : calls)
    if (call.in != nullptr && call.out != nullptr && call.in != call.out &&
        driver.copy(std::uint64_t(call.out), std::uint64_t(call.in),
                    call.count * sizes[call.type], stream) != 0)
      return cuda_error;
  return success;
}

Result begin(Comm &comm, std::vector<Call> calls, void *stream) {
  if (comm.state != success)
    return refuse("the communicator is not ready");
  if (driver.synchronize == nullptr)
    return refuse("the driver was not given");
  int capturing = 0;
  if (driver.is_capturing(stream, &capturing) != 0)
    return cuda_error; // there is no current context, or no such stream
  if (capturing != 0)
    return capture(comm, calls, stream);
  if (driver.synchronize(stream) != 0)
    return cuda_error;
  if (comm.job.joinable())
    comm.job.join();
  comm.state = in_progress;
  comm.job = std::thread(perform, &comm, std::move(calls));
  return in_progress;
}

Result check(const Comm &comm, const Call &call) {
  const bool is_send = call.name == "ncclSend", is_message = is_send || call.name == "ncclRecv";
  const bool reads = call.name == "ncclBroadcast" ? comm.rank == call.root : call.name != "ncclRecv";
  const bool writes = call.name == "ncclReduce" ? comm.rank == call.root : !is_send;
  if (call.type < 0 || call.type >= num_types)
    return refuse("no such type");
  if (call.op < 0 || call.op >= num_ops)
    return refuse("no such operation");
  if (call.root < 0 || call.root >= comm.n)
    return refuse("no such rank");
  if ((reads && call.in == nullptr) || (writes && call.out == nullptr))
    return refuse("a null pointer");
  if (call.count == 0)
    return refuse("nothing is moved: such a call is not made");
  const std::size_t bytes = call.count * sizes[call.type];
  const std::size_t in = call.name == "ncclReduceScatter" ? bytes * std::size_t(comm.n) : bytes;
  if (in > (is_message ? box_bytes : slot_bytes))
    return refuse("more than this library can move");
  return success;
}

Result enqueue(Comm *comm, Call call, void *stream) {
  if (comm == nullptr || comm->aborted || comm->finalized)
    return refuse("no communicator");
  const int fault = fault_of(comm->rank, call.name);
  if (fault > 0)
    return Result(fault);
  if (const Result wrong = check(*comm, call); wrong != success)
    return wrong;
  if (fault == never) {
    comm->state = in_progress;
    return in_progress;
  }
  if (fault == later) {
    comm->state = remote_error;
    return success;
  }
  if (fault == on_device) {
    comm->hangs = true;
    driver.hang(stream);
    return success;
  }
  if (depth == 0)
    return begin(*comm, {std::move(call)}, stream);
  group_comm = comm;
  group_stream = stream;
  group.push_back(std::move(call));
  return success;
}

void join(Comm *comm, std::string name) {
  const int file = ::shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);
  if (file < 0 || ::ftruncate(file, sizeof(Shared)) != 0) {
    comm->state = system_error;
    return;
  }
  void *const at = ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  comm->shared = static_cast<Shared *>(at);
  ++comm->shared->joined;
  if (!wait(*comm, [&] { return comm->shared->joined >= std::uint64_t(comm->n); }))
    return;
  if (comm->rank == 0)
    ::shm_unlink(name.c_str());
  comm->state = success;
}

void release(Comm *comm) {
  if (comm->job.joinable())
    comm->job.join();
  if (comm->shared != nullptr)
    ::munmap(comm->shared, sizeof(Shared));
  delete comm;
}

} // namespace

extern "C" {

struct UniqueId {
  char bytes[128];
};
struct Settings {
  std::size_t size;
  unsigned magic, version;
  int blocking, cga, fewest, most;
  const char *net;
  int split_share;
};

void fake_nccl_driver(void *synchronize, void *is_capturing, void *copy, void *hang,
                      void *unhang) {
  driver.synchronize = reinterpret_cast<decltype(driver.synchronize)>(synchronize);
  driver.is_capturing = reinterpret_cast<decltype(driver.is_capturing)>(is_capturing);
  driver.copy = reinterpret_cast<decltype(driver.copy)>(copy);
  driver.hang = reinterpret_cast<decltype(driver.hang)>(hang);
  driver.unhang = reinterpret_cast<decltype(driver.unhang)>(unhang);
}

void fake_nccl_fault(int rank, const char *function, int what) {
  const std::lock_guard lock(mutex);
  faults[{rank, function}] = what;
}

int fake_nccl_calls(const char *function) {
  const std::lock_guard lock(mutex);
  return counted[function];
}

int ncclGetVersion(int *version) {
  const char *const said = std::getenv("FAKE_NCCL_VERSION");
  *version = said == nullptr ? 22705 : std::atoi(said);
  return success;
}

int ncclGetUniqueId(UniqueId *id) {
  // By chance, and not by the process: one of that number may have been killed before it
  // removed its file, and ranks would find others there.
  std::uint64_t chance = 0;
  if (::getrandom(&chance, sizeof chance, 0) != sizeof chance)
    return system_error;
  std::memset(id, 0, sizeof *id);
  std::snprintf(id->bytes, sizeof id->bytes, "/unisono-fake-nccl-%016llx",
                static_cast<unsigned long long>(chance));
  return success;
}

int ncclCommInitRankConfig(Comm **comm, int n, UniqueId id, int rank, Settings *settings) {
  if (settings->size != sizeof(Settings) || settings->magic != 0xcafebeefu ||
      settings->version < 21800 || settings->blocking != 0 || settings->cga != INT_MIN ||
      settings->split_share != INT_MIN || settings->net != nullptr)
    return refuse("wrong settings");
  if (n < 1 || n > most_ranks || rank < 0 || rank >= n || id.bytes[0] != '/')
    return refuse("wrong ranks, or no id");
  if (const int fault = fault_of(rank, "ncclCommInitRankConfig"); fault > 0)
    return fault;
  Comm *const made = *comm = new Comm(n, rank);
  made->state = in_progress;
  made->job = std::thread(join, made, std::string(id.bytes));
  return in_progress;
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  *state = comm->state;
  return success;
}

int ncclCommFinalize(Comm *comm) {
  fault_of(comm->rank, "ncclCommFinalize");
  comm->finalized = true;
  return success;
}

int ncclCommDestroy(Comm *comm) {
  fault_of(comm->rank, "ncclCommDestroy");
  if (!comm->finalized)
    return refuse("it was not finalized");
  release(comm);
  return success;
}

int ncclCommAbort(Comm *comm) {
  fault_of(comm->rank, "ncclCommAbort");
  comm->aborted = true;
  if (comm->hangs)
    driver.unhang();
  release(comm);
  return success;
}

const char *ncclGetErrorString(int code) {
  return code == cuda_error ? "unhandled cuda error" : code == remote_error ? "remote process exited"
         : code == invalid_argument ? "invalid argument" : "some error";
}

const char *ncclGetLastError(Comm *) {
  const std::lock_guard lock(mutex);
  return last_error.c_str();
}

int ncclGroupStart() {
  ++depth;
  return success;
}

int ncclGroupEnd() {
  if (depth == 0)
    return refuse("no group was begun");
  if (--depth > 0 || group.empty())
    return success;
  std::vector<Call> calls;
  calls.swap(group);
  return begin(*group_comm, std::move(calls), group_stream);
}

int ncclAllReduce(const void *in, void *out, std::size_t count, int type, int op, Comm *comm,
                  void *stream) {
  return enqueue(comm, {"ncclAllReduce", in, out, count, type, op, 0}, stream);
}

int ncclReduce(const void *in, void *out, std::size_t count, int type, int op, int root,
               Comm *comm, void *stream) {
  return enqueue(comm, {"ncclReduce", in, out, count, type, op, root}, stream);
}

int ncclBroadcast(const void *in, void *out, std::size_t count, int type, int root, Comm *comm,
                  void *stream) {
  return enqueue(comm, {"ncclBroadcast", in, out, count, type, 0, root}, stream);
}

int ncclAllGather(const void *in, void *out, std::size_t count, int type, Comm *comm,
                  void *stream) {
  return enqueue(comm, {"ncclAllGather", in, out, count, type, 0, 0}, stream);
}

int ncclReduceScatter(const void *in, void *out, std::size_t count, int type, int op, Comm *comm,
                      void *stream) {
  return enqueue(comm, {"ncclReduceScatter", in, out, count, type, op, 0}, stream);
}

int ncclSend(const void *in, std::size_t count, int type, int peer, Comm *comm, void *stream) {
  return enqueue(comm, {"ncclSend", in, nullptr, count, type, 0, peer}, stream);
}

int ncclRecv(void *out, std::size_t count, int type, int peer, Comm *comm, void *stream) {
  return enqueue(comm, {"ncclRecv", nullptr, out, count, type, 0, peer}, stream);
}
}

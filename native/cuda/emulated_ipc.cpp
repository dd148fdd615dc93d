// Memory of other processes, by handles: the owner's process, and the number of its
// descriptor of the memory. A process opens it under /proc, where the kernel allows that to
// processes of the same user.

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/emulated_memory.hpp"
#include "cuda/emulated_streams.hpp"

namespace unisono::cuda::emulated {

namespace {

constexpr std::array<char, 8> magic = {'u', 'n', 'i', 's', 'o', 'e', 'm', 'u'};

// The contents of an IpcHandle. A process number and a descriptor can be used again; the
// start of a process and the number of a file tell which were meant.
struct Exported {
  std::array<char, 8> magic;
  std::int32_t pid, fd;
  std::uint64_t process_start; // in ticks since the boot of the system
  std::uint64_t file;
  std::uint64_t bytes;
  unsigned char rest[24];
};
static_assert(sizeof(Exported) == sizeof(IpcHandle));

// A descriptor that is closed at the end of the scope, unless it is taken.
class Descriptor {
public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor &) = delete;
  ~Descriptor() {
    if (fd_ >= 0)
      ::close(fd_);
  }
  int get() const { return fd_; }
  int take() { return std::exchange(fd_, -1); }

private:
  int fd_;
};

// Why a file of another process could not be opened.
Result refused(int error) {
  switch (error) {
  case EMFILE:
  case ENFILE:
  case ENOMEM:
    return out_of_memory;
  case ENOENT: // no such process or descriptor any more
  case ESRCH:
  case EACCES: // of another user
  case EPERM:
    return invalid_handle;
  default:
    return unknown;
  }
}

// When a process began; 0, and errno, if that cannot be read.
std::uint64_t start_of(std::int32_t pid) {
  const std::string path = "/proc/" + std::to_string(pid) + "/stat";
  const Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  char text[1024];
  const ssize_t count = file.get() < 0 ? -1 : ::read(file.get(), text, sizeof(text) - 1);
  if (count < 0)
    return 0;
  text[count] = '\0';
  // The name of the program, in parentheses, is the 2nd field; the start is the 22nd.
  const char *field = std::strrchr(text, ')');
  for (int number = 2; field != nullptr && number < 22; ++number)
    field = std::strchr(field + 1, ' ');
  errno = ESRCH;
  unsigned long long start = 0;
  return field != nullptr && std::sscanf(field, "%llu", &start) == 1 ? start : 0;
}

// The memory of a handle that another process has made.
std::shared_ptr<Physical> open_memory(const Exported &exported, Result &why) {
  const std::uint64_t start = start_of(exported.pid);
  why = start == 0 ? refused(errno) : Result(invalid_handle);
  if (start != exported.process_start)
    return nullptr;
  const std::string path =
      "/proc/" + std::to_string(exported.pid) + "/fd/" + std::to_string(exported.fd);
  Descriptor file(::open(path.c_str(), O_RDWR | O_CLOEXEC | O_NONBLOCK));
  struct stat found;
  if (file.get() < 0 || ::fstat(file.get(), &found) != 0) {
    why = refused(errno);
    return nullptr;
  }
  if (found.st_ino != exported.file || std::uint64_t(found.st_size) < exported.bytes)
    return nullptr;
  return Physical::adopt(file.take());
}

Blocks::iterator imported_before(MemoryState &memory, const Exported &exported, int device) {
  for (auto i = memory.blocks.begin(); i != memory.blocks.end(); ++i)
    if (struct stat found;
        i->second.kind == Kind::imported && i->second.device == device &&
        ::fstat(i->second.physical->fd, &found) == 0 && found.st_ino == exported.file)
      return i;
  return memory.blocks.end();
}

// Whether memory of that process is open here which the process has freed.
bool has_freed(MemoryState &memory, std::int32_t owner) {
  for (const auto &[address, block] : memory.blocks) {
    Exported exported;
    std::memcpy(&exported, &block.handle, sizeof(exported));
    Result why = success;
    if (block.kind == Kind::imported && exported.pid == owner &&
        open_memory(exported, why) == nullptr)
      return true;
  }
  return false;
}

Result import_memory(Entry &at, const Exported &exported, Address *address) {
  Result why = success;
  const auto physical = open_memory(exported, why);
  if (physical == nullptr)
    return why;
  MemoryState &memory = *at.state.memory;
  const auto before = imported_before(memory, exported, at.device);
  if (before != memory.blocks.end()) {
    ++before->second.opens;
    *address = before->first;
    return success;
  }
  if (at.state.settings.refusals && has_freed(memory, exported.pid))
    return already_mapped;
  if (physical->device != at.device && !at.state.settings.peers)
    return peer_access_unsupported;
  void *const mapped = map_file(*physical, physical->bytes, PROT_READ | PROT_WRITE);
  if (mapped == nullptr)
    return map_failed;
  *address = Address(mapped);
  Block block{Kind::imported, at.device, exported.bytes, physical->bytes,
              ++memory.blocks_made, physical};
  std::memcpy(&block.handle, &exported, sizeof(exported));
  memory.blocks.emplace(*address, std::move(block));
  return success;
}

} // namespace

Result cuIpcGetMemHandle(IpcHandle *handle, Address address) {
  return with_context([&](Entry &at) -> Result {
    const auto found = block_of(*at.state.memory, address);
    if (handle == nullptr || found == at.state.memory->blocks.end() ||
        found->second.kind != Kind::device)
      return invalid_value;
    struct stat file;
    if (::fstat(found->second.physical->fd, &file) != 0)
      return unknown;
    const std::int32_t pid = ::getpid();
    const Exported exported{magic,
                            pid,
                            found->second.physical->fd,
                            start_of(pid),
                            file.st_ino,
                            found->second.bytes,
                            {}};
    std::memcpy(handle, &exported, sizeof(exported));
    return success;
  });
}

Result cuIpcOpenMemHandle_v2(Address *address, IpcHandle handle, unsigned flags) {
  return with_context([&](Entry &at) -> Result {
    Exported exported;
    std::memcpy(&exported, &handle, sizeof(exported));
    if (address == nullptr || flags != ipc_lazy_peer_access)
      return invalid_value;
    if (exported.magic != magic)
      return invalid_handle;
    if (exported.pid == ::getpid()) // CUDA maps memory of other processes only
      return invalid_context;
    if (const Result unsafe = at.state.streams->refuse_unsafe())
      return unsafe;
    if (const Result failed = at.state.streams->wait_where_allowed(at.lock, at.device))
      return failed;
    return import_memory(at, exported, address);
  });
}

Result cuIpcCloseMemHandle(Address address) {
  return with_context([&](Entry &at) -> Result {
    MemoryState &memory = *at.state.memory;
    if (const Result unsafe = at.state.streams->refuse_unsafe())
      return unsafe;
    if (const Result failed = at.state.streams->wait_for_kernels(at.lock, at.device))
      return failed;
    const auto found = memory.blocks.find(address);
    if (found == memory.blocks.end() || found->second.kind != Kind::imported)
      return invalid_handle;
    if (--found->second.opens > 0)
      return success;
    unmap_freed(memory, address, found->second.mapped);
    memory.blocks.erase(found);
    return success;
  });
}

} // namespace unisono::cuda::emulated

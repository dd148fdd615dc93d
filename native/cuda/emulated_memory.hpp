// Memory of emulated devices: files without a name, mapped into this process.

#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>

#include "cuda/emulated.hpp"

namespace unisono::cuda::emulated {

constexpr std::size_t granularity = std::size_t(2) << 20; // of physical memory

// A file of memory. Made, and destroyed, under the lock of the state.
class Physical {
public:
  // Memory of this process, which counts; null, and why, if there is no more.
  static std::shared_ptr<Physical> make(State &state, int device, std::size_t bytes,
                                        bool exportable, Result &why);
  // Memory of another process, or of this one, by a descriptor that becomes its own; null if
  // it is no such memory.
  static std::shared_ptr<Physical> adopt(int fd);
  ~Physical();

  int fd = -1;
  int device = 0;
  std::size_t bytes = 0;
  bool exportable = false;

private:
  std::uint64_t *counted_ = nullptr;
};

enum class Kind {
  device,     // cuMemAlloc
  host,       // cuMemHostAlloc
  registered, // cuMemHostRegister: memory that the process has mapped itself
  imported,   // cuIpcOpenMemHandle
  mapped,     // cuMemMap
};

// Memory at addresses of this process.
struct Block {
  Kind kind;
  int device;
  std::size_t bytes;  // that were asked for
  std::size_t mapped; // in whole pages
  std::uint64_t number; // never used again
  std::shared_ptr<Physical> physical; // not of Kind::host and Kind::registered
  unsigned opens = 1;                 // of Kind::imported
  IpcHandle handle = {};              // likewise
  std::map<int, int> access = {};     // of Kind::mapped: flags by device
};

using Blocks = std::map<Address, Block>;

struct MemoryState {
  Blocks blocks;
  std::map<Address, std::size_t> reserved; // by cuMemAddressReserve
  std::deque<std::pair<Address, std::size_t>> freed; // the last ones: nothing is mapped there
  Table<Allocation, Physical> handles;
  std::uint64_t blocks_made = 0;
};

// The block in which an address is, or the end.
Blocks::iterator block_of(MemoryState &memory, Address address);

// What a range of addresses is.
enum class Range { unknown, known, wrong }; // not ours; allocated; only in part
Range range_of(MemoryState &memory, Address address, std::size_t bytes);
// Whether work on a device can access all of it now; memory that is not ours it can.
bool accessible(State &state, Address address, std::size_t bytes, bool writes);

// Whether work on a device reaches an address: not memory of another device without access
// to peers. What the driver does not know is the caller's affair.
bool reachable(State &state, int device, Address address);

// Frees what the blocks of a device hold.
void free_memory_of(State &state, int device);

std::size_t whole_pages(std::size_t bytes);
// Fills fresh memory with something: what it holds is not defined, as on a device.
void scribble(void *at, std::size_t bytes);
void *map_file(const Physical &physical, std::size_t bytes, int protection, void *at = nullptr);
// Unmaps, and keeps the addresses free for a while: what uses them then fails.
void unmap_freed(MemoryState &memory, Address address, std::size_t bytes);

} // namespace unisono::cuda::emulated

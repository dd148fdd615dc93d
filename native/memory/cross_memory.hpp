// Reading and writing the memory of another process of this host, without its help.
//
// A buffer that others can map is reached by its address. One that is private to its
// process is reached through the kernel (process_vm_readv, process_vm_writev), which copies
// once, straight from one process to the other, if the system lets us: the user must be the
// same and no policy against it. Whether it does is tried, not guessed.

#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// Where something lies, and in which process; 0 for memory that is mapped here.
struct Reach {
  std::byte *at = nullptr;
  int pid = 0;
  Reach operator+(std::size_t bytes) const { return {at + bytes, pid}; }
};

// False if it could not be done, in full: the process is gone, or its memory is.
bool fetch(std::byte *to, Reach from, std::size_t bytes);
bool put(Reach to, const std::byte *from, std::size_t bytes);

// Whether the kernel can reach this memory of our own as it would that of others. Some
// that belongs to devices it cannot.
bool reachable(std::byte *data, std::size_t bytes, bool for_writing);

} // namespace unisono

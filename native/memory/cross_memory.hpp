// Reads and writes of the memory of another process on this host, without its
// participation.
//
// A buffer in a mapped segment is accessed by its address. Private memory of another
// process is accessed through the kernel (process_vm_readv, process_vm_writev: cross memory
// attach), which copies once, directly between the two processes. The system allows it
// between processes of one user unless a policy forbids it; so it is tested, not assumed.

#pragma once

#include <cstddef>
#include <cstdint>

namespace unisono {

// An address, and the process it is valid in; 0 for memory that is mapped here.
struct PeerAddress {
  std::byte *at = nullptr;
  int pid = 0;
  PeerAddress operator+(std::size_t bytes) const { return {at + bytes, pid}; }
};

// False if not all bytes could be copied: the process has ended, or has unmapped them.
bool copy_from_peer(std::byte *to, PeerAddress from, std::size_t bytes);
bool copy_to_peer(PeerAddress to, const std::byte *from, std::size_t bytes);

// Whether the kernel can access this memory of the calling process as it would that of
// others; for some device memory it cannot.
bool accessible(std::byte *data, std::size_t bytes, bool for_writing);

} // namespace unisono

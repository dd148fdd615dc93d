// Direct access to the buffers of other ranks of a communicator.
//
// Buffers in shared segments are mapped. Private memory is accessed through the kernel if
// every rank can access every other's: each rank tests it once, on a probe word, and
// publishes the result.

#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "memory/host_peers.hpp"
#include "memory/layout.hpp"

namespace unisono {

class ZeroCopy {
public:
  ZeroCopy(std::shared_ptr<HostPeers> host_peers, const Layout &layout,
           std::vector<std::size_t> ranks, std::vector<std::size_t> local_ranks,
           std::size_t rank, std::uint64_t id);
  ZeroCopy(const ZeroCopy &) = delete; // other ranks know the address of its probe
  ZeroCopy &operator=(const ZeroCopy &) = delete;

  // Whether all ranks can access each other's private memory; tests it if necessary.
  enum Access : std::uint64_t { untested, granted, denied };
  Access test_access();
  Access access() const { return access_; }
  // Whether the kernel can access this buffer of this rank; caches positive results.
  bool accessible(const std::byte *data, std::size_t bytes, bool for_writing);

  // Marks this rank as writing to buffers of others in call `seq`, unless a failure ends it.
  class WriteGuard {
  public:
    WriteGuard(const ZeroCopy &zero_copy, std::uint64_t seq, bool really);
    ~WriteGuard();
    WriteGuard(const WriteGuard &) = delete;
    WriteGuard &operator=(const WriteGuard &) = delete;
    bool allowed() const { return allowed_; }

  private:
    Word *writing_ = nullptr;
    bool allowed_ = true;
  };
  // After an abort, before the buffers of call `seq` are reused: lets other ranks know, and
  // waits until none writes to them any more, for at most a second. After that `has_writers`
  // is still true if a rank was stopped while writing.
  void give_up(std::uint64_t seq) const;
  // Whether a rank of this host has given up this call: what was read from its buffers may
  // be other data.
  bool given_up(std::uint64_t seq) const;
  bool has_writers() const;

  // Temporary memory, for the thread that advances the collectives.
  std::byte *scratch(std::size_t bytes);

private:
  std::shared_ptr<HostPeers> host_peers_;
  Layout layout_;
  std::vector<std::size_t> ranks_, local_ranks_; // of all, those that share memory
  std::size_t rank_;
  std::uint64_t probe_;
  Access access_ = untested;
  std::vector<std::pair<const std::byte *, std::size_t>> accessible_;
  std::vector<std::byte> scratch_;
};

} // namespace unisono

// Copies of pages that other threads may write to while they are replaced.
//
// The old pages are kept in a pipe, which holds references to them: so what was written
// between the copy and the replacement is found afterwards.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace unisono {

class PageCopies {
public:
  // With `keeps`, for `copy`: throws if there is no descriptor for the pipe.
  explicit PageCopies(bool keeps);
  ~PageCopies();
  PageCopies(const PageCopies &) = delete;
  PageCopies &operator=(const PageCopies &) = delete;

  static std::size_t page(); // bytes
  std::size_t most() const { return most_; } // bytes of one copy

  // Copies `bytes` at `from`, and keeps references to their pages.
  void copy(std::byte *from, std::size_t bytes);
  // The same for pages that stay accessible at `from`, where they can be compared later.
  void copy_accessible(const std::byte *from, std::size_t bytes);
  const std::byte *copied() const { return copied_.data(); }
  // After the replacement: brings what was written to the old pages to `to`, unless it was
  // written there as well. Whether anything was.
  bool repair(std::byte *to);
  bool repair(std::byte *to, const std::byte *old);

private:
  bool keep(std::byte *from, std::size_t bytes);
  bool read_kept();
  void empty();

  int pipe_[2] = {-1, -1}; // -1: the system has no vmsplice
  std::size_t most_, bytes_ = 0;
  bool kept_ = false;
  std::vector<std::byte> copied_, old_;
};

} // namespace unisono

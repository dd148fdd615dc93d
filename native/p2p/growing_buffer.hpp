// A buffer for bytes whose announced number is not trusted.
//
// Memory is allocated for what has arrived, and for at most as much again.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

namespace unisono {

class GrowingBuffer {
public:
  std::size_t size() const { return size_; }

  // Space for the next bytes, of which at most `most` are still to come. `add` says how
  // many were written.
  std::span<std::byte> room(std::size_t most) {
    if (most == 0)
      return {};
    if (used_ == last_) {
      const std::size_t bytes = std::min(std::clamp(size_, smallest, largest), most);
      pieces_.reserve(pieces_.size() + 1);
      pieces_.push_back({std::make_unique_for_overwrite<std::byte[]>(bytes), bytes});
      last_ = bytes;
      used_ = 0;
    }
    return {pieces_.back().data.get() + used_, std::min(last_ - used_, most)};
  }
  void add(std::size_t bytes) {
    used_ += bytes;
    size_ += bytes;
  }
  void copy_to(std::byte *to) const {
    std::size_t left = size_;
    for (const Piece &piece : pieces_) {
      const std::size_t some = std::min(piece.bytes, left);
      std::memcpy(to, piece.data.get(), some);
      to += some;
      left -= some;
    }
  }

private:
  static constexpr std::size_t smallest = 4 << 10, largest = 4 << 20;
  struct Piece {
    std::unique_ptr<std::byte[]> data;
    std::size_t bytes;
  };
  std::vector<Piece> pieces_;
  std::size_t size_ = 0; // of all pieces
  std::size_t last_ = 0, used_ = 0; // of the last piece
};

} // namespace unisono

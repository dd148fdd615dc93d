// What one action does where codes are transferred instead of values.
//
// Buffers hold values of 32 or 16 bits; windows and streams hold codes. An action adds up
// its sources in float32, a slice at a time so that the slice stays in the cache, encodes
// the sum if other ranks read it, and stores either the sum or the decoded code. A code
// that is only forwarded is not encoded again.

#include <algorithm>
#include <cstring>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "support/failpoint.hpp"

namespace unisono {

// If every reader is on another host, codes are kept in private memory. It can be larger
// than a window, so a piece waits less often for the one before.
std::byte *Collective::code_address(std::size_t rank, std::int32_t index,
                                  std::int64_t piece) {
  if (const std::size_t room = plan_->coding.room; room > 0) {
    codes_.resize(std::max(codes_.size(), 2 * room));
    return codes_.data() + std::size_t(piece & 1) * room +
           std::size_t(index) * plan_->coding.stride;
  }
  return comm_.layout().window(rank, first_generation_ + std::uint64_t(piece)) +
         plan_->coding.at + std::size_t(index) * plan_->coding.stride;
}

bool Collective::is_code(const Program::Source &source) const {
  return source.home == Program::code || source.home == Program::stream;
}

std::size_t Collective::run_coded_action(const Program::Action &action) {
  const Movement m = movement(action);
  for (std::size_t s = 0; s < m.sources; ++s)
    operands_[s] =
        address(program_->sources[std::size_t(action.first_source) + s], m.first).at;
  combine(m, 0, m.count);
  return no_rank;
}

// Computes elements first..first+count-1 of the piece from the operands, which begin there.
// A cut is at the end of a block. A decoded value is written directly to the output where
// possible.
void Collective::combine(const Movement &m, std::size_t first, std::size_t count) {
  const Plan::Coding &c = plan_->coding;
  slice_.resize(2 * c.slice);
  std::byte *code_at =
      m.action.code < 0 ? nullptr : code_address(comm_.rank(), m.action.code, piece_);
  const bool code_comes = is_code(program_->sources[std::size_t(m.action.first_source)]);
  const bool handed_on = m.sources == 1 && code_comes;
  const bool plain = c.dtype == DType::float32;
  const bool as_it_is = m.sources == 1 && !code_comes && plain;
  const bool straight = plain && m.output != nullptr && m.window == nullptr;
  const bool kept = m.output != nullptr || m.window != nullptr;
  const std::uint64_t slot = (comm_.rank() << action_bits | action_) << 24 | std::uint64_t(piece_);
  const std::uint64_t key = c.by_chance ? codec_key(seq, slot) : 0;
  const auto *operand = static_cast<const std::byte *>(operands_[0]);
  for (std::size_t done = 0; done < count; done += c.slice) {
    const std::size_t some = std::min(c.slice, count - done), bytes = c.bytes(some);
    const std::size_t at = (first + done) * plan_->itemsize;
    std::byte *code = code_at == nullptr ? nullptr : code_at + c.bytes(first + done);
    const std::byte *says = code;
    float *found = straight ? reinterpret_cast<float *>(m.output + at) : slice_.data();
    const float *values = found;
    if (handed_on) {
      says = operand + c.bytes(done);
      if (code != nullptr && code != says)
        std::memcpy(code, says, bytes);
    } else {
      values = as_it_is ? reinterpret_cast<const float *>(operand) + done : slice_.data();
      if (!as_it_is)
        sum(m, done, some);
      if (code != nullptr) {
        const std::int64_t begun = traced_ ? now_ns() : 0;
        c.codec->encode_at(code, values, some, c.block, key, first + done);
        encoded += bytes;
        if (traced_)
          encoding_ += now_ns() - begun;
      }
    }
    if (handed_on ? kept : m.action.back != 0) {
      c.codec->decode(found, says, some, c.block);
      decoded += bytes;
      values = found;
    }
    store(m, at, values, some);
  }
}

// Adds up the operands' elements from `done` on, in order.
void Collective::sum(const Movement &m, std::size_t done, std::size_t count) {
  const Plan::Coding &c = plan_->coding;
  float *values = slice_.data(), *more = values + c.slice;
  const auto *source = &program_->sources[std::size_t(m.action.first_source)];
  for (std::size_t s = 0; s < m.sources; ++s) {
    const auto *from = static_cast<const std::byte *>(operands_[s]);
    if (is_code(source[s])) {
      (s == 0 ? c.codec->decode : c.codec->add)(values, from + c.bytes(done), count, c.block);
      decoded += c.bytes(count);
      continue;
    }
    widen(s == 0 ? values : more, from + done * plan_->itemsize, c.dtype, count);
    for (std::size_t i = 0; s > 0 && i < count; ++i)
      values[i] += more[i];
  }
  if (m.action.completes && plan_->divisor > 1)
    for (std::size_t i = 0; i < count; ++i)
      values[i] /= float(plan_->divisor);
}

void Collective::store(const Movement &m, std::size_t at, const float *values,
                       std::size_t count) const {
  for (std::byte *to : {m.output, m.window})
    if (to != nullptr && reinterpret_cast<const std::byte *>(values) != to + at)
      narrow(to + at, values, plan_->coding.dtype, count);
}

// Like `receive`, in frames of codes; `at_` counts elements.
Status Collective::receive_coded(const Program::Action &action) {
  const Movement m = movement(action);
  const Plan::Coding &c = plan_->coding;
  const std::size_t room = c.bytes(c.frame);
  std::byte *scratch = comm_.zero_copy().scratch(room * m.sources);
  const auto *source = &program_->sources[std::size_t(action.first_source)];
  do {
    const std::size_t some = std::min(c.frame, m.count - at_);
    for (; arrived_ < m.sources; ++arrived_) {
      const Program::Source &from = source[arrived_];
      if (from.home != Program::stream) {
        const std::size_t offset = is_code(from) ? c.bytes(at_) : at_ * plan_->itemsize;
        operands_[arrived_] = address(from, m.first).at + offset;
        continue;
      }
      const auto rank = std::size_t(from.rank);
      std::byte *into = scratch + arrived_ * room;
      if (m.sources == 1 && action.code >= 0)
        into = code_address(comm_.rank(), action.code, piece_) + c.bytes(at_);
      const FrameId frame_id{seq, plan_->fingerprint, std::uint32_t(piece_),
                      std::uint32_t(from.index)};
      const Io io = comm_.receive_stream(rank).take(frame_id, into, c.bytes(some));
      if (io != Io::done)
        return receive_failed(rank, io);
      ++moved;
      awaited_sender_ = no_rank;
      operands_[arrived_] = into;
      received_[rank] += at_ + some == m.count;
    }
    combine(m, at_, some);
    at_ += some;
    arrived_ = 0;
    if (m.sources > 1 || m.count > c.frame)
      send_messages(); // the sockets are ready for more by now
  } while (at_ < m.count);
  at_ = 0;
  return unreachable_ == no_rank ? Status::done : Status::blocked;
}

} // namespace unisono

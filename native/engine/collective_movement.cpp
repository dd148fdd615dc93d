// What one action of a program does with bytes: copy or reduce from its sources to its
// destinations.

#include <algorithm>
#include <cstring>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "kernels/copy.hpp"
#include "support/failpoint.hpp"

namespace unisono {

namespace {

// A result with two destinations is made in blocks, so that the second write finds the
// block in the cache: small blocks where both are mapped, larger ones where each access is
// a system call.
constexpr std::size_t mapped_block = 8192;
constexpr std::size_t cross_process_bytes = 512 << 10; // of all sources together
constexpr std::size_t smallest_cross_process_block = 16 << 10,
                      largest_cross_process_block = 256 << 10;

void plain_copy(std::byte *to, const std::byte *from, std::size_t bytes) {
  std::memcpy(to, from, bytes);
}

// So that all blocks in use at a time stay in the cache.
std::size_t cross_process_block(std::size_t blocks) {
  return std::clamp(cross_process_bytes / blocks, smallest_cross_process_block,
                    largest_cross_process_block);
}

} // namespace

std::byte *Collective::window_address(std::size_t rank, std::int32_t index,
                                      std::int64_t piece) {
  const std::size_t at =
      std::size_t(index) * std::size_t(plan_->piece[exposed_]) * plan_->itemsize;
  if (plan_->in_header)
    return comm_.layout().block(rank).headers[seq & 1].payload + at;
  return comm_.layout().window(rank, first_generation_ + std::uint64_t(piece)) + at;
}

PeerAddress Collective::address(const Program::Source &source, std::int64_t first) {
  const auto rank = std::size_t(source.rank), index = std::size_t(source.index);
  const bool own = rank == comm_.rank();
  switch (source.home) {
  case Program::input:
    return (own ? PeerAddress{const_cast<std::byte *>(input_)} : inputs_[rank]) +
           std::size_t(plan_->input_at[index] + first) * plan_->itemsize;
  case Program::output:
    return (own ? PeerAddress{output_} : outputs_[rank]) +
           std::size_t(plan_->output_at[index] + first) * plan_->itemsize;
  case Program::code:
    return {code_address(rank, source.index, piece_)};
  default:
    return {window_address(rank, source.index, piece_)};
  }
}

// The first element of a piece of a chunk, and the number of its elements.
Collective::Span Collective::span(std::int32_t chunk, std::int64_t piece) const {
  const std::int64_t size = plan_->size[std::size_t(chunk)], most = plan_->piece[exposed_];
  const std::int64_t first = std::min(piece * most, size);
  return {first, std::size_t(std::min(most, size - first))};
}

Collective::Movement Collective::movement(const Program::Action &action) {
  const auto [first, count] = span(action.chunk, piece_);
  const auto sources = std::size_t(action.end_source - action.first_source);
  std::byte *output =
      action.output < 0 ? nullptr
                        : output_ + std::size_t(plan_->output_at[std::size_t(action.output)] +
                                                first) * plan_->itemsize;
  const bool streams =
      output != nullptr && plan_->streams && !output_is_cached(action, sources);
  return {action, first,   count,
          count * plan_->itemsize, sources,
          action.window < 0 ? nullptr : window_address(comm_.rank(), action.window, piece_),
          output, streams, false,
          action.first_delivery < action.end_delivery};
}

std::size_t Collective::run_action(const Program::Action &action) {
  if (plan_->coding.codec != nullptr)
    return run_coded_action(action);
  Movement m = movement(action);
  if (m.count == 0)
    return no_rank;
  for (std::size_t s = 0; s < m.sources; ++s) {
    addresses_[s] =
        address(program_->sources[std::size_t(action.first_source) + s], m.first);
    m.cross_process = m.cross_process || addresses_[s].pid != 0;
  }
  return m.sources == 1 ? copy(m) : reduce(m);
}

std::size_t Collective::copy(const Movement &m) {
  const ZeroCopy::WriteGuard touch(comm_.zero_copy(), seq, m.delivers);
  if (!touch.allowed())
    return first_destination(m);
  // What is forwarded to other ranks is copied in blocks, while they are in the cache.
  const std::size_t block =
      m.delivers && m.cross_process ? cross_process_block(2) : m.bytes;
  std::byte *home = m.window ? m.window : m.output;
  std::byte *scratch =
      home == nullptr && m.cross_process ? comm_.zero_copy().scratch(block) : nullptr;
  for (std::size_t at = 0; at < m.bytes; at += block) {
    const std::size_t bytes = std::min(block, m.bytes - at);
    std::byte *first = addresses_[0].at + at;
    if (m.cross_process || m.window != nullptr) {
      first = home ? home + at : scratch;
      if (!copy_from_peer(first, addresses_[0] + at, bytes))
        return std::size_t(program_->sources[std::size_t(m.action.first_source)].rank);
    }
    if (m.output != nullptr && m.output + at != first)
      (m.streams ? stream_copy : plain_copy)(m.output + at, first, bytes);
    const std::size_t lost = deliver(m, at, first, bytes);
    if (lost != no_rank)
      return lost;
  }
  return no_rank;
}

std::size_t Collective::reduce(const Movement &m) {
  const bool once = m.output == nullptr || (m.window == nullptr && !m.streams);
  if (m.cross_process || m.delivers || !once)
    return reduce_in_blocks(m);
  for (std::size_t s = 0; s < m.sources; ++s)
    operands_[s] = addresses_[s].at;
  plan_->kernel(m.window ? m.window : m.output, operands_.data(), m.sources, m.count,
                m.action.completes ? plan_->divisor : 1);
  return no_rank;
}

std::size_t Collective::reduce_in_blocks(const Movement &m) {
  const ZeroCopy::WriteGuard touch(comm_.zero_copy(), seq, m.delivers);
  if (!touch.allowed())
    return first_destination(m);
  const std::size_t block_bytes =
      m.cross_process ? cross_process_block(comm_.size()) : mapped_block;
  std::byte *scratch = comm_.zero_copy().scratch(block_bytes * (m.sources + 1));
  const std::size_t block = block_bytes / plan_->itemsize;
  const auto *source = &program_->sources[std::size_t(m.action.first_source)];
  for (std::size_t done = 0; done < m.count; done += block) {
    const std::size_t some = std::min(block, m.count - done);
    const std::size_t at = done * plan_->itemsize, bytes = some * plan_->itemsize;
    for (std::size_t s = 0; s < m.sources; ++s) {
      operands_[s] = addresses_[s].at + at;
      if (addresses_[s].pid == 0)
        continue;
      std::byte *fetched = scratch + (s + 1) * block_bytes;
      if (!copy_from_peer(fetched, addresses_[s] + at, bytes))
        return std::size_t(source[s].rank);
      operands_[s] = fetched;
    }
    const bool kept = m.window != nullptr || (m.output != nullptr && !m.streams);
    std::byte *made = kept ? (m.window ? m.window : m.output) + at : scratch;
    plan_->kernel(made, operands_.data(), m.sources, some,
                  m.action.completes ? plan_->divisor : 1);
    if (m.output != nullptr && made != m.output + at)
      (m.streams ? stream_copy : plain_copy)(m.output + at, made, bytes);
    const std::size_t lost = deliver(m, at, made, bytes);
    if (lost != no_rank)
      return lost;
  }
  return no_rank;
}

// After an abort nothing is delivered; the first destination is reported as unreachable.
std::size_t Collective::first_destination(const Movement &m) const {
  return std::size_t(program_->deliveries[std::size_t(m.action.first_delivery)]);
}

// Writes a part of the result to the ranks that need it.
std::size_t Collective::deliver(const Movement &m, std::size_t at, const std::byte *from,
                                std::size_t bytes) {
  if (!m.delivers)
    return no_rank;
  const std::int64_t begins = plan_->output_at[std::size_t(m.action.chunk)] + m.first;
  for (auto d = m.action.first_delivery; d < m.action.end_delivery; ++d) {
    const auto rank = std::size_t(program_->deliveries[std::size_t(d)]);
    failpoint("deliver");
    const PeerAddress to = outputs_[rank] + (std::size_t(begins) * plan_->itemsize + at);
    if (comm_.failure().ends(seq) || !copy_to_peer(to, from, bytes))
      return rank;
  }
  return no_rank;
}

// Whether this piece of the output is in the cache because it was just read as input.
bool Collective::output_is_cached(const Program::Action &action,
                                  std::size_t sources) const {
  if (plan_->input_bytes == 0 || (sources == 1 && (exposed_ & 1) != 0))
    return false;
  const auto chunk = std::size_t(action.output);
  const auto in = plan_->input_at[chunk], out = plan_->output_at[chunk];
  return input_ + std::size_t(in) * plan_->itemsize ==
         output_ + std::size_t(out) * plan_->itemsize;
}

} // namespace unisono

// Buffers that a collective uses in place: what this rank exposes, what all ranks expose,
// and where the buffers of other ranks are mapped.

#include <cstring>

#include "engine/collective.hpp"
#include "engine/comm.hpp"
#include "memory/host_peers.hpp"
#include "memory/shared_pages.hpp"

namespace unisono {

// Publishes where other ranks can access this rank's buffers, unless a call has failed:
// then a slow rank may still read what this header held two calls ago. An empty buffer,
// which no rank reads, counts as exposed.
void Collective::expose_buffers() {
  if (!plan_->may_expose || (exposed_ != 0 && comm_.local_ranks().size() == 1))
    return;
  ExposedBuffer exposed[2] = {};
  if (expose(input_, plan_->input_bytes, false, exposed[0], input_pages_))
    flags_ |= Header::exposes_input;
  if (expose(output_, plan_->output_bytes, true, exposed[1], output_pages_))
    flags_ |= Header::exposes_output;
  use_alias();
  std::memcpy(comm_.layout().block(comm_.rank()).headers[seq & 1].payload, exposed,
              sizeof exposed);
}

bool Collective::expose(const std::byte *data, std::size_t bytes, bool for_writing,
                       ExposedBuffer &exposed, std::shared_ptr<SharedPages> &pages) {
  if (bytes == 0)
    return true;
  auto found = comm_.host_peers().locate(data, bytes);
  if (found) {
    exposed = found->exposed;
    pages = std::move(found->pages);
  } else if (exposed_ != 0 || (plan_->may_cross_memory &&
                             comm_.zero_copy().test_access() == ZeroCopy::granted &&
                             comm_.zero_copy().accessible(data, bytes, for_writing)))
    exposed = {ExposedBuffer::own, reinterpret_cast<std::uintptr_t>(data)};
  else
    return false;
  return true;
}

// Registered memory is used where its segment is mapped, because the ends of it are shared
// nowhere else. What the output has there is needed too: not all of it may be written.
void Collective::use_alias() {
  if (input_pages_) {
    input_pages_->copy_ends_in(input_, plan_->input_bytes);
    input_ = input_pages_->alias(input_);
  }
  if (output_pages_) {
    own_output_ = output_;
    output_pages_->copy_ends_in(output_, plan_->output_bytes);
    output_ = output_pages_->alias(output_);
  }
}

void Collective::return_ends() {
  if (output_pages_)
    output_pages_->copy_ends_out(own_output_, plan_->output_bytes);
}

// Registered memory whose registration has ended meanwhile is private again after this.
void Collective::release_buffers() {
  input_pages_.reset();
  output_pages_.reset();
}

Status Collective::map_exposed() {
  const std::size_t n = comm_.size();
  if (plan_->always_exposed < 0) {
    if (!plan_->may_expose ||
        (flags_ & (Header::exposes_input | Header::exposes_output)) == 0)
      return Status::done;
    std::uint64_t all = flags_;
    for (const std::size_t q : comm_.local_ranks())
      all &= comm_.layout().block(q).headers[seq & 1].flags;
    exposed_ = unsigned(all >> 1 & 3);
    if (!plan_->programs[exposed_])
      exposed_ = 0;
  }
  if (exposed_ == 0)
    return Status::done;
  const Program &program = *plan_->programs[exposed_];
  inputs_.assign(n, {});
  outputs_.assign(n, {});
  mapped_.clear();
  // Maps only buffers that the program uses: their owners stay in this call until they have
  // been used. The owner of any other buffer may have left already.
  for (const Program::Source &source : program.sources)
    if (source.home != Program::window && source.home != Program::stream &&
        !map_buffer(std::size_t(source.rank), source.home == Program::input))
      return Status::blocked;
  for (const std::int32_t q : program.deliveries)
    if (!map_buffer(std::size_t(q), false))
      return Status::blocked;
  program_ = &program;
  return Status::done;
}

// Finds a buffer of another rank; false if its descriptor has not arrived.
bool Collective::map_buffer(std::size_t rank, bool input) {
  PeerAddress &found = (input ? inputs_ : outputs_)[rank];
  if (rank == comm_.rank() || found.at != nullptr)
    return true;
  ExposedBuffer exposed[2];
  std::memcpy(exposed, comm_.layout().block(rank).headers[seq & 1].payload, sizeof exposed);
  const ExposedBuffer &from = exposed[input ? 0 : 1];
  if (from.segment == 0)
    return true; // an empty buffer
  found = comm_.host_peers().resolve(comm_.world_rank(rank), from, mapped_);
  return found.at != nullptr;
}

} // namespace unisono

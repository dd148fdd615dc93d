#include "test/model/world.hpp"

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>

#include "engine/progress.hpp"
#include "net/event.hpp"

// The state of a process beside its communicators, none of which is modelled.
namespace unisono {
Progress::~Progress() = default;
void Progress::add(Comm *) {}
void Progress::remove(Comm *) {}
void Progress::wake() {}
} // namespace unisono

namespace model {

using namespace unisono;

namespace {

std::map<std::string, Lowered> all_lowered;

// Kept for all executions; they are only written.
std::shared_ptr<Recorder> recorder;
std::shared_ptr<Progress> progress;

void sum(void *out, const void *const *sources, std::size_t num_sources, std::size_t count,
         std::uint32_t) {
  auto *to = static_cast<Element *>(out);
  for (std::size_t i = 0; i < count; ++i) {
    Element total = 0;
    for (std::size_t s = 0; s < num_sources; ++s)
      total += static_cast<const Element *>(sources[s])[i];
    to[i] = total;
  }
}

template <class Row> std::vector<Row> read_rows(std::istream &from) {
  std::size_t count = 0;
  from >> count;
  std::vector<Row> rows(count);
  for (Row &row : rows) {
    std::int32_t fields[sizeof(Row) / sizeof(std::int32_t)];
    for (std::int32_t &field : fields)
      from >> field;
    std::memmove(&row, fields, sizeof row);
  }
  return rows;
}

std::vector<std::int64_t> read_offsets(std::istream &from) {
  std::vector<std::int64_t> offsets;
  for (const std::int32_t offset : read_rows<std::int32_t>(from))
    offsets.push_back(offset);
  return offsets;
}

std::shared_ptr<Program> read_program(std::istream &from) {
  auto program = std::make_shared<Program>();
  program->actions = read_rows<Program::Action>(from);
  program->sources = read_rows<Program::Source>(from);
  program->waits = read_rows<Program::Wait>(from);
  program->exits = read_rows<Program::Wait>(from);
  program->lead = read_rows<std::int32_t>(from);
  program->readers = read_rows<std::int32_t>(from);
  program->deliveries = read_rows<std::int32_t>(from);
  return program;
}

} // namespace

void read_programs(const char *path) {
  recorder = std::make_shared<Recorder>();
  progress = std::make_shared<Progress>();
  std::ifstream from(path);
  std::string name;
  int n = 0;
  while (from >> name >> n) {
    Lowered made;
    made.input_at = read_offsets(from);
    made.output_at = read_offsets(from);
    for (int exposed = 0; exposed < 4; ++exposed) {
      made.programs.emplace_back();
      for (int rank = 0; rank < n; ++rank)
        made.programs.back().push_back(read_program(from));
    }
    all_lowered.emplace(name + std::to_string(n), std::move(made));
  }
}

const Lowered &lowered(const std::string &name, int n) {
  return all_lowered.at(name + std::to_string(n));
}

std::shared_ptr<const Plan> make_plan(const std::string &name, int n, int rank, Cut cut,
                                      std::uint64_t fingerprint) {
  const Lowered &made = lowered(name, n);
  const auto shared = std::make_shared<Plan>();
  Plan &plan = *shared;
  for (const std::size_t exposed : {0, 3})
    if (exposed == 0 || cut.exposes)
      plan.programs[exposed] = made.programs[exposed][std::size_t(rank)];
  for (std::size_t exposed = 0; exposed < 4; ++exposed) {
    plan.piece[exposed] = 1;
    plan.pieces[exposed] = cut.pieces;
  }
  for (std::size_t chunk = 0; chunk < made.input_at.size(); ++chunk) {
    plan.input_at.push_back(made.input_at[chunk] * cut.pieces);
    plan.output_at.push_back(made.output_at[chunk] * cut.pieces);
    plan.size.push_back(cut.pieces);
  }
  plan.itemsize = sizeof(Element);
  plan.input_bytes = plan.output_bytes = sizeof(Element);
  plan.kernel = sum;
  plan.in_header = cut.in_header;
  plan.may_expose = cut.exposes;
  plan.fingerprint = fingerprint;
  return shared;
}

World::World(int n) : n(n), table(std::make_shared<PeerTable>(std::size_t(n))) {
  constexpr std::size_t half = 64;
  std::vector<std::size_t> ranks;
  for (int r = 0; r < n; ++r)
    ranks.push_back(std::size_t(r));
  std::shared_ptr<Descriptor> fd;
  const auto memory =
      Memory::make(Layout::bytes(std::size_t(n), std::size_t(n), half), fd);
  for (int r = 0; r < n; ++r) {
    Engine engine{std::make_shared<HostPeers>(std::size_t(r), table), recorder, progress,
                  nullptr};
    comms.push_back(std::make_unique<Comm>(std::move(engine), ranks, std::size_t(r), ranks,
                                           memory, half, 1, 1));
  }
  const Layout &layout = comms[0]->layout();
  name(&layout.control().abort, "abort");
  name(&layout.control().sleepers, "sleepers");
  for (int r = 0; r < n; ++r) {
    RankBlock &block = layout.block(std::size_t(r));
    const std::string of = " of rank " + std::to_string(r);
    for (int parity = 0; parity < 2; ++parity) {
      name(&block.headers[parity], "header " + std::to_string(parity) + of);
      name(layout.window(std::size_t(r), std::uint64_t(parity)),
           "window " + std::to_string(parity) + of);
    }
    name(&block.notes, "notes" + of);
    name(&block.progress, "progress" + of);
    name(&block.asleep, "asleep" + of);
    name(&block.closed, "closed" + of);
    name(&block.outbox, "outbox" + of);
    name(&block.waits_for, "waits_for" + of);
    name(&block.writing, "writing" + of);
    name(&block.given_up, "given_up" + of);
    // Read for error messages while they are written: get() in engine/comm_failure.cpp.
    may_race(&block.notes, sizeof block.notes);
    may_race(&block.differing, sizeof block.differing);
  }
}

bool call(Comm &comm, std::shared_ptr<const Plan> plan, const Element *input, Element *output, Waits how,
          Failure *failure) {
  Collective *op = comm.begin_inline(std::move(plan), input, output, 0);
  check(op != nullptr, "a call finds another one in its way");
  bool done = true;
  while (!comm.try_drive(*op, 0)) {
    const Failure stopped{FailureKind::interrupted, std::uint32_t(comm.rank()),
                          std::uint32_t(comm.rank()), std::uint32_t(op->seq)};
    Status status = Status::failed;
    if (how == Waits::impatient)
      op->failure = comm.abort(stopped);
    else
      status = how == Waits::trusting ? Status::blocked : comm.check_blocked(*op);
    if (status == Status::blocked) {
      await();
      continue;
    }
    done = status == Status::done;
    if (!done)
      comm.zero_copy().give_up(op->seq);
    op->finish(done ? Task::succeeded : Task::broken);
    break;
  }
  done = op->state.load(std::memory_order_relaxed) == Task::succeeded;
  if (failure != nullptr)
    *failure = op->failure;
  comm.end_inline();
  return done;
}

} // namespace model

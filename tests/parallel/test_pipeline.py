"""Pipelines: the gradient of the whole batch, in any order of micro-batches."""

import functools
import importlib
import sys

import pytest
import torch
from nets import NS, STEPS, made, same, weights
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument, CollectiveMismatch
from unisono.parallel import Mesh, Pipeline, PlainDDP
from unisono.parallel.model.pipeline_order import ORDERS, table
from unisono.parallel.model.pipeline_step import HEADER, PipelineStep

LAYERS = 6
AGREED, LOSS = 8, 8
"""Bytes by which ranks tell each other how a step begins, and what came of it."""


class Deep(nn.Sequential):
    def __init__(self):
        parts = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(LAYERS - 1)]
        super().__init__(nn.Embedding(11, 5), *parts)


def deep(seed=0):
    return made(Deep, seed).double()


def batch(step, replica=0, rows=7):
    source = torch.Generator().manual_seed(1000 * step + replica)
    x = torch.randint(11, (rows, 3), generator=source)
    return x, torch.randn(rows, 3, 5, generator=source, dtype=torch.float64)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@functools.cache
def alone(replicas=1):
    model = deep()
    opt = sgd(model.parameters())
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        drawn = [batch(step, replica) for replica in range(replicas)]
        x, y = (torch.cat(part) for part in zip(*drawn, strict=True))
        loss = functional.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses, weights(model)


def learn(pipe, replica=0, after=lambda: None):
    opt = sgd(pipe.parameters())
    losses = []
    for step in range(STEPS):
        opt.zero_grad()
        x, y = batch(step, replica)
        losses.append(pipe.step(x, y, functional.mse_loss))
        after()
        opt.step()
    return losses


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("m", [1, 3, 7])
def test_pipeline_equals_one_process(threads, n, order, m):
    """Seven rows in up to seven micro-batches, also uneven ones."""
    losses, right = alone()

    def run(comm):
        pipe = Pipeline(deep(comm.rank), comm, microbatches=m, order=order)
        mine = learn(pipe)
        return mine, pipe.whole_state()

    for mine, state in threads(n, run):
        assert mine == pytest.approx(losses, rel=1e-11)
        same(state, right, 1e-11)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3])
def test_gpipe_and_1f1b_have_the_same_bits(threads, n):
    def run(comm, order):
        pipe = Pipeline(deep(), comm, microbatches=4, order=order)
        return learn(pipe), pipe.whole_state()

    one, other = (threads(n, run, order)[0] for order in ORDERS)
    assert one[0] == other[0]
    same(one[1], other[1])


def in_a_process(rank):
    with rank.init() as comm:
        pipe = Pipeline(deep(), comm, microbatches=3, at=[1, 3])
        return learn(pipe), list(pipe.layers)


@pytest.mark.sweep
def test_pipeline_on_processes_equals_one_process(processes):
    losses, _ = alone()
    found = processes(3, in_a_process)
    for mine, _ in found:
        assert mine == pytest.approx(losses, rel=1e-11)
    assert [held for _, held in found] == [["0"], ["1", "2"], ["3", "4", "5"]]


def test_large_messages_in_both_directions_do_not_deadlock(threads):
    """More than any window holds: nobody waits for somebody who waits for him."""

    def run(comm):
        torch.manual_seed(0)
        pipe = Pipeline(
            nn.Sequential(nn.Linear(4, 4096), nn.Linear(4096, 4)), comm, microbatches=4
        )
        x = torch.ones(1024, 4)
        pipe.step(x, x, functional.mse_loss)

    threads(2, run)


def test_pipeline_with_data_parallelism_equals_one_process(threads):
    losses, right = alone(replicas=2)

    def run(comm):
        with Mesh(comm, dp=2, pp=2) as mesh:
            pipe = Pipeline(deep(comm.rank), mesh["pp"], microbatches=3)
            replicas = PlainDDP(pipe, mesh["dp"])
            mine = learn(pipe, mesh.coordinates["dp"], replicas.sync)
            return mine, pipe.whole_state()

    found = threads(4, run)
    for _, state in found:
        same(state, right, 1e-11)
    means = [(a + b) / 2 for a, b in zip(found[0][0], found[2][0], strict=True)]
    assert means == pytest.approx(losses, rel=1e-11)


# --- orders


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_evaluation_and_prediction_equal_one_process(threads, n):
    x, y = batch(0)
    model = deep()
    outputs = model(x).detach()
    loss = functional.mse_loss(outputs, y).item()

    def run(comm):
        pipe = Pipeline(deep(), comm, microbatches=3)
        found = pipe.evaluate(x, y, functional.mse_loss)
        out = pipe.predict(x) if comm.rank == 0 else pipe.predict()
        assert all(param.grad is None for param in pipe.parameters())
        assert out is None or not out.requires_grad
        return found, out

    found = threads(n, run)
    for rank, (mine, out) in enumerate(found):
        assert mine == pytest.approx(loss, rel=1e-12)
        assert (out is None) == (rank < n - 1)
    torch.testing.assert_close(found[-1][1], outputs)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("n", [1, 2, 4, 7])
@pytest.mark.parametrize("m", [1, 2, 5, 12])
def test_orders_do_not_deadlock(order, n, m):
    """Each micro-batch once each way, and never before what it waits for."""
    tables = [ORDERS[order](stage, n, m) for stage in range(n)]
    done, at = set(), [0] * n
    while any(i < 2 * m for i in at):
        before = list(at)
        for stage, actions in enumerate(tables):
            while at[stage] < 2 * m:
                forward, i = actions[at[stage]]
                last = stage == n - 1
                if forward:
                    needs = {(stage - 1, True, i)} if stage else set()
                else:
                    needs = {(stage, True, i)}
                    needs |= set() if last else {(stage + 1, False, i)}
                if not needs <= done:
                    break
                done.add((stage, forward, i))
                at[stage] += 1
        assert at != before, "nobody can go on"
    assert len(done) == 2 * m * n


def test_stage_holds_at_most_the_stated_micro_batches(threads, monkeypatch):
    """gpipe: all m micro-batches; 1f1b: as many as there are stages from here on."""
    most = {}
    finish = PipelineStep.finish

    def watched(step):
        most[step.stage.order, step.rank] = step.most_held
        finish(step)

    monkeypatch.setattr(PipelineStep, "finish", watched)

    def run(comm):
        for order in ORDERS:
            pipe = Pipeline(deep(), comm, microbatches=7, order=order)
            pipe.step(*batch(0), functional.mse_loss)

    threads(3, run)
    assert [most["gpipe", r] for r in range(3)] == [7, 7, 7]
    assert [most["1f1b", r] for r in range(3)] == [3, 2, 1]


def test_table_lists_the_actions_of_each_stage():
    assert list(table("gpipe", 1, 2)) == ["F0 F1 B0 B1"]
    assert list(table("1f1b", 3, 4))[1] == "F0 F1 B0 F2 B1 F3 B2 B3"


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_pipeline_sends_the_bytes_of_the_formula(threads, n):
    m, rows = 3, 7

    def sent(comm):
        pipe = Pipeline(deep(), comm, microbatches=m)
        before = comm.sent_bytes
        pipe.step(*batch(0, rows=rows), functional.mse_loss)
        return comm.sent_bytes - before

    activation = rows * 3 * 5 * 8
    for rank, found in enumerate(threads(n, sent)):
        right = (n - 1) * AGREED
        right += (rank < n - 1) * (m * HEADER * 8 + activation)
        right += (rank > 0) * activation
        right += (rank == n - 1) * (n - 1) * LOSS
        assert found == right


# --- what cannot be


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"microbatches": 0}, "microbatches = 0: at least one"),
        ({"order": "2f2b"}, "unknown order of a pipeline '2f2b'"),
        ({"at": [3, 2]}, "6 layers, at = .3, 2.: expected 2 ascending numbers"),
        ({"at": [3]}, "expected 2 ascending numbers"),
    ],
)
def test_pipeline_options_out_of_range_are_refused(threads, options, message):
    with pytest.raises(BadArgument, match=message):
        threads(3, lambda c: Pipeline(deep(), c, **{"microbatches": 2, **options}))


def test_more_stages_than_layers_are_refused(threads):
    layers = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(BadArgument, match="1 layers"):
        threads(2, lambda comm: Pipeline(layers, comm, microbatches=1))


@pytest.mark.parametrize("missing", ["x", "target", "loss"])
def test_missing_inputs_raise_on_all_ranks(refusals, missing):
    def run(comm):
        pipe = Pipeline(deep(), comm, microbatches=2)
        x, y = batch(0)
        given = {"x": x, "target": y, "loss": functional.mse_loss, missing: None}
        pipe.step(**given)

    where = 0 if missing == "x" else 2
    for rank, error in enumerate(refusals(3, run)):
        assert isinstance(error, BadArgument if rank == where else CollectiveMismatch)
        assert f"{missing} is missing on rank {where}" in str(error)


def test_fewer_rows_than_micro_batches_are_refused(threads, refusals):
    def run(comm):
        pipe = Pipeline(deep(), comm, microbatches=9)
        pipe.step(*batch(0), functional.mse_loss)

    with pytest.raises(BadArgument, match="x has 7 rows for 9 micro-batches"):
        threads(1, run)
    for error in refusals(3, run):
        assert "has 7 rows for 9 micro-batches" in str(error)


def test_different_pipelines_on_ranks_are_named(threads):
    def number(comm):
        Pipeline(deep(), comm, microbatches=2 + comm.rank)

    def rows(comm):
        pipe = Pipeline(deep(), comm, microbatches=2)
        pipe.step(*batch(0, rows=4 + comm.rank), functional.mse_loss)

    with pytest.raises(CollectiveMismatch, match="Pipeline: the ranks differ"):
        threads(2, number)
    with pytest.raises(BadArgument, match="rows of outputs and"):
        threads(2, rows)


def test_one_more_step_on_a_rank_is_detected(threads):
    def run(comm):
        pipe = Pipeline(deep(), comm, microbatches=2)
        for _ in range(1 + comm.rank):
            pipe.step(*batch(0), functional.mse_loss)
        comm.barrier()

    with pytest.raises(CollectiveMismatch):
        threads(2, run)


def test_outputs_of_other_types_are_refused(threads):
    def run(comm):
        layers = nn.Sequential(nn.Unflatten(1, (1,) * 8), nn.Flatten())
        pipe = Pipeline(layers, comm, microbatches=1)
        pipe.step(torch.ones(2, 1), torch.ones(2, 1), functional.mse_loss)

    with pytest.raises(BadArgument, match="of up to 8 dims"):
        threads(2, run)


def test_old_module_path_of_pipeline_works_and_warns():
    sys.modules.pop("unisono.parallel.pipeline", None)
    with pytest.warns(
        DeprecationWarning, match="import Pipeline from unisono.parallel"
    ):
        old = importlib.import_module("unisono.parallel.pipeline")
    assert old.table is table
    assert old.Pipeline is Pipeline

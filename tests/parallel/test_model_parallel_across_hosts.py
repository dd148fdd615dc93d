"""Model parallel strategies on ranks without shared memory."""

import pytest
import test_context
import test_expert
import test_pipeline
import test_tensor
import torch
from nets import same
from sharded_nets import one_process

from unisono.parallel import Pipeline, ring_attention
from unisono.testing import world

HOSTS = [0, 0, 1]


def test_tensor_and_sequence_parallelism_across_hosts():
    losses, right = one_process(steps=3)
    with world(3, hosts=HOSTS) as w:
        found = w.run(lambda comm: test_tensor.run(comm, test_tensor.SEQUENCE, steps=3))
    for mine, state in found:
        assert mine == pytest.approx(losses, rel=1e-11)
        same(state, right, 1e-11)


@pytest.mark.parametrize("name", test_tensor.PLANS)
def test_reproducible_has_the_same_bits_on_any_hosts(name):
    def run(comm):
        plan = test_tensor.PLANS[name]
        how = {"dtype": torch.float32, "steps": 2, "reproducible": True}
        return test_tensor.run(comm, plan, **how)

    with world(3) as near, world(3, hosts=HOSTS) as far:
        for one, other in zip(near.run(run), far.run(run), strict=True):
            same(one[1], other[1])


def test_context_parallelism_across_hosts():
    y, grads = test_context.dense(causal=True)
    with world(3, hosts=HOSTS) as w:
        found = w.run(lambda c: test_context.attend(c, ring_attention, causal=True))
    for mine in found:
        for got, wanted in zip(mine, [y, *grads], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-10)


def test_experts_across_hosts():
    whole = test_expert.parts()
    xs = [test_expert.drawn(count, count) for count in (4, 0, 9)]

    def run(comm):
        return test_expert.moe(comm)(xs[comm.rank]).detach()

    with world(3, hosts=HOSTS) as w:
        for x, found in zip(xs, w.run(run), strict=True):
            torch.testing.assert_close(
                found, test_expert.dense(whole, x, 2)[0].detach()
            )


def test_pipeline_across_hosts():
    losses, _ = test_pipeline.alone()

    def run(comm):
        pipe = Pipeline(test_pipeline.deep(), comm, microbatches=3)
        return test_pipeline.learn(pipe)

    with world(3, hosts=HOSTS) as w:
        for mine in w.run(run):
            assert mine == pytest.approx(losses, rel=1e-11)

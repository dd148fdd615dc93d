"""How much of the communication is hidden behind computation, on a slow link.

Time is a clock of the test's own: every layer's backward takes a second, and the link
takes as long as the case says. So the figures are exact.
"""

import pytest
import torch
from nets import made
from torch import nn

from slow_link import ManualClock, SlowLink
from unisono.parallel import DDP, FSDP, PlainDDP

LAYERS, WIDTH = 6, 32
COUNT = WIDTH * WIDTH


class Timed(torch.autograd.Function):
    """Takes a second each way, by the clock."""

    @staticmethod
    def forward(ctx, x, clock):
        ctx.clock = clock
        clock.advance(1.0)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.advance(1.0)
        return grad, None


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
        self.clock = None

    def forward(self, x):
        return Timed.apply(self.linear(x), self.clock)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def step(comm, wrap, seconds_per_layer):
    """One step, after two that do not count: exposed and total seconds."""
    n, clock = comm.world_size, ManualClock()
    # So that one pass of (n-1)/n over a layer takes as long as the case says.
    rate = (n - 1) / n * COUNT * 4 / seconds_per_layer
    link = SlowLink(comm, bytes_per_s=rate, clock=clock)
    net = made(Deep)
    model = wrap(net, link)
    for layer in net.layers:
        layer.clock = clock
    x = torch.ones(1, WIDTH, requires_grad=True)
    for turn in range(3):
        if turn == 2:
            clock.advance(1000.0)  # the link is idle
            link.total_s = link.exposed_s = 0.0
            begun = clock.now
        model.zero_grad()
        model(x).sum().backward()
        if isinstance(model, PlainDDP):
            model.sync()
    return link.exposed_s, link.total_s, clock.now - begun


ONE_LAYER = COUNT * 4 / (1 << 20)


def test_ddp_hides_all_but_the_last_bucket(threads):
    """An all_reduce of a layer takes as long as its backward: only the last shows."""

    def run(comm, **options):
        return step(
            comm,
            lambda net, link: DDP(net, link, bucket_cap_mb=ONE_LAYER, **options),
            0.5,  # twice that for the two passes of an all_reduce
        )

    for exposed, total, took in threads(2, run):
        assert total == pytest.approx(LAYERS)
        assert exposed == pytest.approx(1.0)
        assert took == pytest.approx(2 * LAYERS + 1.0)


def test_ddp_without_overlap_hides_nothing(threads):
    def run(comm):
        return step(
            comm,
            lambda net, link: DDP(net, link, bucket_cap_mb=ONE_LAYER, overlap=False),
            0.5,
        )

    for exposed, total, took in threads(2, run):
        assert exposed == pytest.approx(total) == pytest.approx(LAYERS)
        assert took == pytest.approx(3 * LAYERS)


def test_plain_ddp_hides_nothing(threads):
    for exposed, total, _ in threads(2, lambda c: step(c, PlainDDP, 0.5)):
        assert exposed == pytest.approx(total) == pytest.approx(LAYERS)


def test_slow_link_is_busy_all_the_time(threads):
    """Four seconds of link for each second of backward: what is hidden is backward."""

    def run(comm):
        return step(
            comm, lambda net, link: DDP(net, link, bucket_cap_mb=ONE_LAYER), 2.0
        )

    for exposed, total, _ in threads(2, run):
        assert total == pytest.approx(4 * LAYERS)
        assert total - exposed == pytest.approx(LAYERS - 1)


def test_fsdp_hides_gathers_by_prefetching(threads):
    """A gather takes half as long as a layer: the first ones of each way show."""

    def run(comm, prefetch):
        return step(comm, lambda net, link: FSDP(net, link, prefetch=prefetch), 0.5)

    for with_, without in zip(
        threads(2, run, True), threads(2, run, False), strict=True
    ):
        exposed, total, took = with_
        assert total == without[1] == pytest.approx(3 * LAYERS * 0.5)
        assert exposed < without[0] / 3
        assert took < without[2]
        # Without it every gather is waited for: twice for each layer.
        assert without[0] >= 2 * LAYERS * 0.5

"""Parameter servers: results against one process, and staleness of workers."""

import time

import pytest
import torch
from nets import NS, Mlp, alone, batch, loss_of, made, same, train, weights

from unisono.errors import BadArgument, PeerLost, UsageError
from unisono.parallel import AsyncParameterServer, ParameterServer

SGD = (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})
COUNT = sum(p.numel() for p in made(Mlp).parameters())


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("sharded", [False, True])
def test_parameter_server_has_the_bits_of_one_process(threads, n, sharded):
    def run(comm):
        net = made(Mlp, seed=comm.rank)
        servers = comm.world_size if sharded else 1
        server = ParameterServer(net, comm, SGD[0], servers=servers, **SGD[1])
        return train(comm, net, server, Mlp), weights(net)

    losses, right = alone(Mlp, n)
    for rank, (mine, found) in enumerate(threads(n, run)):
        assert mine == [step[rank] for step in losses]
        same(found, right)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("servers", [1, 2])
def test_servers_send_the_bytes_of_the_formula(threads, n, servers):
    if servers > n:
        pytest.skip("a server is one of the ranks")

    def run(comm):
        net = made(Mlp)
        server = ParameterServer(net, comm, SGD[0], servers=servers, lr=0.1)
        before = comm.sent_bytes
        train(comm, net, server, Mlp, steps=1)
        return comm.sent_bytes - before

    sizes = [COUNT // servers + (s < COUNT % servers) for s in range(servers)]
    for rank, sent in enumerate(threads(n, run)):
        pushed = sum(size for s, size in enumerate(sizes) if s != rank)
        handed_out = (n - 1) * sizes[rank] if rank < servers else 0
        assert sent == 4 * (pushed + handed_out)


@pytest.mark.parametrize("servers", [1, 2])
def test_server_clips_by_the_norm_of_the_averaged_gradients(threads, servers):
    def run(comm):
        net = made(Mlp)
        server = ParameterServer(net, comm, SGD[0], servers=servers, **SGD[1])
        norms = []

        def clip():
            norms.append(server.clip_grad_norm_(0.1).item())

        train(comm, net, server, Mlp, after=clip)
        return norms, weights(net)

    _, right = alone(Mlp, 3, clip=0.1)
    found = threads(3, run)
    for norms, state in found:
        assert norms == found[0][0]
        same(state, right, 1e-6)


def test_gradients_that_change_after_clipping_are_refused(threads):
    def run(comm):
        net = made(Mlp)
        server = ParameterServer(net, comm, SGD[0], **SGD[1])
        x, y = batch(Mlp, 0, comm.rank)
        loss_of(net(x), y).backward()
        server.clip_grad_norm_(1.0)
        loss_of(net(x), y).backward()
        with pytest.raises(UsageError, match="call backward before it"):
            server.step()
        server.zero_grad()
        loss_of(net(x), y).backward()
        server.step()

    threads(2, run)


def test_groups_and_schedulers_of_a_server_equal_one_process(threads):
    def stepped(net, make, ranks):
        heavy = [net.first.weight, net.last.weight]
        rest = [p for p in net.parameters() if all(p is not h for h in heavy)]
        opt = make(net, [{"params": heavy, "lr": 0.1}, {"params": rest}])
        schedule = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
        for step in range(6):
            opt.zero_grad()
            for rank in ranks:
                x, y = batch(Mlp, step, rank)
                (loss_of(net(x), y) / len(ranks)).backward()
            opt.step()
            schedule.step()
        return weights(net), [group["lr"] for group in opt.param_groups]

    def run(comm):
        def make(net, groups):
            return ParameterServer(net, comm, SGD[0], groups=groups, **SGD[1])

        return stepped(made(Mlp), make, [comm.rank])

    right, rates = stepped(made(Mlp), lambda _, g: SGD[0](g, **SGD[1]), [0, 1])
    for found, mine in threads(2, run):
        same(found, right, 1e-6)
        assert mine == rates == [0.0125, 0.00625]


def test_server_resumes_with_other_numbers_of_ranks_and_servers(threads):
    """Every rank has the same batches, so the number of ranks makes no difference."""

    def steps(net, opt, first):
        for step in range(first, first + 4):
            opt.zero_grad()
            x, y = batch(Mlp, step, 0)
            loss_of(net(x.double()), y.double()).backward()
            opt.step()

    def run(comm, servers, first, model, state):
        net = made(Mlp, seed=first).double()
        if model is not None:
            net.load_state_dict(model)
        rate = 9.0 if first else 1e-2  # the saved one holds
        opt = ParameterServer(net, comm, torch.optim.AdamW, servers=servers, lr=rate)
        if state is not None:
            opt.load_state_dict(state)
        steps(net, opt, first)
        return weights(net), opt.state_dict()

    model = state = None
    for first, n, servers in ((0, 2, 1), (4, 3, 2), (8, 1, 1)):
        model, state = threads(n, run, servers, first, model, state)[-1]
    net = made(Mlp).double()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for first in (0, 4, 8):
        steps(net, opt, first)
    same(model, weights(net), 1e-10)
    assert state["state"]["first.weight"]["exp_avg"].shape == (11, 5)


def test_rank_0_scatters_the_batch(threads):
    x, y = torch.randn(6, 5), torch.arange(6)

    def run(comm):
        server = ParameterServer(made(Mlp), comm, SGD[0], **SGD[1])
        before = comm.sent_bytes
        mine = server.scatter(x, y) if comm.rank == 0 else server.scatter()
        return mine, comm.sent_bytes - before

    for rank, ((a, b), sent) in enumerate(threads(3, run)):
        assert torch.equal(a, x.chunk(3)[rank])
        assert torch.equal(b, y.chunk(3)[rank])
        assert sent >= (x.nbytes + y.nbytes) * 2 // 3 if rank == 0 else sent < 1024


@pytest.mark.parametrize(
    ("rows", "giver", "message"),
    [(5, 0, "5 cannot be divided evenly by 2"), (4, 1, "rank 0 gives the batch")],
)
def test_batches_that_cannot_be_scattered_are_refused(refusals, rows, giver, message):
    def run(comm):
        server = ParameterServer(made(Mlp), comm, SGD[0], **SGD[1])
        server.scatter(*[torch.ones(rows, 5)] * (comm.rank == giver))

    assert any(message in str(error) for error in refusals(2, run))


def work(comm, server, net, steps, before_first=lambda: None):
    with server:
        if server.serving:
            server.serve()
        else:
            for step in range(steps):
                x, y = batch(Mlp, step, comm.rank)
                loss_of(net(x), y).backward()
                if step == 0:
                    before_first()
                server.step()
    return weights(net), server.furthest_ahead


@pytest.mark.parametrize("servers", [1, 2])
def test_single_async_worker_equals_one_process(threads, servers):
    def run(comm):
        net = made(Mlp, seed=comm.rank)
        server = AsyncParameterServer(net, comm, SGD[0], servers=servers, **SGD[1])
        return work(comm, server, net, 20)[0]

    net = made(Mlp)
    opt = SGD[0](net.parameters(), **SGD[1])
    for step in range(20):
        x, y = batch(Mlp, step, servers)
        opt.zero_grad()
        loss_of(net(x), y).backward()
        opt.step()
    for found in threads(servers + 1, run):
        same(found, weights(net))


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("servers", [1, 2])
def test_async_workers_stay_within_the_staleness(threads, staleness, servers):
    """One worker dawdles; the others stop at the bound, and all end with one model."""
    serving = [None] * servers

    def until_the_others_are_held_up():
        ends = time.monotonic() + 100
        while any(s is None or s.furthest_ahead <= staleness for s in serving):
            assert time.monotonic() < ends, "the others do not get that far"
            time.sleep(0.01)

    def run(comm):
        net = made(Mlp)
        server = AsyncParameterServer(
            net, comm, torch.optim.SGD, servers=servers, staleness=staleness, lr=0.01
        )
        if comm.rank < servers:
            serving[comm.rank] = server
        if comm.rank == servers:
            return work(comm, server, net, 8, until_the_others_are_held_up)
        return work(comm, server, net, 8)

    found = threads(servers + 3, run)
    for one, ahead in found:
        same(one, found[0][0])
        assert ahead <= staleness + 1
    assert all(found[s][1] == staleness + 1 for s in range(servers))


def test_async_workers_may_have_different_numbers_of_steps(threads):
    def run(comm):
        net = made(Mlp)
        server = AsyncParameterServer(net, comm, torch.optim.SGD, lr=0.01)
        return work(comm, server, net, comm.rank)[0]

    found = threads(4, run)
    for one in found:
        same(one, found[0])


def test_lost_worker_is_named(threads):
    def run(comm):
        net = made(Mlp)
        server = AsyncParameterServer(net, comm, torch.optim.SGD, lr=0.01)
        if comm.rank == 2:
            comm.close()
            return None
        if comm.rank == 1:
            comm.recv(torch.empty(1), 0, tag=9)
            return None
        with pytest.raises(PeerLost) as raised:
            server.serve()
        comm.send(torch.empty(1), 1, tag=9)
        return raised.value.ranks

    assert threads(3, run)[0] == (2,)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (ParameterServer, {"servers": 0}),
        (ParameterServer, {"servers": 3}),
        (AsyncParameterServer, {"servers": 2}),
        (AsyncParameterServer, {"staleness": -1}),
        (ParameterServer, {"servers": 1.5}),
    ],
)
def test_servers_and_staleness_out_of_range_are_refused(threads, kind, options):
    with pytest.raises(BadArgument, match=kind.__name__):
        threads(2, lambda c: kind(made(Mlp), c, torch.optim.SGD, lr=1, **options))


def test_step_on_a_server_and_serve_on_a_worker_are_refused(threads):
    def run(comm):
        server = AsyncParameterServer(made(Mlp), comm, torch.optim.SGD, lr=0.1)
        wrong = server.step if server.serving else server.serve
        with pytest.raises(UsageError, match="AsyncParameterServer"):
            wrong()
        sync = ParameterServer(made(Mlp), comm, torch.optim.SGD, lr=0.1)
        with pytest.raises(UsageError, match="closures"):
            sync.step(lambda: 0.0)

    threads(2, run)

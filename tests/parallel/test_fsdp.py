"""FSDP: results against one process, bytes sent, and memory."""

import pytest
import torch
from nets import (
    NS,
    Block,
    Gpt,
    Mlp,
    adam,
    alone,
    batch,
    loss_of,
    made,
    same,
    sgd,
    train,
    weights,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.errors import BadArgument, CollectiveMismatch, UsageError
from unisono.parallel import FSDP, Mesh

pytestmark = pytest.mark.one_in(3)


def run(comm, kind, optimizer, options):
    model = FSDP(made(kind, seed=comm.rank), comm, **options)
    losses = train(comm, model, optimizer(model.parameters()), kind)
    return losses, model.state_dict()


EXACT = {"reproducible": True}


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("kind", [Mlp, Gpt])
def test_fsdp_has_the_bits_of_one_process(threads, n, kind):
    losses, right = alone(kind, n)
    for rank, (mine, found) in enumerate(threads(n, run, kind, sgd, EXACT)):
        assert mine == [step[rank] for step in losses]
        same(found, right)


RULES = {
    "whole": [],
    "classes": [Block],
    "deeper": [nn.Linear, nn.LayerNorm],
    "nested": [Block, nn.Linear],
    "a function": lambda name, part: name.endswith("mlp"),
}


@pytest.mark.quick(rule=["classes", "nested"])
@pytest.mark.parametrize("rule", RULES)
def test_units_by_any_policy_have_the_bits_of_one_process(threads, rule):
    options = EXACT | {"units": RULES[rule]}
    for _, found in threads(3, run, Gpt, sgd, options):
        same(found, alone(Gpt, 3)[1])


def test_units_are_the_listed_modules_and_the_root(threads):
    def by_hand(comm):
        net = made(Gpt)
        model = FSDP(net, comm, units=[net.blocks[1], net.head], **EXACT)
        assert [u.name for u in model.units] == ["root", "blocks.1", "head"]
        train(comm, model, sgd(model.parameters()), Gpt)
        return model.state_dict()

    for found in threads(2, by_hand):
        same(found, alone(Gpt, 2)[1])


@pytest.mark.parametrize(
    "options",
    [{"prefetch": False}, {"reshard_after_forward": False}, {"prefetch": "early"}],
    ids=["no prefetch", "kept after forward", "early"],
)
def test_prefetch_and_resharding_do_not_change_results(threads, options):
    for _, found in threads(2, run, Gpt, sgd, EXACT | options):
        same(found, alone(Gpt, 2)[1])


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [2, 3])
def test_fsdp_with_adam_equals_one_process(threads, n):
    for _, found in threads(n, run, Gpt, adam, EXACT):
        same(found, alone(Gpt, n, optimizer=adam)[1], 1e-6)


def on_processes(rank):
    torch.set_num_threads(1)
    with rank.init(timeout_s=30) as comm:
        _, found = run(comm, Gpt, sgd, EXACT)
    same(found, alone(Gpt, rank.n)[1])


@pytest.mark.sweep
def test_fsdp_on_processes_has_the_bits_of_one_process(processes):
    processes(2, on_processes)


# --- bytes and memory


def sent_in_a_step(comm, options):
    model = FSDP(made(Gpt), comm, **options)
    opt = sgd(model.parameters())
    train(comm, model, opt, Gpt, steps=1)
    before = comm.sent_bytes
    train(comm, model, opt, Gpt, steps=1)
    return comm.sent_bytes - before, [u.count for u in model.units]


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("keeps", [False, True])
def test_fsdp_sends_the_bytes_of_the_formula(threads, n, keeps):
    """Gathered twice and reduced once, or gathered once if it is kept."""
    options = {"reshard_after_forward": not keeps}
    total = sum(p.numel() for p in made(Gpt).parameters())
    for rank, (sent, sizes) in enumerate(threads(n, sent_in_a_step, options)):
        assert sum(sizes) == total
        right = 0
        for size in sizes:
            mine = size // n + (rank < size % n)
            right += (1 if keeps else 2) * (n - 1) * mine + size - mine
        assert sent == 4 * right
        if all(size % n == 0 for size in sizes):
            assert sent == (2 if keeps else 3) * (n - 1) * total * 4 // n


def test_bfloat16_sends_half_the_bytes(threads):
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    for half, whole in zip(
        threads(2, sent_in_a_step, low), threads(2, sent_in_a_step, {}), strict=True
    ):
        assert half[0] * 2 == whole[0]


def states(model, opt):
    """Bytes of parameters, gradients and optimizer state between steps."""
    tensors = [*model.parameters(), *(p.grad for p in model.parameters())]
    tensors += [v for s in opt.state.values() for v in s.values() if v.ndim]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in held.values())


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_model_states_are_an_nth_and_two_units(threads, n):
    def measure(comm):
        net = made(Gpt)
        before = list(net.parameters())
        model = FSDP(net, comm)
        assert sum(p.untyped_storage().nbytes() for p in before) == 0
        opt = adam(model.parameters())
        peaks = []
        for unit in model.units:
            for part in {m for member in unit.members for m, _ in member.places}:
                part.register_forward_hook(lambda *_: peaks.append(whole(model)))
        train(comm, model, opt, Gpt, steps=3)
        assert whole(model) == 0
        return states(model, opt), max(peaks), [u.count * 4 for u in model.units]

    def whole(model):
        """Bytes of whole parameters; where they are freed, their memory is blank."""
        assert not any(u.flat_param.any() for u in model.units if not u.unsharded)
        return sum(u.count * 4 for u in model.units if u.unsharded)

    total = sum(p.numel() for p in made(Gpt).parameters())
    for held, peak, sizes in threads(n, measure):
        right = (1 + 1 + 2) * 4 * total / n  # parameters, gradients, Adam's two
        assert held == pytest.approx(right, rel=0.1)
        root, *blocks = sizes
        assert peak <= root + 2 * max(blocks)


def test_next_unit_is_prefetched(threads):
    def order(comm):
        model = FSDP(made(Gpt), comm)
        opt = sgd(model.parameters())
        train(comm, model, opt, Gpt, steps=1)
        begun = []
        for unit in model.units:
            gather = unit.unshard

            def noted(label, unit=unit, gather=gather):
                if not unit.unsharded:
                    begun.append((unit.name, label.split(",")[0]))
                gather(label)

            unit.unshard = noted
        inside = model.module.blocks[0].register_forward_hook(
            lambda *_: begun.append("in block 0")
        )
        train(comm, model, opt, Gpt, steps=1)
        inside.remove()
        return begun

    forward = [("root", "forward"), ("blocks.0", "forward"), ("blocks.1", "forward")]
    backward = [("root", "backward"), ("blocks.2", "backward")]
    for begun in threads(2, order):
        assert begun[:3] == forward
        assert begun[3] == "in block 0"
        assert begun[5:7] == backward


@pytest.mark.parametrize("early", [False, True])
def test_first_units_are_gathered_before_forward(threads, early):
    """After the step, by `unshard` or by itself; forward does not gather them again."""

    def run(comm):
        model = FSDP(made(Gpt), comm, prefetch="early" if early else True)
        opt = sgd(model.parameters())
        step = opt.step if early else lambda: (opt.step(), model.unshard())
        gathered, sent = [], []
        for number in range(3):
            before = comm.sent_bytes
            opt.zero_grad()
            x, y = batch(Gpt, number, comm.rank)
            loss_of(model(x), y).backward()
            step()
            gathered.append([u.name for u in model.units if u.unsharded])
            comm.barrier()
            sent.append(comm.sent_bytes - before)
        return gathered, sent[2], comm.sent_bytes

    for gathered, sent, _ in threads(2, run):
        assert gathered == [["root", "blocks.0"]] * 3
        assert sent == threads(2, sent_in_a_step, {})[0][0]


def test_shards_that_change_after_unshard_are_gathered_again(threads):
    right = weights(made(Gpt, seed=5))
    x, y = batch(Gpt, 0, 0)
    other = made(Gpt)
    other.load_state_dict(right)
    wanted = loss_of(other(x), y).item()

    def run(comm):
        model = FSDP(made(Gpt), comm)
        model.unshard()
        model.unshard()
        model.load_state_dict(right)
        first = loss_of(model(x), y)
        first.backward()
        model.unshard()
        return first.item(), loss_of(model(x), y).item()

    assert threads(2, run) == [(wanted, wanted)] * 2


def test_steps_of_other_models_gather_nothing(threads):
    """torch calls the hooks that follow a step for every optimizer."""

    def run(comm):
        model = FSDP(made(Mlp), comm, prefetch="early")
        train(comm, model, sgd(model.parameters()), Mlp, steps=1)
        assert model.units[0].unsharded
        with torch.no_grad():
            model(batch(Mlp, 0, 0)[0])
        sgd(made(Mlp).parameters()).step()
        assert not any(unit.unsharded for unit in model.units)

    threads(2, run)


# --- what it composes with


@pytest.mark.quick(reentrant=[False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["around units", "inside units"])
def test_activation_checkpointing_has_the_bits_of_one_process(
    threads, reentrant, where
):
    class Saving(Gpt):
        def forward(self, tokens):
            x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    class SavingBlocks(Gpt):
        def __init__(self):
            super().__init__()
            for block in self.blocks:
                block.mlp.forward = saved(block.mlp)

    def saved(part):
        plain = part.forward
        return lambda x: checkpoint(plain, x, use_reentrant=reentrant)

    kind = Saving if where == "around units" else SavingBlocks
    for _, found in threads(2, run, kind, sgd, EXACT):
        same(found, alone(Gpt, 2)[1])


def test_mixed_precision_keeps_float32_shards(threads):
    low = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}

    def run(comm):
        model = FSDP(made(Gpt), comm, **low)
        kinds = set()
        model.module.blocks[0].qkv.register_forward_hook(
            lambda m, a, out: kinds.add((out.dtype, m.weight.dtype))
        )
        losses = train(comm, model, adam(model.parameters()), Gpt, steps=10)
        assert kinds == {(torch.bfloat16, torch.bfloat16)}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
        return losses

    right = alone(Gpt, 2, steps=10, optimizer=adam)[0]
    for rank, losses in enumerate(threads(2, run)):
        for mine, step in zip(losses, right, strict=True):
            assert mine == pytest.approx(step[rank], abs=0.1)


def test_hybrid_sharding_equals_one_process(threads):
    """Shards among two, replicas across: the gradients of all four meet."""

    def run(comm):
        mesh = Mesh(comm, replicas=2, shards=2)
        model = FSDP(made(Gpt), mesh["shards"], replicas=mesh["replicas"], **EXACT)
        train(comm, model, sgd(model.parameters()), Gpt)
        shard = model.units[0].shard
        assert shard.numel() == pytest.approx(model.units[0].count / 2, abs=1)
        return model.state_dict()

    found = threads(4, run)
    for one in found:
        same(one, found[0])
        same(one, alone(Gpt, 4)[1], 1e-5)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", [1, 3])
def test_fsdp_no_sync_accumulates_full_gradients(threads, n):
    def run(comm):
        model = FSDP(made(Gpt), comm, **EXACT)
        opt = sgd(model.parameters())
        for step in range(5):
            opt.zero_grad()
            with model.no_sync():
                x, y = batch(Gpt, 2 * step, comm.rank)
                loss_of(model(x), y).backward()
            x, y = batch(Gpt, 2 * step + 1, comm.rank)
            loss_of(model(x), y).backward()
            opt.step()
        return model.state_dict()

    for found in threads(n, run):
        same(found, alone(Gpt, n, steps=5, passes=2)[1])


def test_gradients_accumulate_in_shards(threads):
    def run(comm):
        model = FSDP(made(Mlp), comm, units=[nn.Linear])
        for step in range(2):
            x, y = batch(Mlp, step, comm.rank)
            loss_of(model(x), y).backward()
        return [p.full_tensor(p.param.grad) for p in model.local_shards]

    net = made(Mlp)
    for step in range(2):
        for rank in range(2):
            x, y = batch(Mlp, step, rank)
            (loss_of(net(x), y) / 2).backward()
    right = dict(net.named_parameters())
    found = threads(2, run)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)
    assert sum(g.sum() for g in found[0]) == pytest.approx(
        float(sum(p.grad.sum() for p in right.values())), abs=1e-5
    )


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
def test_fsdp_clips_by_the_norm_of_the_whole_model(threads, norm_type):
    def run(comm):
        model = FSDP(made(Gpt), comm)
        x, y = batch(Gpt, 0, 0)
        loss_of(model(x), y).backward()
        norm = model.clip_grad_norm_(0.1, norm_type)
        return norm, [p.full_tensor(p.param.grad) for p in model.local_shards]

    net = made(Gpt)
    x, y = batch(Gpt, 0, 0)
    loss_of(net(x), y).backward()
    right = nn.utils.clip_grad_norm_(net.parameters(), 0.1, norm_type)
    grads = {n: p.grad for n, p in net.named_parameters()}
    for norm, found in threads(3, run):
        torch.testing.assert_close(norm, right)
        for mine, yours in zip(
            sorted(found, key=lambda g: float(g.sum())),
            sorted(grads.values(), key=lambda g: float(g.sum())),
            strict=True,
        ):
            torch.testing.assert_close(mine.sum(), yours.sum(), atol=1e-6, rtol=1e-4)


def test_tied_and_frozen_parameters_train(threads):
    class Tied(Gpt):
        def __init__(self):
            super().__init__()
            self.head.weight = self.words.weight
            self.places.weight.requires_grad_(False)

    for _, found in threads(2, run, Tied, sgd, EXACT):
        assert torch.equal(found["head.weight"], found["words.weight"])
        same(
            {k: found[k] for k in ("places.weight",)},
            {"places.weight": made(Tied).places.weight.detach()},
        )

    def tied_alone():
        net = made(Tied)
        opt = sgd([p for p in net.parameters() if p.requires_grad])
        for step in range(20):
            opt.zero_grad()
            for rank in range(2):
                x, y = batch(Tied, step, rank)
                (loss_of(net(x), y) / 2).backward()
            opt.step()
        return weights(net)

    same(found, tied_alone(), 1e-5)


def test_unused_parameters_have_zero_gradients(threads):
    class Spare(Mlp):
        def __init__(self):
            super().__init__()
            self.spare = nn.Linear(2, 2)

    def run(comm):
        model = FSDP(made(Spare), comm)
        train(comm, model, sgd(model.parameters()), Spare, steps=2)
        return model.state_dict()

    for found in threads(2, run):
        assert torch.equal(found["spare.weight"], made(Spare).spare.weight)


def test_evaluation_between_steps_frees_full_parameters(threads):
    def run(comm):
        model = FSDP(made(Gpt), comm, **EXACT)
        opt = sgd(model.parameters())
        for step in range(5):
            train(comm, model, opt, Gpt, steps=1, first=step)
            with torch.no_grad():
                x, y = batch(Gpt, step, comm.rank)
                loss_of(model(x), y)
            assert not any(u.unsharded for u in model.units)
        return model.state_dict()

    for found in threads(2, run):
        same(found, alone(Gpt, 2, steps=5)[1])


# --- whole parameters


def test_summon_has_full_parameters_and_keeps_changes(threads):
    def run(comm):
        model = FSDP(made(Gpt), comm)
        with model.summon() as whole, torch.no_grad():
            same(weights(whole), weights(made(Gpt)))
            whole.head.weight.zero_()
        with model.summon(writeback=False) as whole, torch.no_grad():
            assert not whole.head.weight.any()
            whole.head.weight.fill_(1)
        return model.state_dict()["head.weight"]

    for found in threads(3, run):
        assert not found.any()


def test_full_state_dict_saves_and_loads(threads):
    right = weights(made(Gpt, seed=5))

    def run(comm):
        model = FSDP(made(Gpt), comm)
        model.load_state_dict(right)
        same(model.state_dict(), right)
        with pytest.raises(BadArgument, match=r"missing.*words.weight"):
            model.load_state_dict({})
        with pytest.raises(BadArgument, match=r"head.weight: got a tensor of \[3\]"):
            model.load_state_dict(right | {"head.weight": torch.zeros(3)})

    threads(3, run)


# --- what cannot be


def test_parameters_tied_between_units_are_refused(threads):
    class Tied(Gpt):
        def __init__(self):
            super().__init__()
            self.blocks[2].out = self.blocks[0].out

    def run(comm):
        FSDP(made(Tied), comm)

    with pytest.raises(BadArgument, match=r"blocks.2.out.weight in unit blocks.2 is"):
        threads(2, run)


def test_one_more_forward_of_fsdp_on_a_rank_is_detected(threads):
    def run(comm):
        model = FSDP(made(Gpt), comm)
        x, y = batch(Gpt, 0, 0)
        for _ in range(1 + (comm.rank == 1)):
            output = model(x)
        loss_of(output, y).backward()

    with pytest.raises(CollectiveMismatch, match=r"root (forward|backward), odd step"):
        threads(2, run)


def test_units_in_another_order_on_a_rank_are_detected(threads):
    class Turned(Gpt):
        def forward(self, tokens, back):
            x = self.words(tokens)
            for block in reversed(self.blocks) if back else self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    def run(comm):
        FSDP(made(Turned), comm)(batch(Gpt, 0, 0)[0], comm.rank == 1)

    with pytest.raises(CollectiveMismatch, match=r"blocks.0 forward.*blocks.2 forward"):
        threads(2, run)


def test_outputs_without_visible_tensors_are_refused(threads):
    class Box:
        pass

    class Boxed(Mlp):
        def forward(self, x):
            return Box()

    def run(comm):
        with pytest.raises(UsageError, match="root returns a Box"):
            FSDP(made(Boxed), comm)(torch.ones(1, 5))

    threads(1, run)


@pytest.mark.parametrize(
    ("units", "message"),
    [(["Block"], "expected module classes"), ([nn.Linear(1, 1)], "not a part")],
)
def test_units_that_are_not_modules_are_refused(threads, units, message):
    with pytest.raises(BadArgument, match=message):
        threads(1, lambda comm: FSDP(made(Gpt), comm, units=units))


def test_unit_with_two_dtypes_is_refused(threads):
    def run(comm):
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        with pytest.raises(BadArgument, match=r"root has parameters of torch.float32"):
            FSDP(net, comm)
        FSDP(
            nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double()),
            comm,
            units=[nn.Linear],
        )

    threads(1, run)

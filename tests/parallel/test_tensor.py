"""Tensor and sequence parallelism: results against one process, and bytes sent."""

import re

import pytest
import torch
from nets import NS, STEPS, made, same, weights
from sharded_nets import (
    HEADS,
    LAYERS,
    LENGTH,
    ON_SHARDS,
    PLAN,
    WIDTH,
    Layer,
    Net,
    Placeless,
    Tied,
    net,
    one_process,
    sgd,
    tokens,
)
from torch import nn
from torch.nn import functional

from unisono.errors import BadArgument, CollectiveMismatch
from unisono.parallel import (
    DDP,
    Column,
    ColumnLinear,
    Divide,
    Mesh,
    Row,
    RowLinear,
    Vocabulary,
    VocabularyEmbedding,
    attention_plan,
    load_whole_state,
    mlp_plan,
    parallelize,
    sequence_plan,
    vocabulary_cross_entropy,
    whole_state,
)
from unisono.parallel.model.sequence import Enter

pytestmark = pytest.mark.one_in(3)

SEQUENCE = sequence_plan(PLAN, on_shards=ON_SHARDS, enters="layers")
PLANS = {"tensor": PLAN, "sequence": SEQUENCE}
LIMITS = {torch.float64: 1e-11, torch.float32: 2e-4}
"""What sums in another order may change in 20 steps."""


def learn(comm, model, cut, steps=STEPS, replica=0):
    """Train; each rank has the logits of some of the words, and all the same loss."""
    opt = sgd(model.parameters())
    losses = []
    for step in range(steps):
        opt.zero_grad()
        x, y = tokens(step, replica)
        loss = vocabulary_cross_entropy(model(x), y, cut)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def run(comm, plan, kind=Net, dtype=torch.float64, steps=STEPS, **options):
    model = parallelize(net(kind, dtype, seed=comm.rank), comm, plan, **options)
    losses = learn(comm, model, comm, steps)
    return losses, whole_state(model)


@pytest.mark.quick(n=[2])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("name", PLANS)
def test_tensor_and_sequence_parallelism_equal_one_process(threads, n, name):
    losses, right = one_process()
    found = threads(n, run, PLANS[name])
    for mine, state in found:
        assert mine == pytest.approx(losses, rel=LIMITS[torch.float64])
        same(state, right, LIMITS[torch.float64])
        assert mine == found[0][0]
        same(state, found[0][1])


def test_replicated_parameters_keep_the_same_bits_on_all_ranks(threads):
    def finals(comm):
        model = parallelize(net(Net, torch.float32), comm, SEQUENCE)
        learn(comm, model, comm, 3)
        return weights(model.norm)

    found = threads(3, finals)
    same(found[1], found[0])
    same(found[2], found[0])


@pytest.mark.parametrize("name", PLANS)
def test_single_precision_equals_one_process_within_rounding(threads, name):
    losses, right = one_process(Net, torch.float32)
    for mine, state in threads(2, run, PLANS[name], Net, torch.float32):
        assert mine == pytest.approx(losses, rel=1e-4)
        same(state, right, LIMITS[torch.float32])


@pytest.mark.parametrize("name", PLANS)
def test_tied_embeddings_stay_tied(threads, name):
    losses, right = one_process(Tied, steps=5)
    for mine, state in threads(2, run, PLANS[name], Tied, torch.float64, 5):
        assert mine == pytest.approx(losses, rel=1e-11)
        same(state, right, 1e-11)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_sequence_sharded_from_the_embedding_equals_one_process(threads, n):
    losses, right = one_process(Placeless, steps=5)
    plan = sequence_plan(PLAN, on_shards=ON_SHARDS)
    for mine, state in threads(n, run, plan, Placeless, torch.float64, 5):
        assert mine == pytest.approx(losses, rel=1e-11)
        same(state, right, 1e-11)


@pytest.mark.parametrize("name", PLANS)
def test_tensor_and_data_parallelism_equal_one_process(threads, name):
    losses, right = one_process(replicas=2)

    def both(comm):
        with Mesh(comm, dp=2, tp=2) as mesh:
            cut = parallelize(net(seed=comm.rank), mesh["tp"], PLANS[name])
            model = DDP(cut, mesh["dp"])
            replica = mesh.coordinates["dp"]
            mine = learn(comm, model, mesh["tp"], replica=replica)
            return mine, whole_state(cut)

    found = threads(4, both)
    for _, state in found:
        same(state, right, 1e-11)
    means = [(a + b) / 2 for a, b in zip(found[0][0], found[2][0], strict=True)]
    assert means == pytest.approx(losses, rel=1e-11)


def test_reproducible_has_the_bits_of_the_sum_in_rank_order(threads):
    n = 3
    plain = nn.Linear(4 * n, 2)
    x = torch.randn(5, 4 * n)
    parts = [
        functional.linear(a, w)
        for a, w in zip(x.chunk(n, 1), plain.weight.detach().chunk(n, 1), strict=True)
    ]
    right = parts[0] + parts[1] + parts[2] + plain.bias.detach()

    def forward(comm):
        layer = RowLinear(plain, comm, reproducible=True)
        return layer(x.chunk(n, 1)[comm.rank].contiguous()).detach()

    for found in threads(n, forward):
        assert torch.equal(found, right)


def in_a_process(rank):
    with rank.init() as comm:
        losses, state = run(comm, SEQUENCE, steps=3)
        return losses, {k: v.tolist() for k, v in state.items()}


@pytest.mark.sweep
def test_tensor_parallelism_on_processes_equals_one_process(processes):
    losses, right = one_process(steps=3)
    for mine, state in processes(2, in_a_process):
        assert mine == pytest.approx(losses, rel=1e-11)
        found = {k: torch.tensor(v, dtype=torch.float64) for k, v in state.items()}
        same(found, right, 1e-11)


# --- what is sent


def all_reduce_bytes(n, nbytes):
    """Up to 16 KiB (2 ranks; 8 for more) everybody gets all; above, two halves."""
    small = nbytes <= (16 << 10 if n == 2 else 8 << 10)
    return (n - 1) * nbytes if small else 2 * (n - 1) * nbytes // n


def sent(comm, plan, rows):
    model = parallelize(net(), comm, plan)
    before = comm.sent_bytes
    y = model.layers(torch.zeros(rows, LENGTH, WIDTH, dtype=torch.float64))
    forward = comm.sent_bytes - before
    y.sum().backward()
    return forward, comm.sent_bytes - before - forward


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("rows", [2, 8])
def test_tensor_parallelism_sends_two_all_reduces_per_block_and_direction(
    threads, n, rows
):
    activation = rows * LENGTH * WIDTH * 8
    right = 2 * LAYERS * all_reduce_bytes(n, activation)
    assert threads(n, sent, PLAN, rows) == [(right, right)] * n


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_sequence_parallelism_sends_the_bytes_of_tensor_parallelism(threads, n):
    rows = 8
    activation = rows * LENGTH * WIDTH * 8
    half = (n - 1) * activation // n
    inside = 2 * LAYERS * 2 * half
    small = all_reduce_bytes(n, WIDTH * 8)
    # Each layer: two norms of two parameters each, and the two rows' biases.
    sums = LAYERS * (2 * 2 + 2) * small
    assert 2 * half == all_reduce_bytes(n, activation)
    plan = {k: v for k, v in SEQUENCE.items() if k not in ("head", "norm")}
    found = threads(n, sent, plan, rows)
    # `enters` is a slice forward; its input has no gradient here.
    assert found == [(inside, inside + sums)] * n


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_cross_entropy_sends_three_numbers_per_token(threads, n):
    count = 12 << 10

    def run(comm):
        logits = torch.zeros(count, 12 // n, requires_grad=True)
        before = comm.sent_bytes
        loss = vocabulary_cross_entropy(logits, torch.zeros(count, dtype=int), comm)
        forward = comm.sent_bytes - before
        loss.backward()
        return forward, comm.sent_bytes - before - forward

    right = all_reduce_bytes(n, 4 * count) + all_reduce_bytes(n, 8 * count)
    assert threads(n, run) == [(right, 0)] * n


def test_sharded_weights_have_an_nth_of_the_memory(threads):
    def held(comm):
        model = parallelize(net(), comm, PLAN)
        cut = {k: p for k, p in model.named_parameters() if p.dim() == 2}
        cut.pop("places.weight")
        return sum(p.numel() for p in cut.values())

    whole = threads(1, held)[0]
    assert threads(4, held) == [whole // 4] * 4


# --- the parts


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_equals_that_of_torch(threads, n, reduction):
    source = torch.Generator().manual_seed(5)
    whole = 30 * torch.randn(3, 7, 24, generator=source, dtype=torch.float64)
    target = torch.randint(24, (3, 7), generator=source)
    target[1, 2:4] = -100
    logits = whole.clone().requires_grad_()
    right = functional.cross_entropy(
        logits.transpose(1, 2), target, reduction=reduction
    )
    up = torch.randn(right.shape, generator=source, dtype=torch.float64)
    right.backward(up)

    def run(comm):
        mine = whole.chunk(n, -1)[comm.rank].clone().requires_grad_()
        loss = vocabulary_cross_entropy(mine, target, comm, reduction=reduction)
        loss.backward(up)
        return loss.detach(), mine.grad

    for rank, (loss, grad) in enumerate(threads(n, run)):
        torch.testing.assert_close(loss, right.detach())
        torch.testing.assert_close(grad, logits.grad.chunk(n, -1)[rank])


def test_cross_entropy_of_half_precision_is_computed_in_single(threads):
    whole = (10 * torch.randn(6, 8)).bfloat16()
    target = torch.arange(6)
    right = functional.cross_entropy(whole.float(), target)

    def run(comm):
        mine = whole.chunk(2, -1)[comm.rank].clone().requires_grad_()
        loss = vocabulary_cross_entropy(mine, target, comm)
        loss.backward()
        assert mine.grad.dtype == torch.bfloat16
        return loss.detach()

    for loss in threads(2, run):
        torch.testing.assert_close(loss, right)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
@pytest.mark.parametrize("padding", [None, 5])
def test_embedding_equals_that_of_torch(threads, n, padding):
    plain = nn.Embedding(12, 3, padding_idx=padding).double()
    words = torch.tensor([[0, 5, 11, 5], [7, 3, 3, 1]])
    right = plain(words)
    right.sin().sum().backward()

    def run(comm):
        layer = VocabularyEmbedding(plain, comm)
        y = layer(words)
        y.sin().sum().backward()
        return y.detach(), layer.weight.grad

    found = threads(n, run)
    for y, _ in found:
        torch.testing.assert_close(y, right.detach())
    grads = torch.cat([grad for _, grad in found])
    torch.testing.assert_close(grads, plain.weight.grad)


@pytest.mark.quick(n=[3])
@pytest.mark.parametrize("n", NS)
def test_column_with_gather_equals_a_linear_layer(threads, n):
    plain = nn.Linear(5, 24).double()
    x = torch.randn(4, 5, dtype=torch.float64)
    a = x.clone().requires_grad_()
    right = plain(a)
    right.sin().sum().backward()

    def run(comm):
        layer = ColumnLinear(plain, comm, parts=2, gather=False)
        mine = layer(x).unflatten(-1, (2, -1))
        wanted = right.detach().unflatten(-1, (2, n, -1))[:, :, comm.rank]
        torch.testing.assert_close(mine, wanted)
        layer = ColumnLinear(plain, comm, gather=True)
        b = x.clone().requires_grad_()
        y = layer(b)
        y.sin().sum().backward()
        torch.testing.assert_close(y, right)
        torch.testing.assert_close(b.grad, a.grad)
        return layer.weight.grad

    torch.testing.assert_close(torch.cat(threads(n, run)), plain.weight.grad)


def test_whole_state_saves_and_loads(threads):
    right = weights(net(seed=7))

    def run(comm):
        model = parallelize(net(seed=1), comm, PLAN)
        before = comm.sent_bytes
        load_whole_state(model, right)
        assert comm.sent_bytes == before
        same(whole_state(model), right)

    threads(3, run)


# --- patterns


class Deep(nn.Module):
    """Twelve layers in a list, which is not called itself."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Layer() for _ in range(12))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


NAMES = {"qkv": "qkv", "out": "out", "heads": "heads"}


def test_star_matches_layers_of_any_number_of_digits(threads, caplog):
    plan = mlp_plan("blocks.*.mlp", up="0", down="2")
    plan |= attention_plan("blocks.*", **NAMES)

    def run(comm):
        model = parallelize(Deep(), comm, plan)
        uncut = [n for n, m in model.named_modules() if isinstance(m, nn.Linear)]
        return uncut, [block.heads for block in model.blocks]

    with caplog.at_level("INFO", "unisono"):
        assert threads(2, run) == [([], [HEADS // 2] * 12)] * 2
    assert "'blocks.*.qkv' matches 12 modules" in caplog.text


@pytest.mark.parametrize("where", ["blocks.?", "blocks.[0-9]", "blocks.1*"])
def test_pattern_that_leaves_out_layers_is_refused(refusals, where):
    def run(comm):
        parallelize(Deep(), comm, attention_plan(where, **NAMES))

    for error in refusals(2, run):
        assert isinstance(error, BadArgument)
        assert re.search(r"matches \d+ of 12 modules in blocks", str(error))
        assert "name each module" in str(error)


def test_pattern_is_refused_if_some_layers_lack_what_it_names(refusals):
    def run(comm):
        model = Deep()
        del model.blocks[3].mlp
        parallelize(model, comm, mlp_plan("blocks.*.mlp", up="0", down="2"))

    for error in refusals(2, run):
        assert "leaves out blocks.3" in str(error)


def test_members_of_other_classes_may_be_left_out(threads):
    def run(comm):
        model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
        plan = {"[0]": Column(), "[2]": Row()}
        with pytest.raises(BadArgument, match="matches 1 of 2 modules in the module"):
            parallelize(model, comm, plan)
        model = nn.Sequential(nn.LayerNorm(4), Layer(), Layer(), nn.Linear(4, 2))
        parallelize(model, comm, {"[12]": Divide("heads"), "*.qkv": Column(parts=3)})
        assert isinstance(model[2].qkv, ColumnLinear)
        assert isinstance(model[3], nn.Linear)

    threads(2, run)


def test_layer_with_two_names_is_sharded_once(threads):
    def run(comm):
        one = Layer().double()
        model = nn.Sequential(one, one)
        parallelize(model, comm, attention_plan("*", **NAMES))
        assert model[0] is model[1]
        return model[0].heads

    assert threads(2, run) == [HEADS // 2] * 2


def test_module_named_twice_is_refused(refusals):
    def run(comm):
        parallelize(Deep(), comm, {"blocks.*": Divide("heads"), "*.0": Divide("heads")})

    for error in refusals(2, run):
        assert "blocks.0 is matched by 'blocks.*' and by '*.0'" in str(error)


def test_sequence_that_enters_a_module_list_is_refused(refusals, threads):
    plan = attention_plan("blocks.*", **NAMES)
    plan |= mlp_plan("blocks.*.mlp", up="0", down="2")
    norms = ["blocks.*.before", "blocks.*.after"]

    def enters(where, plan=plan):
        cut = sequence_plan(plan, on_shards=norms, enters=where)
        return lambda comm: parallelize(made(Deep), comm, cut)

    for error in refusals(2, enters("blocks")):
        assert "is a ModuleList, which has no forward pass" in str(error)
        assert "'blocks.0'" in str(error)
    for error in refusals(2, enters("blocks.*")):
        assert "matches 12 modules" in str(error)

    def by_name(comm):
        model = parallelize(nn.Sequential(Layer()), comm, {"0": Enter()})
        model[0](x=torch.ones(1, LENGTH, WIDTH))

    for error in refusals(2, by_name):
        assert "pass it by position" in str(error)

    x = torch.randn(2, LENGTH, WIDTH)
    whole = made(Deep)(x)
    # One by one, a layer has its heads divided and is where the sequence enters.
    each = {k: v for k, v in plan.items() if k != "blocks.*"}
    each |= {f"blocks.{i}": Divide("heads") for i in range(12)}
    for chosen in plan, each:
        found = threads(2, lambda comm, p=chosen: enters("blocks.0", p)(comm)(x))
        torch.testing.assert_close(torch.cat(found, 1), whole, rtol=1e-4, atol=1e-4)


def test_gradients_of_tied_parameters_on_shards_are_summed_once(threads):
    def run(comm):
        norm = nn.LayerNorm(4)
        model = nn.ModuleDict({"a": norm, "b": norm, "c": nn.Linear(4, 4)})
        plan = sequence_plan({"c": Column()}, on_shards=["a", "b"])
        parallelize(model, comm, plan)
        norm(torch.ones(1, 4)).sum().backward()
        return norm.bias.grad.tolist()

    assert threads(2, run) == [[2.0] * 4] * 2


def test_sharded_layers_in_on_shards_are_refused(refusals):
    plan = sequence_plan(PLAN, on_shards=["layers.*.mlp"], enters="layers")
    for error in refusals(2, lambda comm: parallelize(net(), comm, plan)):
        assert "on_shards names layers.0.mlp, whose 0.weight is sharded" in str(error)


# --- what cannot be


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"layers.*.qvk": Column()}, "unknown module in the plan 'layers.*.qvk'"),
        ({"norm": Column()}, r"norm is a LayerNorm, Column.* is for an nn.Linear"),
        ({"head": Vocabulary()}, "head is a Linear"),
        ({"layers.0": Divide("hats")}, "hats is None"),
        ({"head": "column"}, "the plan has 'column' for 'head'"),
    ],
)
def test_plans_with_wrong_names_or_styles_are_refused(threads, plan, message):
    with pytest.raises(BadArgument, match=message):
        threads(2, lambda comm: parallelize(net(), comm, plan))


def test_dims_that_ranks_do_not_divide_are_refused(threads):
    def column(comm):
        ColumnLinear(nn.Linear(4, 7), comm)

    def heads(comm):
        parallelize(net(), comm, {"layers.*": Divide("heads")})

    def length(comm):
        model = parallelize(net(), comm, SEQUENCE)
        model(torch.zeros(1, 7, dtype=int))

    with pytest.raises(BadArgument, match=r"weight, dim 0 of \[7, 4\]: 7 cannot be"):
        threads(3, column)
    with pytest.raises(BadArgument, match=r"layers.0.heads: 12 cannot be divided"):
        threads(5, heads)
    with pytest.raises(BadArgument, match=r"dim 1 of \[1, 7, 24\]: 7 cannot be"):
        threads(2, length)


def test_different_plans_on_ranks_are_named(threads):
    def shapes(comm):
        parallelize(nn.Linear(4 + comm.rank, 4), comm, {"": Column()})

    def plans(comm):
        parallelize(net(), comm, {"head": Column(gather=comm.rank == 1)})

    with pytest.raises(CollectiveMismatch, match="parallelize: the ranks differ"):
        threads(2, shapes)
    with pytest.raises(CollectiveMismatch, match=r"rank 1 has head: .*gather=True"):
        threads(2, plans)


def test_row_linear_refuses_inputs_that_are_not_shards(threads):
    def run(comm):
        RowLinear(nn.Linear(8, 2), comm)(torch.ones(3, 8))

    with pytest.raises(BadArgument, match="expected this rank's 4 of 8"):
        threads(2, run)


def test_plan_that_shards_one_of_two_tied_layers_is_refused(threads):
    with pytest.raises(BadArgument, match="is tied to a layer that the plan shards"):
        threads(2, lambda comm: parallelize(net(Tied), comm, {"words": Vocabulary()}))
    plan = {"words": Vocabulary(), "head": Row()}
    with pytest.raises(BadArgument, match="shards it in two ways"):
        threads(2, lambda comm: parallelize(net(Tied), comm, plan))


def test_tokens_outside_the_vocabulary_are_refused(threads):
    def embedding(comm):
        VocabularyEmbedding(nn.Embedding(4, 2), comm)(torch.tensor([4]))

    def target(comm):
        vocabulary_cross_entropy(torch.zeros(2, 2), torch.tensor([0, -1]), comm)

    def shapes(comm):
        vocabulary_cross_entropy(torch.zeros(2, 2), torch.tensor([0]), comm)

    def reduction(comm):
        targets = torch.tensor([0, 1])
        vocabulary_cross_entropy(torch.zeros(2, 2), targets, comm, reduction="max")

    def sparse(comm):
        VocabularyEmbedding(nn.Embedding(4, 2, sparse=True), comm)

    for wrong, message in [
        (embedding, r"tokens from 4 to 4; the vocabulary has 4 words"),
        (target, "tokens from -1"),
        (shapes, "expected one target for each row"),
        (reduction, "reduction = 'max'"),
        (sparse, "sparse gradients cannot be sharded"),
    ]:
        with pytest.raises(BadArgument, match=message):
            threads(2, wrong)


@pytest.mark.parametrize("name", PLANS)
def test_one_more_forward_of_a_sharded_layer_is_detected(threads, name):
    def run(comm):
        model = parallelize(net(), comm, PLANS[name])
        x, y = tokens(0)
        if comm.rank == 1:
            model(x)
        vocabulary_cross_entropy(model(x), y, comm).backward()

    with pytest.raises(CollectiveMismatch, match="vocabulary_cross_entropy"):
        threads(2, run)


def test_module_in_plan_and_on_shards_is_refused():
    with pytest.raises(BadArgument, match="'head' is in the plan already"):
        sequence_plan(PLAN, on_shards=["head"])

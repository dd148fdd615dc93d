"""Butterfly: the ranks as digits, one digit settled per step.

Write n as a product of factors, and ranks in that mixed radix. In each step the ranks
that differ in one digit only are a group; in reduce_scatter each of them becomes
responsible for the chunks with its own digit, and gets those from the rest of the
group. From the highest digit down, the blocks sent shrink by the factor each time.

                  rounds             span, in buffers
  reduce_scatter  sum of (f-1)       (n-1)/n, the least possible
  all_gather      sum of (f-1)       (n-1)/n, the least possible
  all_reduce      2 · sum of (f-1)   2(n-1)/n, the least possible

over the factors f of n. `radix` joins prime factors into larger ones up to that size:
fewer steps, with more partners in each.

A prime n is one factor, so every rank would send to all others, in as many rounds as a
ring has. Where that saves rounds, a prime n is folded instead: q = 2^⌊log2 n⌋ ranks
take part, and the surplus ranks hand their data in before and get the result after.
With l = ⌊log2 n⌋ and radix 2:

                  rounds, n prime    span       folded from
  reduce_scatter  l + 2              about 2    n = 7
  all_gather      l + 2              about 2    n = 7
  all_reduce      2l + 2             4 - 2/q    n = 5
"""

from collections.abc import Iterator

import numpy as np

from unisono.algorithms.advice import Advice, Words
from unisono.algorithms.recursive_doubling import power_below
from unisono.algorithms.registry import algorithm
from unisono.schedule import Schedule, Step, fold, reduce_step
from unisono.schedule.collective import REDUCE_SCATTER

ADVICE = Advice(
    en=Words(
        good=(
            "Numbers of ranks with small factors, as 8, 12 or 24: few rounds and "
            "the fewest bytes."
        ),
        bad=(
            "Large prime factors: so many messages in one step. Primes are folded onto "
            "a power of two, which costs about twice the bytes."
        ),
        memory="None: sums are made in the buffer itself.",
    ),
    zh=Words(
        good="rank 数可分解为小因数时（如 8、12、24）：轮数少，字节最少。",
        bad=(
            "rank 数含大质因数时：一步中要发同样多的消息。"
            "rank 数为质数时折叠到 2 的幂，字节约为两倍。"
        ),
        memory="不需要：直接在缓冲区内求和。",
    ),
)


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def reduce_scatter(n: int, radix: int = 2) -> Schedule:
    """From the highest digit down, each group splits what its ranks still share."""
    return fold(_settled(_core_ranks(n, radix, phases=1), radix), n)


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def all_gather(n: int, radix: int = 2) -> Schedule:
    """The same backwards: from the lowest digit up, each group pools what it has."""
    return reduce_scatter(n, radix=radix).mirror()


@algorithm(also=[{"radix": 4}], least={"radix": 2})
def all_reduce(n: int, radix: int = 2) -> Schedule:
    """Sums down the digits, copies back up."""
    halves = _settled(_core_ranks(n, radix, phases=2), radix)
    return fold(halves.then(halves.mirror()), n)


def _core_ranks(n: int, radix: int, phases: int) -> int:
    """How many ranks the digits are of: n, or the power of two that it folds onto.

    Only a prime above the radix is folded, and only if that saves rounds. Handing in
    and getting back are two; `phases` is how often all digits are gone through.
    """
    if n <= radix or len(list(_primes(n))) != 1:
        return n
    fewer = power_below(n)
    folded = phases * _rounds(factors(fewer, radix)) + 2
    return fewer if folded < phases * _rounds(factors(n, radix)) else n


def _rounds(digits: list[int]) -> int:
    """The rounds of one pass over the digits."""
    return sum(factor - 1 for factor in digits)


def _settled(n: int, radix: int) -> Schedule:
    """The reduce_scatter over the digits of n."""
    digits = factors(n, radix)
    return Schedule(REDUCE_SCATTER, n, n, lambda: settle(digits))


def settle(digits: list[int]) -> Iterator[Step]:
    """Reduce-scatter over all ranks of a mixed radix, the first digit the highest."""
    n = int(np.prod(digits, dtype=np.int64))
    stride = n
    for factor in digits:
        block, stride = stride, stride // factor
        rank = np.arange(n)[:, None, None]
        digit, low = np.arange(factor)[:, None], np.arange(stride)
        head = rank - rank % block + digit * stride
        sent = reduce_step(head + low, src=rank, dst=head + rank % stride)
        yield sent.where(sent.src != sent.dst)


def factors(n: int, radix: int) -> list[int]:
    """The prime factors of n, multiplied together as long as they stay within radix."""
    products = [1]
    for prime in _primes(n):
        if products[-1] * prime <= radix:
            products[-1] *= prime
        else:
            products.append(prime)
    return [f for f in products if f > 1]


def _primes(n: int) -> Iterator[int]:
    """The prime factors of n, smallest first."""
    p = 2
    while p * p <= n:
        while n % p == 0:
            yield p
            n //= p
        p += 1
    if n > 1:
        yield n

"""A group of `ray.util.collective` that is a communicator.

Ray keeps a public register of backends (`register_collective_backend`), by name and in
each process. A group is made by its ranks one by one, so they have to find each other:
they do it in Ray's own store of keys and values, the way its gloo groups do.

A store remembers what a group of the same name left there when its ranks died. So rank
0 offers a new word, the others answer it with one of theirs, and the agreement repeats
all of them, so an old line is not taken for a new one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray.experimental import internal_kv
from ray.util.collective import backend_registry
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import ReduceOp

import unisono
from unisono.errors import BadArgument, ConnectFailed
from unisono.interop.ray.actor import environment, places, whereabouts

NAME = "unisono"
_RENDEZVOUS_TIMEOUT_S = 60.0
_POLL_S = 0.02
_OPS = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


def register() -> None:
    """Make "unisono" a backend of `ray.util.collective` in this process.

    The driver and every actor need it, as for any backend that is not Ray's own; a
    second time does nothing.
    """
    from ray.util import collective  # fills the register with Ray's own

    if not collective.backend_registry._global_registry.is_registered(NAME):
        backend_registry.register_collective_backend(NAME, UnisonoGroup)


class _RankOffer(msgspec.Struct):
    offer: str
    word: str
    host: str


class _GroupTable(msgspec.Struct):
    words: list[str]
    hosts: list[str]
    variables: dict[str, str]


class _Store:
    """Ray's keys and values, those of one group."""

    def __init__(self, group: str, until: float) -> None:
        job = ray.get_runtime_context().get_job_id()
        self._stem, self._until = f"unisono/{job}/{group}/", until

    def put(self, name: str, value: Any) -> None:
        internal_kv._internal_kv_put(
            self._stem + name, msgspec.json.encode(value), overwrite=True
        )

    def get(self, name: str, kind: type[Any]) -> Any:
        """What is there, or None."""
        data = internal_kv._internal_kv_get(self._stem + name)
        return None if data is None else msgspec.json.decode(data, type=kind)

    def clear(self, names: Sequence[str]) -> None:
        for name in names:
            internal_kv._internal_kv_del(self._stem + name)

    def wait(self, missing: list[int], rank: int, n: int) -> None:
        """A moment, if there is time left."""
        if time.monotonic() >= self._until:
            raise ConnectFailed(
                f"rank {rank} of {n}: ranks {missing} have not joined the group within "
                f"{_RENDEZVOUS_TIMEOUT_S:.0f} s; all actors of a group must create it",
                missing=missing,
            )
        time.sleep(_POLL_S)


def _lead(store: _Store, n: int) -> _GroupTable:
    """Rank 0: collect the others' answers and publish the table of the group."""
    here, offer = whereabouts(), secrets.token_hex(16)
    words, hosts = {0: offer}, {0: here.host}
    store.put("offer", offer)
    while len(words) < n:
        for rank in range(1, n):
            answer = None if rank in words else store.get(str(rank), _RankOffer)
            if answer is not None and answer.offer == offer:
                words[rank], hosts[rank] = answer.word, answer.host
        if len(words) < n:
            store.wait([rank for rank in range(n) if rank not in words], 0, n)
    variables = {"UNISONO_JOB": offer}
    if len(set(hosts.values())) > 1:
        host = f"[{here.address}]" if ":" in here.address else here.address
        variables["UNISONO_ADDRESS"] = f"{host}:{here.port}"
        variables["UNISONO_SECRET"] = secrets.token_hex(32)
    agreed = _GroupTable(
        [words[rank] for rank in range(n)],
        [hosts[rank] for rank in range(n)],
        variables,
    )
    store.put("agreement", agreed)
    return agreed


def _follow(store: _Store, rank: int, n: int) -> _GroupTable:
    """Another rank: answer rank 0's offer until the agreement bears our word."""
    here, word, answered = whereabouts(), secrets.token_hex(16), None
    while True:
        offer = store.get("offer", str)
        if offer is not None and offer != answered:
            store.put(str(rank), _RankOffer(offer, word, here.host))
            answered = offer
        agreed = store.get("agreement", _GroupTable)
        if agreed is not None and len(agreed.words) == n and agreed.words[rank] == word:
            return agreed  # type: ignore[no-any-return]
        store.wait([0], rank, n)


class UnisonoGroup(BaseGroup):  # type: ignore[misc]
    """What Ray calls a group; its tensors are NumPy arrays and torch tensors on CPUs.

    Ray wraps each tensor into a list of one, for backends with several GPUs to a rank.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        """Rendezvous with the other ranks."""
        super().__init__(world_size, rank, group_name)
        store = _Store(group_name, time.monotonic() + _RENDEZVOUS_TIMEOUT_S)
        agreed = _follow(store, rank, world_size) if rank else _lead(store, world_size)
        with environment(agreed.variables | places(agreed.hosts)[rank]):
            self._comm = unisono.init()
        self._comm.barrier()
        if rank == 0:  # all have read it; the secret need not lie there any longer
            answers = [str(other) for other in range(1, world_size)]
            store.clear(["offer", "agreement", *answers])

    @classmethod
    def backend(cls) -> str:
        """Its name."""
        return NAME.upper()

    @classmethod
    def check_backend_availability(cls) -> bool:
        """It is here."""
        return True

    def destroy_group(self) -> None:
        """Leave the group."""
        self._comm.close()

    def allreduce(self, tensor: list[Any], allreduce_options: Any = None) -> None:
        """In place."""
        self._comm.all_reduce(_one(tensor), op=_op(allreduce_options))

    def barrier(self, barrier_options: Any = None) -> None:
        """Wait for all."""
        self._comm.barrier()

    def reduce(self, tensor: list[Any], reduce_options: Any = None) -> None:
        """In place at the root; the others keep what they have."""
        root = getattr(reduce_options, "root_rank", 0)
        self._comm.reduce(_one(tensor), root=root, op=_op(reduce_options))

    def broadcast(self, tensor: list[Any], broadcast_options: Any = None) -> None:
        """In place."""
        root = getattr(broadcast_options, "root_rank", 0)
        self._comm.broadcast(_one(tensor), root=root)

    def allgather(
        self, tensor_list: list[Any], tensor: list[Any], allgather_options: Any = None
    ) -> None:
        """Every rank's tensor into its place in the list."""
        places, mine = list(_one(tensor_list)), _one(tensor)
        rows = self._comm.all_gather(mine.reshape(1, -1))
        for place, row in zip(places, rows, strict=True):
            place[...] = row.reshape(place.shape)

    def reducescatter(
        self,
        tensor: list[Any],
        tensor_list: list[Any],
        reducescatter_options: Any = None,
    ) -> None:
        """The sum of all ranks' tensors for this rank; the list is not changed."""
        shares, mine = list(_one(tensor_list)), _one(tensor)
        joined = _empty(mine, (self._world_size, *shares[0].shape))
        for row, share in zip(joined, shares, strict=True):
            row[...] = share
        op = _op(reducescatter_options)
        mine[...] = self._comm.reduce_scatter(joined, op=op).reshape(mine.shape)

    def send(self, tensor: list[Any], send_options: Any) -> None:
        """To one rank."""
        self._comm.send(_one(tensor), send_options.dst_rank)

    def recv(self, tensor: list[Any], recv_options: Any) -> None:
        """From one rank."""
        self._comm.recv(_one(tensor), recv_options.src_rank)


def _one(wrapped: list[Any]) -> Any:
    if len(wrapped) != 1:
        raise BadArgument(f"{len(wrapped)} tensors in one call: expected one per rank")
    return wrapped[0]


def _op(options: Any) -> str:
    return _OPS[getattr(options, "reduceOp", ReduceOp.SUM)]


def _empty(like: Any, shape: tuple[int, ...]) -> Any:
    """Of the same kind and type: a torch tensor knows how, for an array NumPy does."""
    if hasattr(like, "new_empty"):
        return like.new_empty(shape)
    import numpy as np

    return np.empty(shape, like.dtype)

"""The systems that are measured, as one rank uses them; device_systems: on GPUs.

Each class has the same methods: a barrier, memory for arrays, and for a case the call
to be timed, with all its arguments bound. The peers are used as their users would for
speed: flat tensors for gloo, and for MPI the upper-case methods of mpi4py with the
element type spelled out, which saves it a third of a microsecond per call.

Only the standard library and NumPy are imported at the top, because MPI's ranks run in
environments that have nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Protocol, Self

import numpy as np

from unisono.cli._bench.cases import IN_PLACE, REDUCING, ROOTED, Case
from unisono.cli._bench.inputs import Array
from unisono.dtypes import DTYPES, numpy_dtype
from unisono.errors import BadArgument, MissingExtra, UsageError

AnyArray = Any
"""Of NumPy or, on a device, of unisono or torch: it has a length and parts."""
Call = Callable[[], object]

_MPI_TYPES = {
    "bool": "C_BOOL",
    "float32": "FLOAT",
    "float64": "DOUBLE",
    "complex64": "C_FLOAT_COMPLEX",
    "complex128": "C_DOUBLE_COMPLEX",
    **{
        f"{sign}int{bits}": f"{sign.upper()}INT{bits}_T"
        for sign in ("", "u")
        for bits in (8, 16, 32, 64)
    },
}
_TORCH_OPS = {"band": "BAND", "bor": "BOR", "bxor": "BXOR", "mean": "AVG"}


class System(Protocol):
    """One rank of a system."""

    rank: int
    barrier: Call
    refusals: tuple[type[Exception], ...]
    """What it raises for a case that it does not offer."""

    def reserve(self, nbytes: int) -> None:
        """Prepare for arrays of at most so many bytes."""

    def forget(self) -> None:
        """The arrays that were made so far are not used again."""

    def empty(self, count: int, dtype: str, *, shared: bool) -> AnyArray:
        """Memory for an array, shared between the ranks if the system can."""

    def on_host(self, array: AnyArray) -> Array:
        """The array itself if it is in memory of the host, or a copy there."""

    def put(self, array: AnyArray, values: Array) -> None:
        """Bring to the array what has been written to the one of `on_host`."""

    def call(
        self, case: Case, place: str, x: AnyArray, out: AnyArray, algorithm: str
    ) -> Call:
        """What is to be timed."""

    def wait(self) -> None:
        """Return when all calls so far are done."""

    def waiting(self, call: Call) -> Call:
        """The call, which then returns when it is done."""

    def ran(self) -> str:
        """The algorithm of the last call, or "" if the system does not report it."""

    def about_device(self) -> dict[str, Any] | None:
        """What there is to know of the rank's GPU; None on the CPU."""

    def copy_speed(self) -> float:
        """Bytes per second that the rank's GPU reads and writes as it copies."""

    def close(self) -> None:
        """Leave the world."""


class OnHost:
    """Arrays in memory of the host, and calls that return when they are done."""

    def reserve(self, nbytes: int) -> None:
        """Nothing: memory of the host is allocated when it is needed."""

    def forget(self) -> None:
        """Nothing: it is freed when nothing refers to it."""

    def on_host(self, array: AnyArray) -> Array:
        """The array itself."""
        found: Array = array
        return found

    def put(self, array: AnyArray, values: Array) -> None:
        """Nothing: they are the same memory."""

    def wait(self) -> None:
        """Nothing: the calls are done."""

    def waiting(self, call: Call) -> Call:
        """The call itself."""
        return call

    def about_device(self) -> dict[str, Any] | None:
        """There is no GPU in it."""
        return None

    def copy_speed(self) -> float:
        """There is none to ask for."""
        raise BadArgument("copies inside a device: the arrays are on the host")


class _Peer(OnHost):
    """What the peers have in common."""

    refusals: tuple[type[Exception], ...] = (Exception,)

    def empty(self, count: int, dtype: str, *, shared: bool) -> AnyArray:
        """Ordinary memory."""
        return np.empty(count, numpy_dtype(dtype))

    def ran(self) -> str:
        """The peers do not report it."""
        return ""


class Unisono(OnHost):
    """Our own."""

    refusals: tuple[type[Exception], ...] = (UsageError, MissingExtra)

    def __init__(self, comm: Any) -> None:
        """`comm` is this rank's communicator."""
        self.comm = comm
        self.rank = int(comm.rank)
        self.barrier: Call = comm.barrier

    @classmethod
    def join(cls, rank: int, n: int, rendezvous: str) -> Self:
        """A rank of the world of this rendezvous."""
        init: Any = import_module("unisono").init
        return cls(init(rank=rank, world_size=n, job=rendezvous))

    def empty(self, count: int, dtype: str, *, shared: bool) -> AnyArray:
        """Memory in which collectives work without a copy, if shared."""
        if shared and count:
            return np.asarray(self.comm.empty((count,), dtype))
        return np.empty(count, numpy_dtype(dtype))

    def call(
        self, case: Case, place: str, x: AnyArray, out: AnyArray, algorithm: str
    ) -> Call:
        """The method of the communicator, with options only where they differ."""
        if case.collective == "barrier":
            return partial(self.comm.barrier, **_given(algorithm=algorithm))
        if case.collective == "send_recv":
            return self._send_recv(case, x, out)
        method = getattr(self.comm, case.collective)
        alone = place == IN_PLACE == case.compared
        options = _given(
            op=case.op if case.collective in REDUCING and case.op != "sum" else "",
            root=case.root if case.collective in ROOTED else 0,
            algorithm=algorithm,
        )
        if not alone and (len(out) or case.collective not in ("gather", "reduce")):
            options["out"] = out
        gives = len(x) or case.collective != "scatter"
        return partial(method, x if gives else None, **options)

    def _send_recv(self, case: Case, x: AnyArray, out: AnyArray) -> Call:
        """To the next rank, from the one before; neighbours begin at opposite ends."""
        send = partial(self.comm.send, x, (self.rank + 1) % case.n)
        receive = partial(self.comm.recv, out, (self.rank - 1) % case.n)
        if case.n == 1:
            raise BadArgument("send_recv needs at least two ranks")
        first, second = (send, receive) if self.rank % 2 == 0 else (receive, send)

        def both() -> None:
            first()
            second()

        return both

    def ran(self) -> str:
        """What the flight recorder has of the last call."""
        return str(self.comm.records()[-1]["algorithm"])

    def close(self) -> None:
        """Leave the world."""
        self.comm.close()


class Gloo(_Peer):
    """gloo as torch.distributed offers it on a CPU."""

    backend = "gloo"

    def __init__(self, rank: int, n: int, rendezvous: str) -> None:
        """Rendezvous by a file."""
        self.torch = import_module("torch")
        self.torch.set_num_threads(1)
        self.dist = import_module("torch.distributed")
        self.dist.init_process_group(
            self.backend, init_method=f"file://{rendezvous}", rank=rank, world_size=n
        )
        self.rank = rank
        self.barrier: Call = self.dist.barrier

    def call(
        self, case: Case, place: str, x: AnyArray, out: AnyArray, algorithm: str
    ) -> Call:
        """The function of torch.distributed on flat tensors."""
        name, dist = case.collective, self.dist
        if name == "barrier":
            return self.barrier
        give, get = self.tensor(x, case.dtype), self.tensor(out, case.dtype)
        if name in REDUCING:
            op = getattr(dist.ReduceOp, _TORCH_OPS.get(case.op, case.op.upper()))
        at_root = self.rank == case.root
        rooted = {
            "gather": lambda: partial(
                dist.gather, give, list(get.chunk(case.n)) if at_root else None
            ),
            "scatter": lambda: partial(
                dist.scatter, get, list(give.chunk(case.n)) if at_root else None
            ),
        }
        if name in rooted:
            key = "dst" if name == "gather" else "src"
            return partial(rooted[name](), **{key: case.root})
        ready: dict[str, Callable[[], Call]] = {
            "all_reduce": lambda: partial(dist.all_reduce, give, op),
            "reduce": lambda: partial(dist.reduce, give, case.root, op),
            "broadcast": lambda: partial(dist.broadcast, give, case.root),
            "all_gather": lambda: partial(self._flat("all_gather"), get, give),
            "reduce_scatter": lambda: partial(
                self._flat("reduce_scatter"), get, give, op
            ),
            "all_to_all": lambda: partial(dist.all_to_all_single, get, give),
            "send_recv": lambda: self._send_recv(case, give, get),
        }
        return ready[name]()

    def _flat(self, name: str) -> Any:
        """The function on flat tensors; newer versions of torch have a new name."""
        old = {
            "all_gather": "all_gather_into_tensor",
            "reduce_scatter": "reduce_scatter_tensor",
        }
        new = getattr(self.dist, f"{name}_single", None)
        return new or getattr(self.dist, old[name])

    def _send_recv(self, case: Case, give: Any, get: Any) -> Call:
        after, before = (self.rank + 1) % case.n, (self.rank - 1) % case.n

        def both() -> None:
            sent = self.dist.isend(give, after)
            self.dist.recv(get, before)
            sent.wait()

        return both

    def tensor(self, array: AnyArray, dtype: str) -> Any:
        """The same memory as a tensor; small floats are extension types of NumPy."""
        if DTYPES[dtype].kind != "v":
            return self.torch.from_numpy(array)
        raw = array.view(np.int16 if array.itemsize == 2 else np.int8)
        return self.torch.from_numpy(raw).view(getattr(self.torch, dtype))

    def close(self) -> None:
        """Leave the world."""
        self.dist.destroy_process_group()


class Mpi(_Peer):
    """Open MPI or MPICH through mpi4py, whichever the environment has."""

    def __init__(self, rank: int, n: int, rendezvous: str) -> None:
        """MPI has the rank from its launcher."""
        self.mpi = import_module("mpi4py.MPI")
        self.world = self.mpi.COMM_WORLD
        self.rank = int(self.world.rank)
        self.barrier: Call = self.world.Barrier
        if self.world.size != n:
            raise BadArgument(f"MPI's world has {self.world.size} ranks, expected {n}")

    def empty(self, count: int, dtype: str, *, shared: bool) -> AnyArray:
        """Ordinary memory, if MPI has the element type."""
        if dtype not in _MPI_TYPES:
            raise BadArgument(f"MPI has no {dtype}")
        return super().empty(count, dtype, shared=shared)

    def call(
        self, case: Case, place: str, x: AnyArray, out: AnyArray, algorithm: str
    ) -> Call:
        """The upper-case method, in place where the case is."""
        name, world = case.collective, self.world
        if name == "barrier":
            return self.barrier
        if case.op == "mean" and name in REDUCING:
            raise BadArgument("MPI has no mean")
        datatype = getattr(self.mpi, _MPI_TYPES[case.dtype])
        op = getattr(self.mpi, case.op.upper(), None)
        at_root, here = self.rank == case.root, self.mpi.IN_PLACE
        give, get = [x, datatype], [out, datatype]
        after, before = (self.rank + 1) % case.n, (self.rank - 1) % case.n
        ready: dict[str, Call] = {
            "all_reduce": partial(world.Allreduce, here, give, op),
            "reduce": partial(
                world.Reduce,
                *((here, give) if at_root else (give, None)),
                op,
                case.root,
            ),
            "broadcast": partial(world.Bcast, give, case.root),
            "all_gather": partial(world.Allgather, give, get),
            "reduce_scatter": partial(world.Reduce_scatter_block, give, get, op),
            "all_to_all": partial(world.Alltoall, give, get),
            "gather": partial(world.Gather, give, get if at_root else None, case.root),
            "scatter": partial(
                world.Scatter, give if at_root else None, get, case.root
            ),
            "send_recv": partial(world.Sendrecv, give, after, 0, get, before, 0),
        }
        return ready[name]

    def close(self) -> None:
        """Leave the world."""
        self.mpi.Finalize()


SYSTEMS: dict[str, Callable[[int, int, str], System]] = {
    "unisono": Unisono.join,
    "gloo": Gloo,
    "openmpi": Mpi,
    "mpich": Mpi,
}


def _given(**options: Any) -> dict[str, Any]:
    """Only what differs from the defaults, for every option costs a few nanoseconds."""
    return {name: value for name, value in options.items() if value}

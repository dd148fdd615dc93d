"""Which place of which buffer of MSCCL a slot of ours is, and the other way round.

all_reduce, broadcast, reduce   chunk c lies at i[c]; o is the same buffer
all_gather                      at o[c]; the input is a part of it
reduce_scatter                  at i[c]; the output is a part of it
all_to_all                      on its source at i[target], on its target at
                                o[source], on its way in scratch
"""

from __future__ import annotations

from unisono.errors import BadArgument
from unisono.schedule.collective import COLLECTIVES, Contract

NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_to_all": "alltoall",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
OURS = {theirs: COLLECTIVES[ours] for ours, theirs in NAMES.items()}


class Slots:
    """The buffers of all ranks, for one contract."""

    def __init__(self, contract: Contract) -> None:
        """Scratch is handed out as it is asked for."""
        self.contract = contract
        self.name = contract.collective.name
        self.share = contract.num_chunks // contract.n
        self.scratch = [0] * contract.n
        self._kept: dict[tuple[int, int], int] = {}

    @property
    def sizes(self) -> tuple[int, int]:
        """How many chunks input and output have."""
        chunks = self.contract.num_chunks
        if self.name == "all_gather":
            return self.share, chunks
        if self.name == "reduce_scatter":
            return chunks, self.share
        return (
            (self.share, self.share) if self.name == "all_to_all" else (chunks, chunks)
        )

    def place(self, rank: int, slot: int) -> tuple[str, int]:
        """Where a rank has a slot."""
        if slot < self.contract.num_chunks and self.name != "all_to_all":
            return ("o" if self.name == "all_gather" else "i"), slot
        if slot < self.contract.num_chunks:
            n, pieces = self.contract.n, self.share // self.contract.n
            source, rest = divmod(slot, self.share)
            target, piece = divmod(rest, pieces)
            assert target < n
            if rank == source:
                return "i", rest
            if rank == target:
                return "o", source * pieces + piece
        if (rank, slot) not in self._kept:
            self._kept[rank, slot] = self.scratch[rank]
            self.scratch[rank] += 1
        return "s", self._kept[rank, slot]

    def slot(self, rank: int, buffer: str, place: int) -> int:
        """The slot that a place of a rank's buffer is; scratch is temporaries."""
        chunks = self.contract.num_chunks
        inputs, outputs = self.sizes
        size = {"i": inputs, "o": outputs}.get(buffer)
        if size is not None and not 0 <= place < size:
            raise BadArgument(f"gpu {rank}: {buffer}[{place}]: there are {size} chunks")
        if buffer == "s":
            return chunks + place
        if self.name == "all_gather" and buffer == "i":
            return rank * self.share + place
        if self.name == "reduce_scatter" and buffer == "o":
            return rank * self.share + place
        if self.name == "all_to_all" and buffer == "i":
            return rank * self.share + place
        if self.name == "all_to_all":
            pieces = self.share // self.contract.n
            source, piece = divmod(place, pieces)
            return source * self.share + rank * pieces + piece
        return place

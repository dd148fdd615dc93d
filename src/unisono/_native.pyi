"""Types of the native core; see native/bindings/module.cpp."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

# bytes, bytearray, memoryview, or an array; typing has a name for these from 3.12 on.
Buffer: TypeAlias = bytes | bytearray | memoryview | NDArray[Any]

def instruction_sets() -> list[str]: ...
def reduce(
    out: NDArray[np.uint8],
    sources: list[NDArray[np.uint8]],
    itemsize: int,
    dtype: int,
    op: int,
    divisor: int,
    instruction_set: int = 0,
) -> None: ...

class ValueRunner:
    def __init__(
        self,
        state: NDArray[np.uint64],
        modulus: int,
        n: int,
        num_slots: int,
        lo: int,
        hi: int,
        may_rename: bool,
    ) -> None: ...
    def run(
        self,
        src: NDArray[np.int64],
        dst: NDArray[np.int64],
        chunk: NDArray[np.int64],
        into: NDArray[np.int64] | None,
        mask: NDArray[np.bool_] | None,
        all_reduce: bool,
    ) -> int: ...

class PresenceRunner:
    def __init__(
        self,
        state: NDArray[np.uint8],
        n: int,
        num_slots: int,
        lo: int,
        hi: int,
        may_rename: bool,
    ) -> None: ...
    def run(
        self,
        src: NDArray[np.int64],
        dst: NDArray[np.int64],
        chunk: NDArray[np.int64],
        into: NDArray[np.int64] | None,
        mask: NDArray[np.bool_] | None,
        all_reduce: bool,
    ) -> int: ...

def learn_arrays(type: type, probe: object, data: int, shape: list[int]) -> bool: ...
def array_address(x: object) -> int: ...
def quick_of(
    comm: Comm,
) -> Callable[[int, object, object, object, object], int]: ...
def work_hooks() -> object: ...
def look_for_sites(ours: str) -> None: ...
def site_frames(site: int) -> list[tuple[str, str, int]]: ...
def now_ns() -> int: ...
def process_ends() -> None: ...
def arm_failpoints(spec: str) -> None: ...
def failpoint_names() -> list[str]: ...
def cut_names() -> list[str]: ...

NOTE_BYTES: int
TEST_HOOKS: bool
MOST_ACTIONS: int
MOST_RANKS: int

Note = tuple[int, int, int, int, int, int, int, int, str, str, str, str]
Verdict = tuple[int, int, int, int]
State = tuple[int, Note, Note, int, bool, bool, Note]
Record = tuple[int, int, Note, int, int, int, int, int, int, int, int, int]

class Hub:
    def __init__(self, n: int) -> None: ...

class Engine:
    @staticmethod
    def between_threads(hub: Hub, rank: int) -> Engine: ...
    @staticmethod
    def between_processes(rank: int, sockets: list[int], pids: list[int]) -> Engine: ...
    def create(self, bytes: int) -> int: ...
    def has(self, owner: int, id: int) -> bool: ...
    def drop(self, id: int) -> None: ...
    def buffer(self, bytes: int) -> NDArray[np.uint8]: ...
    def bury(self, rank: int) -> None: ...
    def dead(self, rank: int) -> bool: ...
    def ended(self, rank: int) -> bool: ...
    def starved(self) -> bool: ...
    def forked(self) -> bool: ...
    def live(
        self,
        fds: list[int],
        outgoing: list[bytes],
        incoming: list[bytes],
        epoch: int,
        beat: int,
        limit: int,
        tls: list[Tls | None],
    ) -> None: ...
    def silence(self) -> list[int]: ...
    def records(self) -> list[Record]: ...
    def start_trace(self, moments: int, calls: int) -> None: ...
    def stop_trace(self) -> None: ...
    def traces(self) -> bool: ...
    def traced(self) -> tuple[tuple[bytes, int], tuple[bytes, int]]: ...
    def close(self) -> None: ...

class Program:
    def __init__(
        self,
        actions: NDArray[np.int32],
        sources: NDArray[np.int32],
        waits: NDArray[np.int32],
        exits: NDArray[np.int32],
        lead: list[int],
        readers: list[int],
        deliveries: list[int],
        tail: int,
        messages: NDArray[np.int32],
    ) -> None: ...

class Plan:
    def __init__(
        self,
        programs: list[Program],
        input_at: NDArray[np.int64],
        output_at: NDArray[np.int64],
        size: NDArray[np.int64],
        piece: list[int],
        pieces: list[int],
        input_bytes: int,
        output_bytes: int,
        sent_bytes: int,
        divisor: int,
        in_header: bool,
        may_lend: bool,
        may_reach: bool,
        lent_always: int,
        streams: bool,
        fingerprint: int,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        count: int,
        content: int,
        texts: list[str],
        coding: tuple[str, int, int, int, bool, int] | None,
    ) -> None: ...

class Work:
    def wait(self, timeout: int, helps: bool = True) -> int: ...
    def state(self) -> int: ...
    def seq(self) -> int: ...
    def awaited(self) -> list[int]: ...
    def note(self) -> Note: ...
    def verdict(self) -> Verdict: ...
    def source(self) -> int: ...
    def message_bytes(self) -> int: ...

class Comm:
    def __init__(
        self,
        engine: Engine,
        ranks: list[int],
        rank: int,
        here: list[int],
        owner: int,
        segment: int,
        half: int,
        id: int,
        agreed: int,
    ) -> None: ...
    def attach(
        self,
        sends: bool,
        rank: int,
        lane: int,
        lanes: int,
        fd: int,
        key: bytes,
        epoch: int,
        messages: bool,
        tls: Tls | None,
    ) -> None: ...
    def leads_to(self, rank: int, messages: bool) -> bool: ...
    @staticmethod
    def memory_needed(n: int, windows: int, half: int) -> int: ...
    def set_patience(
        self, spins: int, yields: int, turn: int, late_after: int, timeout: int
    ) -> None: ...
    def set_timeout(self, timeout: int) -> None: ...
    def remember(
        self, kind: int, x: object, out: object, op: object, root: object, plan: Plan
    ) -> None: ...
    def run(
        self, plan: Plan, input: int, output: int, timeout: int, keep: object
    ) -> bool: ...
    def submit(self, plan: Plan, input: int, output: int, timeout: int) -> Work: ...
    def transfer(
        self,
        sends: bool,
        peer: int,
        tag: int,
        data: int,
        bytes: int,
        type: int,
        collective: int,
        dtype: int,
        count: int,
        timeout: int,
        async_op: bool,
    ) -> Work: ...
    def reach(self) -> int: ...
    def try_reach(self) -> int: ...
    def sent_bytes(self) -> int: ...
    def id(self) -> int: ...
    def touched(self) -> bool: ...
    def verdict(self) -> Verdict: ...
    def seq(self) -> int: ...
    def awaited(self) -> list[int]: ...
    def tell_connecting(self, rank: int, lasts: bool) -> None: ...
    def give_up(self, rank: int, late: bool) -> None: ...
    def states(self) -> list[State]: ...
    def close(self) -> None: ...

def crc32c(data: Buffer, seed: int = 0, way: int = 0) -> int: ...
def crc32c_ways() -> list[str]: ...
def siphash(key: bytes, data: Buffer) -> int: ...
def fuzz_frames(seed: int, count: int) -> dict[str, int]: ...

class Seal:
    def __init__(self, key: bytes, epoch: int) -> None: ...
    def seal(
        self,
        payload: Buffer,
        kind: int,
        flags: int = 0,
        call: int = 0,
        fingerprint: int = 0,
        piece: int = 0,
        message: int = 0,
    ) -> bytes: ...
    def check(self, header: bytes, limit: int) -> str: ...
    def check_payload(self, header: bytes, payload: Buffer) -> bool: ...

class FrameReader:
    def __init__(self, key: bytes, epoch: int, limit: int) -> None: ...
    def feed(self, data: Buffer) -> list[tuple[bytes, bytes]]: ...
    def flaw(self) -> str: ...
    def inside(self) -> bool: ...

def tls_missing() -> str: ...

class Tls:
    def __init__(
        self, fd: int, key: bytes, dials: bool, lifetime: int = ...
    ) -> None: ...
    def shake(self) -> int: ...
    def send(self, data: bytes) -> int: ...
    def recv(self, most: int) -> bytes: ...
    def holds_bytes(self) -> bool: ...
    def changes(self) -> int: ...

# kind, rank, cause, reporter, communicator, word
Event = tuple[str, int, str, int, int, int]

class Lifeline:
    def __init__(
        self,
        rank: int,
        fds: list[int],
        keys: list[tuple[bytes, bytes]],
        epoch: int = 0,
        beat_ms: int = 1000,
        limit_ms: int = 10000,
        tls: list[Tls | None] = ...,
    ) -> None: ...
    def events(self) -> list[Event]: ...
    def tell_dead(self, rank: int, cause: str) -> bool: ...
    def tell_verdict(self, comm: int, word: int) -> bool: ...
    def silence(self) -> list[int]: ...
    def forked(self) -> bool: ...
    def close(self) -> None: ...

class Simulator:
    def __init__(
        self,
        n: int,
        sizes: NDArray[np.float64],
        bandwidth: NDArray[np.float64],
        twins: NDArray[np.int64],
        overhead: float,
        encode: float,
        decode: float,
        reduce: float,
        ratio: float,
        duplex: float,
        streams: bool,
    ) -> None: ...
    def add(
        self,
        src: NDArray[np.int64],
        dst: NDArray[np.int64],
        chunk: NDArray[np.int64],
        into: NDArray[np.int64],
        reduces: NDArray[np.bool_],
    ) -> None: ...
    def unknown(self) -> NDArray[np.int64]: ...
    def know(
        self,
        first: NDArray[np.int64],
        links: NDArray[np.int64],
        latency: NDArray[np.float64],
    ) -> None: ...
    def run(self, begin: NDArray[np.float64], n: int) -> int: ...
    def edges(self) -> NDArray[np.int64]: ...
    def carried(self) -> NDArray[np.float64]: ...
    def finished(self) -> NDArray[np.float64]: ...
    def messages(
        self,
    ) -> tuple[
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.int64],
        NDArray[np.float64],
        NDArray[np.float64],
        NDArray[np.float64],
        NDArray[np.int64],
    ]: ...

def codec_names() -> list[str]: ...
def codec_block(name: str) -> int: ...
def codec_bytes(name: str, count: int, block: int) -> int: ...
def codec_key(step: int, slot: int) -> int: ...
def codec_encode(
    name: str,
    to: NDArray[np.uint8],
    source: NDArray[np.uint8],
    dtype: int,
    block: int,
    key: int = 0,
    instruction_set: int = 0,
) -> None: ...
def codec_decode(
    name: str,
    to: NDArray[np.uint8],
    source: NDArray[np.uint8],
    dtype: int,
    block: int,
    instruction_set: int = 0,
) -> None: ...
def codec_add(
    name: str,
    into: NDArray[np.uint8],
    source: NDArray[np.uint8],
    dtype: int,
    block: int,
    instruction_set: int = 0,
) -> None: ...

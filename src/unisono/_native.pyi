# Made by tools/stubs.py (make stubs); do not edit.
"""
unisono's native core: the streaming verifier, the reductions, the engine, the wire
"""

from collections.abc import Callable, Sequence

import numpy
from numpy.typing import NDArray

# bytes, bytearray, memoryview, or an array; typing has a name for these from 3.12 on.
Buffer = bytes | bytearray | memoryview | NDArray[numpy.uint8]
Note = tuple[int, int, int, int, int, int, int, int, str, str, str, str]
Failure = tuple[int, int, int, int]
State = tuple[int, Note, Note, int, bool, bool, Note]
Record = tuple[int, int, Note, int, int, int, int, int, int, int, int, int]
# kind, rank, cause, reporter, communicator, word
Event = tuple[str, int, str, int, int, int]

def tls_missing() -> str: ...

class Tls:
    def __init__(
        self, fd: int, key: bytes, dials: bool, lifetime: int = 68719476736
    ) -> None: ...
    def handshake(self) -> int: ...
    def send(self, data: bytes) -> int: ...
    def recv(self, most: int) -> bytes: ...
    def has_pending(self) -> bool: ...
    def key_updates(self) -> int: ...

NOTE_BYTES: int = 149

MOST_ACTIONS: int = 1048575

MOST_RANKS: int = 4096

class Program:
    def __init__(
        self,
        actions: NDArray[numpy.int32],
        sources: NDArray[numpy.int32],
        waits: NDArray[numpy.int32],
        exits: NDArray[numpy.int32],
        lead: Sequence[int],
        readers: Sequence[int],
        deliveries: Sequence[int],
        tail: int,
        messages: NDArray[numpy.int32],
    ) -> None: ...

class Plan:
    def __init__(
        self,
        programs: Sequence[Program],
        input_at: NDArray[numpy.int64],
        output_at: NDArray[numpy.int64],
        size: NDArray[numpy.int64],
        piece: Sequence[int],
        pieces: Sequence[int],
        input_bytes: int,
        output_bytes: int,
        sent_bytes: int,
        divisor: int,
        in_header: bool,
        may_expose: bool,
        may_cross_memory: bool,
        always_exposed: int,
        streams: bool,
        fingerprint: int,
        collective: int,
        dtype: int,
        op: int,
        root: int,
        count: int,
        content: int,
        texts: Sequence[str],
        coding: tuple[str, int, int, int, bool, int] | None,
    ) -> None: ...

class PeerTable:
    def __init__(self, n: int) -> None: ...

class Engine:
    @staticmethod
    def between_threads(table: PeerTable, rank: int) -> Engine: ...
    @staticmethod
    def between_processes(
        rank: int, sockets: Sequence[int], pids: Sequence[int]
    ) -> Engine: ...
    def create(self, bytes: int) -> int: ...
    def has(self, owner: int, id: int) -> bool: ...
    def drop(self, id: int) -> None: ...
    def buffer(self, bytes: int) -> NDArray[numpy.uint8]: ...
    def mark_dead(self, rank: int) -> None: ...
    def dead(self, rank: int) -> bool: ...
    def ended(self, rank: int) -> bool: ...
    def out_of_resources(self) -> bool: ...
    def forked(self) -> bool: ...
    def connect_lifeline(
        self,
        fds: Sequence[int],
        outgoing: Sequence[bytes],
        incoming: Sequence[bytes],
        epoch: int,
        beat: int,
        limit: int,
        tls: list[Tls | None],
    ) -> None: ...
    def silence(self) -> list[int]: ...
    def records(self) -> list[Record]: ...
    def start_trace(self, moments: int, calls: int) -> None: ...
    def stop_trace(self) -> None: ...
    def is_tracing(self) -> bool: ...
    def trace_entries(self) -> tuple[tuple[bytes, int], tuple[bytes, int]]: ...
    def close(self) -> None: ...

def enable_call_sites(ours: str) -> None: ...
def call_site_frames(site: int) -> list[tuple[str, str, int]]: ...
def now_ns() -> int: ...
def process_exiting() -> None: ...

class Work:
    def wait(self, timeout: int, helps: bool = True) -> int: ...
    def state(self) -> int: ...
    def seq(self) -> int: ...
    def awaited(self) -> list[int]: ...
    def note(self) -> Note: ...
    def failure(self) -> Failure: ...
    def source(self) -> int: ...
    def message_bytes(self) -> int: ...

def work_hooks() -> object: ...

class Comm:
    def __init__(
        self,
        engine: Engine,
        ranks: Sequence[int],
        rank: int,
        local_ranks: Sequence[int],
        owner: int,
        segment: int,
        half: int,
        id: int,
        shared_id: int,
    ) -> None: ...
    @staticmethod
    def memory_needed(n: int, windows: int, half: int) -> int: ...
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
    def is_connected_to(self, rank: int, messages: bool) -> bool: ...
    def set_wait_policy(
        self, spins: int, yields: int, longest_yield: int, late_after: int, timeout: int
    ) -> None: ...
    def set_timeout(self, timeout: int) -> None: ...
    def failure(self) -> Failure: ...
    def announce_connecting(self, rank: int, lasts: bool) -> None: ...
    def abort_unreachable(self, rank: int, late: bool) -> None: ...
    def seq(self) -> int: ...
    def id(self) -> int: ...
    def awaited(self) -> list[int]: ...
    def sent_bytes(self) -> int: ...
    def cross_memory_access(self) -> int: ...
    def test_cross_memory_access(self) -> int: ...
    def has_writers(self) -> bool: ...
    def states(self) -> list[State]: ...
    def close(self) -> None: ...
    def remember(
        self,
        kind: int,
        x: object,
        out: object | None,
        op: object | None,
        root: object,
        plan: Plan,
    ) -> None: ...
    def run(
        self, plan: Plan, input: int, output: int, timeout: int, keep: object | None
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

def quick_of(comm: Comm) -> Callable[[int, object, object, object, object], int]: ...
def learn_arrays(
    type: object, probe: object, data: int, shape: Sequence[int]
) -> bool: ...
def array_address(x: object) -> int: ...

class Simulator:
    def __init__(
        self,
        n: int,
        sizes: NDArray[numpy.float64],
        bandwidth: NDArray[numpy.float64],
        twins: NDArray[numpy.int64],
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
        src: NDArray[numpy.int64],
        dst: NDArray[numpy.int64],
        chunk: NDArray[numpy.int64],
        into: NDArray[numpy.int64],
        reduces: NDArray[numpy.bool_],
    ) -> None: ...
    def unknown(self) -> NDArray[numpy.int64]: ...
    def know(
        self,
        first: NDArray[numpy.int64],
        links: NDArray[numpy.int64],
        latency: NDArray[numpy.float64],
    ) -> None: ...
    def run(self, begin: NDArray[numpy.float64], n: int) -> int: ...
    def edges(self) -> NDArray[numpy.int64]: ...
    def carried(self) -> NDArray[numpy.float64]: ...
    def finished(self) -> NDArray[numpy.float64]: ...
    def messages(
        self,
    ) -> tuple[
        NDArray[numpy.int64],
        NDArray[numpy.int64],
        NDArray[numpy.int64],
        NDArray[numpy.float64],
        NDArray[numpy.float64],
        NDArray[numpy.float64],
        NDArray[numpy.int64],
    ]: ...

def codec_names() -> list[str]: ...
def codec_block(name: str) -> int: ...
def codec_bytes(name: str, count: int, block: int) -> int: ...
def codec_key(step: int, slot: int) -> int: ...
def codec_encode(
    name: str,
    to: NDArray[numpy.uint8],
    source: NDArray[numpy.uint8],
    dtype: int,
    block: int,
    key: int = 0,
    instruction_set: int = 0,
) -> None: ...
def codec_decode(
    name: str,
    to: NDArray[numpy.uint8],
    source: NDArray[numpy.uint8],
    dtype: int,
    block: int,
    instruction_set: int = 0,
) -> None: ...
def codec_add(
    name: str,
    into: NDArray[numpy.uint8],
    source: NDArray[numpy.uint8],
    dtype: int,
    block: int,
    instruction_set: int = 0,
) -> None: ...
def instruction_sets() -> list[str]: ...
def reduce(
    out: NDArray[numpy.uint8],
    sources: Sequence[NDArray[numpy.uint8]],
    itemsize: int,
    dtype: int,
    op: int,
    divisor: int,
    instruction_set: int = 0,
) -> None: ...

TEST_HOOKS: bool = True

def arm_failpoints(spec: str) -> None: ...
def failpoint_names() -> list[str]: ...
def byte_limit_names() -> list[str]: ...
def fuzz_frames(seed: int, count: int) -> dict[str, int]: ...
def crc32c(data: Buffer, seed: int = 0, way: int = 0) -> int: ...
def crc32c_ways() -> list[str]: ...
def siphash(key: bytes, data: Buffer) -> int: ...

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

class Lifeline:
    def __init__(
        self,
        rank: int,
        fds: Sequence[int],
        keys: Sequence[tuple[bytes, bytes]],
        epoch: int = 0,
        beat_ms: int = 1000,
        limit_ms: int = 10000,
        tls: list[Tls | None] = ...,
    ) -> None: ...
    def events(self) -> list[Event]: ...
    def announce_dead(self, rank: int, cause: str) -> bool: ...
    def announce_failure(self, comm: int, word: int) -> bool: ...
    def silence(self) -> list[int]: ...
    def forked(self) -> bool: ...
    def close(self) -> None: ...

class ValueRunner:
    def __init__(
        self,
        state: NDArray[numpy.uint64],
        modulus: int,
        n: int,
        num_slots: int,
        lo: int,
        hi: int,
        may_rename: bool,
    ) -> None: ...
    def run(
        self,
        src: NDArray[numpy.int64],
        dst: NDArray[numpy.int64],
        chunk: NDArray[numpy.int64],
        into: NDArray[numpy.int64] | None,
        mask: NDArray[numpy.bool_] | None,
        all_reduce: bool,
    ) -> int: ...

class PresenceRunner:
    def __init__(
        self,
        state: NDArray[numpy.uint8],
        n: int,
        num_slots: int,
        lo: int,
        hi: int,
        may_rename: bool,
    ) -> None: ...
    def run(
        self,
        src: NDArray[numpy.int64],
        dst: NDArray[numpy.int64],
        chunk: NDArray[numpy.int64],
        into: NDArray[numpy.int64] | None,
        mask: NDArray[numpy.bool_] | None,
        all_reduce: bool,
    ) -> int: ...

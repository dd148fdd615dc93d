# Types that nanobind's stub generator cannot know: tools/stubs.py applies these to what it
# finds in the module. The tuples are made in native/bindings/handle.hpp and bind_*.cpp.

unisono._native.__prefix__:
    \from collections.abc import Callable
    # bytes, bytearray, memoryview, or an array; typing has a name for these from 3.12 on.
    Buffer = bytes | bytearray | memoryview | NDArray[numpy.uint8]
    Note = tuple[int, int, int, int, int, int, int, int, str, str, str, str]
    Failure = tuple[int, int, int, int]
    State = tuple[int, Note, Note, int, bool, bool, Note]
    Record = tuple[int, int, Note, int, int, int, int, int, int, int, int, int, int, int, bool]
    # kind, rank, cause, reporter, communicator, word
    Event = tuple[str, int, str, int, int, int]

unisono._native.Engine.connect_lifeline$:
    def connect_lifeline(self, wires: Sequence[Wire | None], outgoing: Sequence[bytes], incoming: Sequence[bytes], epoch: int, beat: int, limit: int) -> None: ...

unisono._native.Engine.records$:
    def records(self) -> list[Record]: ...

unisono._native.Engine.trace_entries$:
    def trace_entries(self) -> tuple[tuple[bytes, int], tuple[bytes, int]]: ...

unisono._native.Work.note$:
    def note(self) -> Note: ...

unisono._native.(Work|Comm).failure$:
    def failure(self) -> Failure: ...

unisono._native.Comm.states$:
    def states(self) -> list[State]: ...

unisono._native.quick_of$:
    def quick_of(comm: Comm, on_device: Callable[..., object]) -> Callable[[int, object, object, object, object, object], object]: ...

unisono._native.Simulator.messages$:
    def messages(self) -> tuple[NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.int64], NDArray[numpy.float64], NDArray[numpy.float64], NDArray[numpy.float64], NDArray[numpy.int64]]: ...

unisono._native.crc32c$:
    def crc32c(data: Buffer, seed: int = 0, way: int = 0) -> int: ...

unisono._native.siphash$:
    def siphash(key: bytes, data: Buffer) -> int: ...

unisono._native.Seal.seal$:
    def seal(self, payload: Buffer, kind: int, flags: int = 0, call: int = 0, fingerprint: int = 0, piece: int = 0, message: int = 0) -> bytes: ...

unisono._native.Seal.check_payload$:
    def check_payload(self, header: bytes, payload: Buffer) -> bool: ...

unisono._native.FrameReader.feed$:
    def feed(self, data: Buffer) -> list[tuple[bytes, bytes]]: ...

unisono._native.Lifeline.__init__$:
    def __init__(self, rank: int, wires: Sequence[Wire | None], keys: Sequence[tuple[bytes, bytes]], epoch: int = 0, beat_ms: int = 1000, limit_ms: int = 10000) -> None: ...

unisono._native.Lifeline.events$:
    def events(self) -> list[Event]: ...

unisono._native.Wire.await_send$:
    def await_send(self) -> list[tuple[int, int]]: ...

unisono._native.Wire.await_receive$:
    def await_receive(self, bytes: int) -> list[tuple[int, int]]: ...

unisono._native.MemoryWire.pair$:
    @staticmethod
    def pair(fault: str = "") -> tuple[MemoryWire, MemoryWire]: ...

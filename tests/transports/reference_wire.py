"""The wire format said once more, in plain Python, to compare the native core with.

A frame is a header of 64 bytes and its payload. All numbers are little endian:

    magic "USN1" · kind u16 · flags u16 · epoch u32 · length u32 · number u64 · call u64
    · fingerprint u64 · piece u32 · message u32 · crc u32 · place u32 · mac u64

`crc` is the CRC32C of the payload, `mac` the SipHash-2-4 of the 56 bytes before it.
"""

import struct

HEADER = struct.Struct("<4sHHIIQQQIIIIQ")
FIELDS = ["magic", "kind", "flags", "epoch", "length", "number", "call"]
FIELDS += ["fingerprint", "piece", "message", "crc", "place", "mac"]
MAGIC = b"USN1"
DATA, NOTE, CONTROL = 1, 2, 3
WORD = (1 << 64) - 1


def crc32c(data: bytes, seed: int = 0) -> int:
    """Bit by bit, as the definition has it."""
    crc = ~seed & 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return ~crc & 0xFFFFFFFF


def rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 64 - bits) & WORD


def rounds(v: list[int], times: int) -> None:
    for _ in range(times):
        v[0] = (v[0] + v[1]) & WORD
        v[1] = rotated(v[1], 13) ^ v[0]
        v[0] = rotated(v[0], 32)
        v[2] = (v[2] + v[3]) & WORD
        v[3] = rotated(v[3], 16) ^ v[2]
        v[0] = (v[0] + v[3]) & WORD
        v[3] = rotated(v[3], 21) ^ v[0]
        v[2] = (v[2] + v[1]) & WORD
        v[1] = rotated(v[1], 17) ^ v[2]
        v[2] = rotated(v[2], 32)


def siphash(key: bytes, data: bytes) -> int:
    """SipHash-2-4, from its paper."""
    k0, k1 = struct.unpack("<QQ", key)
    text = b"somepseudorandomlygeneratedbytes"
    v = [
        k ^ c for k, c in zip((k0, k1, k0, k1), struct.unpack(">4Q", text), strict=True)
    ]
    padded = data + bytes(7 - len(data) % 8) + bytes([len(data) & 0xFF])
    for (word,) in struct.iter_unpack("<Q", padded):
        v[3] ^= word
        rounds(v, 2)
        v[0] ^= word
    v[2] ^= 0xFF
    rounds(v, 4)
    return v[0] ^ v[1] ^ v[2] ^ v[3]


def frame(key: bytes, payload: bytes, **fields: object) -> bytes:
    """A whole frame; any field can be given, and the mac fits whatever is given."""
    made = dict.fromkeys(FIELDS, 0) | {"magic": MAGIC, "kind": DATA}
    made |= {"length": len(payload), "crc": crc32c(payload)} | fields
    head = HEADER.pack(*made.values())[:56]
    mac = fields.get("mac", siphash(key, head))
    return head + struct.pack("<Q", mac) + payload


def fields(header: bytes) -> dict[str, object]:
    return dict(zip(FIELDS, HEADER.unpack(header), strict=True))


def flaw(key: bytes, epoch: int, number: int, limit: int, header: bytes) -> str:
    """What is wrong with a header, as the receiver of frame `number` sees it."""
    found = fields(header)
    laws = {
        "magic": found["magic"] == MAGIC,
        "mac": found["mac"] == siphash(key, header[:56]),
        "epoch": found["epoch"] == epoch,
        "number": found["number"] == number,
        "kind": found["kind"] in (DATA, NOTE, CONTROL),
        "length": found["length"] <= limit,
    }
    return next((name for name, holds in laws.items() if not holds), "none")


# --- the lifeline's frames

EVENT = struct.Struct("<IIIIQQ")
BEAT, DEAD, LEFT, FAILURE = range(4)


def event(kind, rank=0, cause=0, reporter=0, comm=0, word=0) -> bytes:
    return EVENT.pack(kind, rank, cause, reporter, comm, word)

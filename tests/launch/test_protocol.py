"""What launcher and agent say to each other survives being cut anywhere."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import Corrupted
from unisono.launch import protocol
from unisono.launch.protocol import MessageDecoder, frame

MESSAGES = [
    protocol.AgentReady(4, [23_456, 23_457]),
    protocol.StartRanks(
        *(["python", "a b.py"], "/", 2, 3, 6, 1, "core", {"UNISONO_SECRET": "ab" * 32})
    ),
    protocol.SendSignal(15),
    protocol.RankInput(b""),
    protocol.InputRequest(),
    protocol.Output(3, 2, b"\xff\x00\n"),
    protocol.RankStarted(3, 99),
    protocol.RankEnded(3, -9, "out of memory"),
    protocol.StartRefused("no such folder"),
    protocol.AllEnded(),
]


@pytest.mark.sweep
@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.data())
def test_messages_split_anywhere_are_decoded(messages, data):
    sent = b"".join(map(frame, messages))
    decoder, received = MessageDecoder(), []
    while sent:
        cut = data.draw(st.integers(1, len(sent)))
        received += decoder.feed(sent[:cut])
        sent = sent[cut:]
    assert received == messages


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0xFFFF_FFFF),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 0),
        frame(protocol.AllEnded()).replace(b"AllEnded", b"AllGonex"),
    ],
)
def test_invalid_message_is_corrupted(data):
    with pytest.raises(Corrupted, match="agent and launcher"):
        list(MessageDecoder().feed(data))

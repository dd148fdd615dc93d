"""What launcher and agent say to each other survives being cut anywhere."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.errors import Corrupted
from unisono.launch import protocol as orders
from unisono.launch.protocol import Inbox, frame

MESSAGES = [
    orders.Hello(4, 23_456),
    orders.Order(["python", "a b.py"], "/", 2, 3, {"UNISONO_SECRET": "ab" * 32}),
    orders.Signal(15),
    orders.Input(b""),
    orders.Wants(),
    orders.Said(3, 2, b"\xff\x00\n"),
    orders.Started(3, 99),
    orders.Ended(3, -9),
    orders.Refused("no such folder"),
    orders.Done(),
]


@given(st.lists(st.sampled_from(MESSAGES), max_size=8), st.data())
def test_messages_cut_anywhere_come_out_whole(messages, data):
    sent = b"".join(map(frame, messages))
    inbox, heard = Inbox(), []
    while sent:
        cut = data.draw(st.integers(1, len(sent)))
        heard += inbox.take(sent[:cut])
        sent = sent[cut:]
    assert heard == messages


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0xFFFF_FFFF),
        struct.pack(">I", 3) + b"abc",
        struct.pack(">I", 0),
        frame(orders.Done()).replace(b"Done", b"Gone"),
    ],
)
def test_bytes_that_are_no_message(data):
    with pytest.raises(Corrupted, match="agent and launcher"):
        list(Inbox().take(data))

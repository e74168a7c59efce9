"""Lifelines between processes and threads: who answers lives, who is closed is gone, and silence proves nothing."""

from __future__ import annotations

import select
import socket
from contextlib import closing

import pytest

from moriio_transport.base import TransportError
from moriio_transport.mori import _lifeline
from moriio_transport.mori._lifeline import ENDED, Address, Lifeline, PeerGoneError, append, dial, separate

HOST = "127.0.0.1"


def test_line_answers_and_ends_with_its_transport():
    """A line is silent while the peer lives, and readable with proof when it has closed."""
    lifeline = Lifeline(HOST, "engine")
    address = Address(HOST, lifeline.port)
    with closing(dial(address, "engine")) as line, closing(dial(address, "engine")) as other:
        assert _lifeline.ended(line) is None
        assert not _lifeline.has_gone(address, "engine")
        lifeline.close()
        for one in (line, other):
            assert select.select([one], [], [], 20)[0]
            assert _lifeline.ended(one) == ENDED
    assert _lifeline.has_gone(address, "engine")
    assert _lifeline.refuses(address)
    with pytest.raises(PeerGoneError, match="nobody listens"):
        dial(address, "engine")


def test_another_engine_at_the_address_is_proof():
    """A port that was given to another process proves that the first has ended."""
    with closing(Lifeline(HOST, "new")) as lifeline:
        address = Address(HOST, lifeline.port)
        with pytest.raises(PeerGoneError, match="engine 'new' answers, expected 'old'"):
            dial(address, "old")
        assert _lifeline.has_gone(address, "old")


def test_a_peer_that_does_not_answer_is_not_proven_dead():
    """A stopped process's kernel takes the connection, and nothing comes: an error without proof."""
    with closing(socket.create_server((HOST, 0))) as silent:
        address = Address(HOST, silent.getsockname()[1])
        with pytest.raises(TransportError, match="no answer") as caught:
            dial(address, "engine", 0.05)
        assert not isinstance(caught.value, PeerGoneError)


def test_a_reset_line_is_not_proof():
    """A line that the network breaks says nothing about the process."""
    server = socket.create_server((HOST, 0))
    with closing(server), closing(socket.create_connection(server.getsockname())) as line:
        accepted, _ = server.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")  # close resets
        accepted.close()
        assert select.select([line], [], [], 20)[0]
        assert "broken" in (_lifeline.ended(line) or "")


def test_whoever_talks_or_leaves_does_no_harm():
    """The listener outlives peers that send, vanish, or connect and say nothing."""
    with closing(Lifeline(HOST, "engine")) as lifeline:
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 10_000):
            with closing(socket.create_connection((HOST, lifeline.port))) as line:
                line.sendall(data)
        dial(Address(HOST, lifeline.port), "engine").close()


@pytest.mark.parametrize("engine", [b"x", b"moriio-lifeline1", bytes(100)])
def test_port_travels_behind_the_descriptor(engine):
    """The descriptor is found again as it was, with and without a lifeline behind it."""
    assert separate(append(engine, 4711)) == (engine, 4711)
    assert separate(engine) == (engine, None)

"""The control channel by itself: sockets are bounded, closed when forgotten, and never raise at a sender."""

from __future__ import annotations

import pytest
import zmq
from tests.transport.nodes import HOST, eventually, free_ports

from moriio_proto.events import Endpoint
from moriio_transport import control as control_module
from moriio_transport.control import Frame, ZmqControl


@pytest.fixture
def control():
    """A channel on free ports."""
    a, b = free_ports(2)
    made = ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token="near", hello=(b"1", b"2"))
    yield made
    made.close()


def sockets(control):
    """Open sockets beside the two bound ones."""
    return [s for s in control._by_socket if not s.closed]


def test_forget_closes_dial_and_connection(control):
    """An address that is not needed costs no socket; forgetting it twice, or one never used, is harmless."""
    peer = Endpoint(HOST, *free_ports(2))
    control.dial(peer)
    control.send(peer, b"x")
    assert len(sockets(control)) == 2
    control.forget(peer)
    control.forget(peer)
    assert not sockets(control)


def test_dialling_again_replaces_the_dial(control):
    """A dial that is repeated for ever holds one socket."""
    peer = Endpoint(HOST, *free_ports(2))
    for _ in range(20):
        control.dial(peer)
    assert len(sockets(control)) == 1


def test_no_socket_left_loses_frames_and_nothing_else(monkeypatch):
    """When there can be no more sockets, dials and sends are lost frames; those before go on, and room can be made."""
    monkeypatch.setattr(control_module, "MAX_SOCKETS", 8)
    a, b, c, d = free_ports(4)
    near = ZmqControl(bind_host=HOST, handshake_port=a, notify_port=b, token="near", hello=(b"1", b"2"))
    far = ZmqControl(bind_host=HOST, handshake_port=c, notify_port=d, token="far", hello=(b"3", b"4"))
    heard = []
    try:
        peer = Endpoint(HOST, c, d)
        near.send(peer, b"first")
        for i in range(1, 30):
            near.dial(Endpoint(f"127.0.1.{i}", c, d))
            near.send(Endpoint(f"127.0.1.{i}", c, d), b"x")
        assert len(sockets(near)) <= 8
        near.send(peer, b"second")

        def both():
            for source, _ in far.poller.poll(10):
                heard.extend(i.data for i in far.receive(source) if isinstance(i, Frame))
            return heard == [b"first", b"second"]

        eventually(both)
        for i in range(1, 30):
            near.forget(Endpoint(f"127.0.1.{i}", c, d))
        assert len(sockets(near)) == 1
    finally:
        near.close()
        far.close()


@pytest.mark.parametrize("host", ["", "no host", "999.1.1.1.1", "a" * 300])
def test_a_host_that_is_none_is_a_lost_frame(control, host):
    """What cannot be an address loses the frame, keeps no socket, and raises nothing."""
    peer = Endpoint(host, 7301, 62005)
    control.send(peer, b"x")
    control.dial(peer)
    assert len(sockets(control)) <= 2
    control.forget(peer)
    assert not sockets(control)


def test_a_reply_to_nobody_is_dropped(control):
    """An answer whose connection has gone, or that has no route, is dropped."""
    control.reply(None, b"x")
    control.reply(control_module._PeerRoute(b"nobody"), b"x")
    assert control.poller.poll(0) == []


def test_close_closes_everything(control):
    """After close nothing of the channel is open."""
    control.send(Endpoint(HOST, *free_ports(2)), b"x")
    open_before = sockets(control)
    control.close()
    assert open_before
    assert not sockets(control)
    assert control._context.closed
    with pytest.raises(zmq.ZMQError):
        control._notify.getsockopt(zmq.LAST_ENDPOINT)

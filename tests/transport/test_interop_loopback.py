"""The loopback transport's compatibility form: descriptors that are also those of AMD's MoRI library."""

from __future__ import annotations

import math

import attrs
import msgpack
import numpy as np
import pytest
from tests.transport.nodes import eventually

from moriio_proto.geometry import TransferPlan
from moriio_transport.base import Completed, Connected, Direction, Outcome, PeerRefusedError, Region, SessionLost
from moriio_transport.loopback import LoopbackTransport, MoriName

NAME = MoriName("engine-key", "10.0.0.1")
OLD_ENGINE = ["k", "n", "h", "h", 1, 2]
forms = pytest.mark.parametrize("mori", [None, NAME], ids=["own form", "compatibility form"])


def transport(memory, mori):
    """A transport with one region."""
    made = LoopbackTransport(mori=mori, warm=False)
    made.register([Region(memory.ctypes.data, memory.nbytes)])
    return made


def test_descriptors_are_moris():
    """The first fields of both arrays are those that MoRI unpacks, in its order."""
    memory = np.zeros(64, np.uint8)
    made = transport(memory, NAME)
    description = made.describe()
    key, _node, _hostname, host, port, _pid = msgpack.unpackb(description.engine)[:6]
    assert (key, host, port) == ("engine-key", "10.0.0.1", 0)
    region = msgpack.unpackb(description.regions[0])
    assert region[:7] == ["engine-key", 0, -1, "", memory.ctypes.data, 64, 1]
    assert len(region) == 15
    made.close()


@forms
@pytest.mark.parametrize("other", [None, NAME], ids=["to own form", "to compatibility form"])
def test_each_form_reaches_each(mori, other):
    """Whatever form the two sides describe themselves in, bytes move."""
    ours, theirs = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    a, b = transport(ours, mori), transport(theirs, other)
    session = a.connect(b.describe())
    assert a.poll() == [Connected(session)]
    region, offset = np.zeros(1, np.int32), np.array([8], np.uint64)
    plan = TransferPlan(region, offset, region, offset, np.array([16], np.uint64))
    a.post(1, session, Direction.WRITE, plan, math.inf)
    events = []
    eventually(lambda: events.extend(a.poll()) or events)
    assert [(type(e), e.outcome) for e in events] == [(Completed, Outcome.DONE)]
    np.testing.assert_array_equal(theirs[8:24], ours[8:24])
    assert not theirs[:8].any()
    a.close()
    b.close()


def test_a_made_up_engine_is_not_reached():
    """A compatibility form with another nonce names no open transport, and MoRI's own descriptor is none of ours."""
    a, b = transport(np.zeros(64, np.uint8), None), transport(np.zeros(64, np.uint8), NAME)
    good = b.describe()
    fields = msgpack.unpackb(good.engine)
    forged = attrs.evolve(good, engine=msgpack.packb([*fields[:-1], bytes(16)]))
    a.connect(forged)
    (lost,) = a.poll()
    assert isinstance(lost, SessionLost)
    for engine in (msgpack.packb(OLD_ENGINE), msgpack.packb([*fields, 1]), b"", b"\xc1"):
        with pytest.raises(PeerRefusedError, match="not one of backend loopback"):
            a.connect(attrs.evolve(good, engine=engine))
    with pytest.raises(PeerRefusedError, match="region 0"):
        a.connect(attrs.evolve(good, regions=(b"\x90",)))
    a.close()
    b.close()

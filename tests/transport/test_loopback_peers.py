"""Who a loopback peer is: forged, foreign, dead, closed and forbidden ones."""

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
import textwrap

import attrs
import msgspec
import numpy as np
import pytest

from moriio_transport.base import (
    Completed,
    Connected,
    Direction,
    Outcome,
    PeerRefusedError,
    Region,
    SessionLost,
    TransportError,
)
from moriio_transport.conformance import PeerProcessConformance, TransportConformance, plan_of
from moriio_transport.loopback import LoopbackTransport, _identity
from moriio_transport.loopback._denied import explain


class Within(TransportConformance):
    backend = "loopback"


class Between(PeerProcessConformance):
    backend = "loopback"


both = pytest.mark.parametrize("kind", [Within, Between])


def ending(pair, description):
    """The event that ends `connect`."""
    session = pair.initiator.connect(description)
    pair.connected(session)
    return next(e for e in pair.listener.events if getattr(e, "session", None) == session)


def with_engine(description, **changes):
    """A description whose engine has other fields."""
    engine = msgspec.msgpack.decode(description.engine, type=_identity.Engine)
    return attrs.evolve(description, engine=msgspec.msgpack.encode(msgspec.structs.replace(engine, **changes)))


@both
def test_any_changed_bit_is_found(kind):
    """A description with any one bit changed, in the engine or in a region, never becomes a session."""
    with kind().pair(4096) as pair:
        good = pair.target.description
        for part in ("engine", "region"):
            whole = good.engine if part == "engine" else good.regions[0]
            for bit in range(len(whole) * 8):
                changed = bytearray(whole)
                changed[bit // 8] ^= 1 << bit % 8
                bad = (
                    attrs.evolve(good, engine=bytes(changed))
                    if part == "engine"
                    else attrs.evolve(good, regions=(bytes(changed),))
                )
                with contextlib.suppress(PeerRefusedError):
                    assert isinstance(ending(pair, bad), SessionLost), (part, bit)
        assert isinstance(ending(pair, good), Connected)


@both
def test_left_out_and_added_regions_are_found(kind):
    """A description with a region less, a region twice, or none is not that of the peer."""
    with kind().pair(4096, 8192) as pair:
        a, b = pair.target.description.regions
        for regions in ((a,), (b, a), (a, b, b), ()):
            lost = ending(pair, attrs.evolve(pair.target.description, regions=regions))
            assert isinstance(lost, SessionLost)
            assert not lost.proven


def test_other_host_and_other_namespace_are_named():
    """A peer of another boot or of another PID namespace is refused with what is needed."""
    with Within().pair(4096) as pair:
        other_boot = with_engine(pair.target.description, boot_id="0" * 36)
        assert "one host only" in ending(pair, other_boot).reason
        other_namespace = with_engine(pair.target.description, pid_namespace=1)
        assert "--pid=container" in ending(pair, other_namespace).reason


def test_dead_and_reused_pids_are_proven_dead():
    """A pid that nobody has, and one that started at another time, prove that the peer is dead."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with Within().pair(4096) as pair:
        dead = ending(pair, with_engine(pair.target.description, pid=child.pid))
        reused = ending(pair, with_engine(pair.target.description, pid=os.getppid(), start_time=1))
    assert (dead.proven, reused.proven) == (True, True)
    assert "another has its id" in reused.reason


@both
def test_closed_peer_gets_no_byte(kind):
    """After the peer closed its transport a post fails, moves nothing, and its session is lost, proven, once."""
    with kind().pair(4096, 4 << 20) as pair:
        session = pair.connect()
        plan = plan_of([(0, 0, 0, 0, 4096)])
        assert pair.copy(session, plan).outcome is Outcome.DONE
        pair.memory[0][:] = 0
        before = pair.remote()
        pair.target.shut()
        for _ in range(2):
            end = pair.copy(session, plan)
            assert (end.outcome, end.nbytes) == (Outcome.FAILED, 0)
        assert np.array_equal(pair.remote(), before)
        lost = [e for e in pair.listener.events if isinstance(e, SessionLost)]
        assert [(e.session, e.proven) for e in lost] == [(session, True)]
        again = ending(pair, pair.target.description)
        assert isinstance(again, SessionLost)


TARGET = """
    import ctypes, os, sys
    import numpy as np
    from moriio_transport.base import Region
    from moriio_transport.loopback import LoopbackTransport

    memory = np.zeros({nbytes}, np.uint8)
    transport = LoopbackTransport(warm=False)
    transport.register([Region(memory.ctypes.data, memory.nbytes)])
    description = transport.describe()
    {then}
    print(description.engine.hex(), *(region.hex() for region in description.regions), flush=True)
    sys.stdin.readline()
    print(memory[{at}:{at} + 16].tobytes().hex(), flush=True)
"""


@contextlib.contextmanager
def target_process(nbytes=4096, at=0, then=""):
    """A process with one zeroed region; yields the process and the words of its description."""
    code = textwrap.dedent(TARGET).format(nbytes=nbytes, at=at, then=then)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process, process.stdout.readline().split()


def test_copy_beyond_4_gib_between_processes():
    """Bytes written beyond 4 GiB of a sparse region arrive there."""
    at = (5 << 30) + 12345
    data = np.arange(16, dtype=np.uint8)
    with target_process(6 << 30, at) as (process, words), contextlib.closing(LoopbackTransport(warm=False)) as ours:
        ours.register([Region(data.ctypes.data, data.nbytes)])
        engine, *regions = (bytes.fromhex(word) for word in words)
        session = ours.connect(_identity.Description(engine, tuple(regions)))
        ours.post(1, session, Direction.WRITE, plan_of([(0, 0, 0, at, 16)]), float("inf"))
        assert ours.poll() == [Connected(session), Completed(1, Outcome.DONE, 16)]
        shown, _ = process.communicate("\n")
    assert bytes.fromhex(shown) == data.tobytes()


def test_unmapped_target_memory_fails_the_post():
    """A peer that gave registered memory back gets a failed post, whose reason says so, and stays connected."""
    unmap = "ctypes.CDLL(None).munmap(ctypes.c_void_p(memory.ctypes.data - memory.ctypes.data % 4096 + 65536), 65536)"
    data = np.zeros(16 << 20, np.uint8)
    with target_process(16 << 20, then=unmap) as (process, words):
        with contextlib.closing(LoopbackTransport()) as ours:
            ours.register([Region(data.ctypes.data, data.nbytes)])
            engine, *regions = (bytes.fromhex(word) for word in words)
            session = ours.connect(_identity.Description(engine, tuple(regions)))
            ours.post(1, session, Direction.WRITE, plan_of([(0, 0, 0, 0, 1 << 20)]), float("inf"))
            ours.post(2, session, Direction.WRITE, plan_of([(0, 0, 0, 0, 4096)]), float("inf"))
            connected, failed, done = ours.poll()
        process.communicate("\n")
    assert isinstance(connected, Connected)
    assert failed.outcome is Outcome.FAILED
    assert failed.nbytes < 1 << 20
    assert "keep registered memory until the transport is closed" in failed.reason
    assert done == Completed(2, Outcome.DONE, 4096)


INITIATOR = """
    import os, sys
    from moriio_transport.base import Description
    from moriio_transport.loopback import LoopbackTransport
    transport = LoopbackTransport()
    if os.getuid() == 0:
        os.setgid(65534), os.setuid(65534)
    engine, *regions = (bytes.fromhex(word) for word in sys.argv[1:])
    transport.connect(Description(engine, tuple(regions)))
    for event in transport.poll():
        print(event)
"""


def test_permission_error_names_cause_and_cure():
    """A peer that we may not trace ends `connect` with what the kernel said, why, and what to do; not as dead."""
    hide = f"ctypes.CDLL(None).prctl({4 if os.getuid() else 3}, 0)"  # PR_SET_DUMPABLE 0, or as root PR_GET_DUMPABLE
    with target_process(then=hide) as (process, words):
        run = [sys.executable, "-c", textwrap.dedent(INITIATOR), *words]
        said = subprocess.run(run, capture_output=True, text=True, check=True).stdout
        process.communicate("\n")
    assert said.startswith("SessionLost(")
    assert "proven=False" in said
    assert "Operation not permitted" in said
    assert ("not dumpable" if os.getuid() else "run both with the same user") in said


def test_other_errors_are_explained():
    """Each errno that process_vm_writev gives has a text with the process and what to do."""
    texts = {number: explain(OSError(number, os.strerror(number)), 17) for number in (1, 3, 14, 38, 12)}
    assert "/proc/17 is hidden" in texts[1] or "(process 17)" in texts[1]
    assert "process 17 has ended" in texts[3]
    assert "keep registered memory" in texts[14]
    assert "CONFIG_CROSS_MEMORY_ATTACH" in texts[38]
    assert texts[12] == "Cannot allocate memory (process 17)"


def test_own_unmapped_memory_is_refused():
    """Registering memory that is not mapped is refused with region, address and size; nothing is registered."""
    hole = mmap.mmap(-1, 8 * mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(hole))
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address + 4 * mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE))
    with contextlib.closing(LoopbackTransport()) as transport:
        with pytest.raises(TransportError, match=r"region 0 .*mapped"):
            transport.register([Region(address, 8 * mmap.PAGESIZE)])
        transport.register([Region(address, 4 * mmap.PAGESIZE)])
        assert len(transport.describe().regions) == 1

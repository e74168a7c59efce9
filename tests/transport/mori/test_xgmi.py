"""Backend xgmi against a strict fake of MoRI-IO's API: the conformance suite, and what is particular to it."""

from __future__ import annotations

import sys
import types
from contextlib import closing

import attrs
import pytest
from tests.transport.mori import fake_io

from moriio_proto.errors import ConfigurationError
from moriio_transport._pair import LocalTarget, allocate, plan_of
from moriio_transport.base import Outcome, PeerRefusedError, Region, SessionLost, TransportUnavailableError
from moriio_transport.conformance import TransportConformance
from moriio_transport.mori import _lifeline, preflight
from moriio_transport.mori.binding import load_library
from moriio_transport.registry import load_transport


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The fake in place of `mori.io`; nothing may have been done wrong at the end."""
    monkeypatch.setitem(sys.modules, "mori", types.ModuleType("mori"))
    monkeypatch.setitem(sys.modules, "mori.io", fake_io)
    monkeypatch.setattr(preflight, "check_rocm_smi", lambda: None)
    monkeypatch.setattr(fake_io, "faults", fake_io.Faults())
    yield fake_io
    assert fake_io.faults.violations == []


def open_xgmi(key, memory, **options):
    plugin = load_transport("xgmi")
    transport = plugin.create(engine_key=key, host="127.0.0.1", options={**plugin.options, **options})
    transport.register([Region(array.ctypes.data, array.nbytes, "cuda", 0) for array in memory])
    return transport


class XgmiTarget(LocalTarget):
    """Memory of a "GPU" in this process."""

    def __init__(self, sizes):
        self._memory = allocate(sizes)
        self._transport = open_xgmi("conformance-target", self._memory)
        self.description = self._transport.describe()


class TestXgmi(TransportConformance):
    backend = "xgmi"

    def make_target(self, sizes):
        return XgmiTarget(sizes)

    def make_initiator(self, memory):
        return open_xgmi("conformance-initiator", memory)


def lost(pair):
    return [event for event in pair.listener.events if isinstance(event, SessionLost)]


def test_gpu_error_ends_the_session_and_a_new_engine_key_serves_the_next():
    """After an error the next session goes through an engine of ours under another key; the peer's stays."""
    with TestXgmi().pair(4096) as pair:
        session = pair.connect()
        fake_io.faults.fail_next = True
        end = pair.copy(session, plan_of([(0, 0, 0, 0, 100)]))
        assert (end.outcome, end.reason) == (Outcome.FAILED, "hipMemcpy failed")
        pair.listener.until(lambda events: any(isinstance(event, SessionLost) for event in events))
        assert [event.proven for event in lost(pair)] == [False]
        assert pair.copy(pair.connect(), plan_of([(0, 0, 0, 0, 100)])).outcome is Outcome.DONE
        assert fake_io.faults.made == ["conformance-target", "conformance-initiator", "conformance-initiator+1"]


def test_statuses_outlive_release_and_disconnect():
    """Nobody waits for a released post any more, but the engine still writes to its status."""
    with TestXgmi().pair(1 << 20) as pair:
        session = pair.connect()
        fake_io.faults.running.clear()
        pair.post(1, session, plan_of([(0, 0, 0, 0, 1 << 20)]))
        pair.initiator.release(1)
        pair.initiator.disconnect(session)
        assert not pair.initiator.poll()
        fake_io.faults.running.set()
        assert pair.listener.ends(1)[0].outcome is Outcome.DONE


def test_peer_of_another_host_is_refused():
    """The GPU fabric ends at the host's border; the error names the backend to use instead."""
    with TestXgmi().pair(4096) as pair:
        engine, port = _lifeline.separate(pair.target.description.engine)
        elsewhere = attrs.evolve(fake_io.EngineDesc.unpack(engine), node_id="elsewhere").pack()
        description = attrs.evolve(pair.target.description, engine=_lifeline.append(elsewhere, port))
        with pytest.raises(PeerRefusedError, match=r"another host.*use rdma"):
            pair.initiator.connect(description)


def test_descriptions_of_two_engines_do_not_mix():
    """Memory of another engine than the one described is refused before the library sees it."""
    with TestXgmi().pair(4096) as pair:
        foreign = pair.initiator.describe()
        with pytest.raises(PeerRefusedError, match=r"memory descriptor 0: .* of engine 'conformance-initiator'"):
            pair.initiator.connect(attrs.evolve(pair.target.description, regions=foreign.regions))


def test_knobs_reach_the_engine(monkeypatch):
    """Streams and events are what was configured, and out of range they are refused by name."""
    seen = []
    make = fake_io.IOEngine.create_backend
    monkeypatch.setattr(fake_io.IOEngine, "create_backend", lambda *a: (seen.append(a[2]), make(*a)))
    memory = allocate([4096])
    with closing(open_xgmi("knobs", memory, num_streams=7, num_events=9)):
        assert (seen[0].num_streams, seen[0].num_events) == (7, 9)
    with pytest.raises(ConfigurationError, match=r"num_streams=0: expected an integer within 1\.\.1024"):
        open_xgmi("bad", memory, num_streams=0)


def test_missing_library_is_one_error(monkeypatch):
    """Without amd_mori the error says what is needed and which backend does without."""
    monkeypatch.setitem(sys.modules, "mori.io", None)
    with pytest.raises(TransportUnavailableError, match=r"cannot be imported.*amd_mori>=1\.2\.4,<2.*loopback"):
        load_library()


def test_broken_library_is_one_error(monkeypatch):
    """Whatever the package raises while it is imported becomes the same error."""

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "mori.io":
                raise OSError("libamdhip64.so.7: cannot open shared object file")

    sys.modules["mori"].__path__ = []
    monkeypatch.delitem(sys.modules, "mori.io")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(TransportUnavailableError, match=r"libamdhip64\.so\.7: cannot open"):
        load_library()


def test_older_library_is_named_with_what_it_lacks(monkeypatch):
    """A library without a needed call is refused with the call's name."""
    monkeypatch.delattr(fake_io.IOEngine, "pop_peer_failure")
    monkeypatch.delattr(fake_io, "XgmiBackendConfig")
    with pytest.raises(TransportUnavailableError, match=r"has no XgmiBackendConfig, IOEngine\.pop_peer_failure; "):
        load_library()


def test_nothing_is_imported_before_create():
    """Looking the backends up and reading their options imports no AMD library."""
    del sys.modules["mori.io"], sys.modules["mori"]
    for name in ("rdma", "xgmi"):
        assert load_transport(name).options
    assert "mori" not in sys.modules


def test_without_rocm_smi_create_raises(monkeypatch):
    """The engine would end the process: the error names the libraries that were tried."""
    monkeypatch.undo()
    monkeypatch.setenv("MORI_ROCM_SMI_PATH", "/nowhere/librocm_smi64.so")
    with pytest.raises(TransportUnavailableError, match=r"none of /nowhere/librocm_smi64\.so, .* can be loaded"):
        preflight.check_rocm_smi()

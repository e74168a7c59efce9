"""What would abort or end the process inside the engine is an error that names it, before the engine is made."""

from __future__ import annotations

import errno
import re
from contextlib import closing

import pytest
from tests.transport.mori.engine import card

from moriio_proto.errors import ConfigurationError
from moriio_transport._pair import allocate
from moriio_transport.base import Region, TransportError, TransportUnavailableError
from moriio_transport.mori import preflight, verbs
from moriio_transport.registry import load_transport

MIB = 1 << 20


def test_failed_pin_is_an_error_of_register():
    """Memory that cannot be pinned is refused by name, where the engine would abort the process later."""
    (memory,) = allocate([MIB])
    plugin = load_transport("rdma")
    with closing(plugin.create(engine_key="pin", host="127.0.0.1", options=plugin.options)) as transport:
        region = Region(memory.ctypes.data, MIB)
        card.set("reg_errno", errno.ENOMEM)
        with pytest.raises(TransportError, match=r"region 0 .* cannot be pinned for soft_0: Cannot allocate memory"):
            transport.register([region])
        transport.register([region])
        assert transport.describe().regions


def test_overlapping_regions_are_refused():
    """The engine would lose one region's key with the other's."""
    (memory,) = allocate([MIB])
    plugin = load_transport("rdma")
    with closing(plugin.create(engine_key="twice", host="127.0.0.1", options=plugin.options)) as transport:
        at = memory.ctypes.data
        with pytest.raises(TransportError, match=r"regions 0 .* and 1 .* overlap"):
            transport.register([Region(at, 4096), Region(at + 4095, 4096)])


def test_no_active_port_is_an_error_of_create():
    """With its port down, a device is named with its state, where the engine would abort."""
    plugin = load_transport("rdma")
    with card.turned("port_down", 1), pytest.raises(TransportUnavailableError, match="soft_0 port 1 DOWN"):
        plugin.create(engine_key="down", host="127.0.0.1", options=plugin.options)


@pytest.mark.parametrize("host", ["10.99.99.99", "::1", "0.0.0.0", "no-such-host.invalid"])
def test_address_that_is_not_ours_is_an_error_of_create(host):
    """The engine would end the process, or publish an address that no peer can use."""
    plugin = load_transport("rdma")
    with pytest.raises(TransportUnavailableError, match="host"):
        plugin.create(engine_key="address", host=host, options=plugin.options)


def test_notification_from_outside_is_refused(monkeypatch):
    """MORI_IO_ENABLE_NOTIFICATION overrides what we configure, and would make transfers wait for ever."""
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "1")
    plugin = load_transport("rdma")
    with pytest.raises(TransportUnavailableError, match="MORI_IO_ENABLE_NOTIFICATION=1"):
        plugin.create(engine_key="notify", host="127.0.0.1", options=plugin.options)


@pytest.mark.parametrize(("name", "value"), [("qp_per_transfer", 0), ("poll_cq_mode", "sometimes"), ("chunk_bytes", 9)])
def test_knobs_out_of_range_are_refused(name, value):
    """Most of them the engine would take without a word."""
    plugin = load_transport("rdma")
    with pytest.raises(ConfigurationError, match=rf"kv_connector_extra_config\.{name}={value!r}: expected"):
        plugin.create(engine_key="knob", host="127.0.0.1", options={**plugin.options, name: value})


def test_device_without_pci_address_is_an_error_of_create(monkeypatch):
    """A software device has none, and the engine would look for it for ever."""
    monkeypatch.setattr(verbs, "_PCI", re.compile("nothing like this"))
    plugin = load_transport("rdma")
    with pytest.raises(TransportUnavailableError, match=r"soft_0 has no PCI address .* MORI_RDMA_DEVICES=\^soft_0"):
        plugin.create(engine_key="virtual", host="127.0.0.1", options=plugin.options)


@pytest.mark.parametrize(("devices", "usable"), [("soft_0", True), ("^soft_0", False), ("other", False)])
def test_devices_are_chosen_as_the_engine_does(monkeypatch, devices, usable):
    """MORI_RDMA_DEVICES names devices to use, or with ^ those to leave out."""
    monkeypatch.setenv("MORI_RDMA_DEVICES", devices)
    assert bool(verbs.read_ports()) is usable


def test_memlock_limit_is_an_error_of_register(monkeypatch):
    """More host memory than may be locked is refused with both numbers, unless the process may lock without limit."""
    (memory,) = allocate([MIB])
    monkeypatch.setattr(preflight.resource, "getrlimit", lambda _: (65536, 65536))
    regions = [Region(memory.ctypes.data, MIB)]
    preflight.check_memlock(regions)  # root may
    monkeypatch.setattr(preflight, "_may_lock_anyway", lambda: False)
    with pytest.raises(TransportError, match=r"1048576 bytes .* the memlock limit is 65536"):
        preflight.check_memlock(regions)
    preflight.check_memlock([Region(memory.ctypes.data, MIB, "cuda", 0)])

"""Finding transports by name."""

import importlib.metadata
import sys
import types

import pytest

from moriio_transport import registry
from moriio_transport.base import TransportError, TransportPlugin
from moriio_transport.loopback import plugin as loopback


class Foreign(TransportPlugin):
    name = "foreign"

    def create(self, *, engine_key, host, options):
        raise NotImplementedError


@pytest.fixture
def installed(monkeypatch):
    """A function that installs entry points, name="module:attribute"; `foreign_module.plugin` is a good plugin."""
    module = types.ModuleType("foreign_module")
    module.plugin = Foreign()
    monkeypatch.setitem(sys.modules, "foreign_module", module)

    def install(**values):
        points = [importlib.metadata.EntryPoint(name, value, registry.GROUP) for name, value in values.items()]
        monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: {registry.GROUP: points}[group])
        return module

    return install


def test_built_in_without_installation(installed):
    """Loopback is found where no entry point is installed, as in a source tree."""
    installed()
    assert registry.load_transport("loopback") is loopback


def test_installed_plugin(installed):
    """A plugin of another distribution is found by its entry point."""
    module = installed(foreign="foreign_module:plugin")
    assert registry.load_transport("foreign") is module.plugin


def test_installed_plugin_replaces_built_in(installed):
    """An installed entry point comes before the built-in of its name."""
    module = installed(loopback="foreign_module:plugin")
    assert registry.load_transport("loopback") is module.plugin


def test_unknown_name_lists_what_there_is(installed):
    """An unknown backend is refused with its name and those that exist."""
    installed(foreign="foreign_module:plugin")
    with pytest.raises(TransportError, match=r"backend='carrier-pigeon': expected one of foreign, loopback"):
        registry.load_transport("carrier-pigeon")


def test_broken_import_names_the_plugin(installed, tmp_path, monkeypatch):
    """Whatever a plugin raises while it is imported becomes one error that names it, and breaks no other."""
    (tmp_path / "broken_module.py").write_text("raise RuntimeError('no such device')")
    monkeypatch.syspath_prepend(tmp_path)
    installed(broken="broken_module:plugin", absent="absent_module:plugin", partial="foreign_module:missing")
    for name, why in (("broken", "no such device"), ("absent", "absent_module"), ("partial", "missing")):
        with pytest.raises(TransportError, match=rf"backend='{name}': .* cannot be loaded: .*{why}"):
            registry.load_transport(name)
    assert registry.load_transport("loopback") is loopback


def test_wrong_type_is_refused(installed):
    """An entry point that names something else than a plugin is refused with what it is."""
    module = installed(foreign="foreign_module:plugin")
    module.plugin = Foreign  # the class instead of an instance
    with pytest.raises(TransportError, match="is a ABCMeta, expected a TransportPlugin"):
        registry.load_transport("foreign")


def test_other_contract_version_is_refused(installed):
    """A plugin of another version of the contract is refused with both versions."""
    module = installed(foreign="foreign_module:plugin")
    module.plugin.api_version = 2
    with pytest.raises(TransportError, match="speaks version 2 of the transport contract, expected 1"):
        registry.load_transport("foreign")

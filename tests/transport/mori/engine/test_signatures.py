"""The strict fake of `mori.io` has the signatures of the real package."""

import inspect
import re

import mori.io
import pytest
from tests.transport.mori import fake_io

from moriio_transport.mori.binding import load_library

PYTHON = [
    (owner, name)
    for owner in (fake_io.IOEngine, fake_io.IOEngineSession)
    for name in vars(owner)
    if name == "__init__" or not name.startswith("_")
]


@pytest.mark.parametrize(("owner", "name"), PYTHON, ids=lambda v: getattr(v, "__name__", v))
def test_methods_take_the_same_arguments(owner, name):
    """Names, order, kinds and defaults of parameters are the wheel's."""

    def shape(function):
        parameters = inspect.signature(function).parameters.values()
        return [(p.name, p.kind, p.default) for p in parameters]

    assert shape(getattr(owner, name)) == shape(getattr(getattr(mori.io, owner.__name__), name))


@pytest.mark.parametrize("name", ["IOEngineConfig", "RdmaBackendConfig", "XgmiBackendConfig"])
def test_configurations_take_the_same_arguments(name):
    """Names and order of what native constructors take are the wheel's, by their own documentation."""
    documented = re.findall(r"[(,] (\w+):", getattr(mori.io, name).__init__.__doc__.split("\n")[0])
    assert list(inspect.signature(getattr(fake_io, name)).parameters) == documented


@pytest.mark.parametrize("name", ["BackendType", "MemoryLocationType", "PollCqMode", "StatusCode"])
def test_enumerations_have_the_same_members(name):
    """Names and numbers are the wheel's."""
    real = {key: int(value) for key, value in getattr(mori.io, name).__members__.items()}
    assert {member.name: member.value for member in getattr(fake_io, name)} == real


@pytest.mark.parametrize("name", ["EngineDesc", "MemoryDesc", "TransferStatus"])
def test_records_have_no_more_than_the_real_ones(name):
    """Whatever of a record's members the fake offers exists in the wheel."""
    real = getattr(mori.io, name, None) or getattr(mori.io.engine.mori_cpp, name)
    public = {member for member in dir(getattr(fake_io, name)) if not member.startswith("_")}
    assert public <= set(dir(real))


def test_the_wheel_has_all_that_is_needed():
    """The binding's own check accepts the wheel, and knows its version."""
    assert load_library().version == "1.2.4"

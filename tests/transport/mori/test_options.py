"""The knobs of both backends: ranges, variables that override them, and the tables in the documentation."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from moriio_proto.errors import ConfigurationError
from moriio_transport.mori import _options, rdma, xgmi

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize(("plugin", "knobs"), [(rdma, _options.RDMA), (xgmi, _options.XGMI)])
def test_defaults_are_in_range(plugin, knobs):
    """What a plugin offers as defaults passes its own check."""
    assert _options.check(knobs, plugin.options) == plugin.options


@pytest.mark.parametrize("knob", [*_options.RDMA, *_options.XGMI], ids=lambda knob: knob.name)
def test_range_of_each_knob(knob):
    """The borders are accepted, one beyond and other types are not."""
    if isinstance(knob.default, bool):
        accepted, refused = [True, False], [1, "true", None]
    elif knob.choices:
        accepted, refused = list(knob.choices), ["", 1, None]
    else:
        accepted = [knob.low, knob.high, *([knob.or_value] if knob.or_value is not None else [])]
        refused = [knob.high + 1, -7, True, 1.5, "1", None]
    assert all(knob.accepts(value) for value in accepted)
    assert not any(knob.accepts(value) for value in refused)


def test_variables_of_the_engine_come_first(monkeypatch):
    """What limits our window is what the engine will use, not what we asked for."""
    monkeypatch.setenv("MORI_IO_QP_MAX_SEND_WR", "256")
    monkeypatch.setenv("MORI_IO_QP_PER_TRANSFER", "4")
    seen = _options.effective(_options.RDMA, rdma.options)
    assert (seen["max_send_wr"], seen["qp_per_transfer"], seen["num_workers"]) == (256, 4, 1)


@pytest.mark.parametrize("text", ["many", "-3"])
def test_bad_variables_are_refused_by_name(monkeypatch, text):
    """The engine would take them without a word."""
    monkeypatch.setenv("MORI_IO_QP_PER_TRANSFER", text)
    with pytest.raises(ConfigurationError, match=rf"MORI_IO_QP_PER_TRANSFER='{text}': expected an integer within"):
        _options.effective(_options.RDMA, rdma.options)


def test_variables_are_shown_at_start(monkeypatch, caplog):
    """Every MORI variable is in the log, with its value."""
    monkeypatch.setenv("MORI_IO_TC", "104")
    monkeypatch.setenv("MORI_IO_ENABLE_NOTIFICATION", "0")
    with caplog.at_level(logging.INFO, "moriio_transport.mori"):
        _options.log_environment()
    assert "MORI_IO_ENABLE_NOTIFICATION=0 MORI_IO_TC=104" in caplog.text


@pytest.mark.parametrize("knobs", [_options.RDMA, _options.XGMI])
def test_documentation_has_the_tables(knobs):
    """docs/deployment.md shows every knob as it is."""
    assert _options.knob_table(knobs) in (DOCS / "deployment.md").read_text("utf-8")

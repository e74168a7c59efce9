"""The knobs of both backends: one table each, with types, ranges and what MoRI-IO's own variables do to them.

A `MORI_IO_*` variable of the environment overrides what we hand to the engine, silently; `effective` says what counts,
and `log_environment` shows at start what is set.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, Final

import attrs

from moriio_proto.errors import ConfigurationError
from moriio_transport.base import TransportUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RDMA", "XGMI", "Knob", "check", "defaults", "effective", "knob_table", "log_environment"]

_log = logging.getLogger(__name__)

SEND_QUEUE_DEPTH = 8192  # the engine's default of max_send_wr
_PREFIX = "kv_connector_extra_config"


@attrs.frozen
class Knob:
    """One option: its default, which gives the type, and what else it may be.

    `low` and `high` are inclusive; `or_value` is one more value, standing for the engine's default; `choices` are
    those of a text.  `variable` is what overrides it.
    """

    name: str
    default: int | bool | str
    doc: str
    low: int = 0
    high: int = 0
    or_value: int | None = None
    choices: tuple[str, ...] = ()
    variable: str = ""

    @property
    def expectation(self) -> str:
        """What a value must be."""
        if isinstance(self.default, bool):
            return "true or false"
        if self.choices:
            return " or ".join(self.choices)
        text = f"an integer within {self.low}..{self.high}"
        return text if self.or_value is None else f"{text}, or {self.or_value} for the engine's default"

    def accepts(self, value: object) -> bool:
        """Whether a value is of the right type and in range."""
        if isinstance(self.default, bool):
            return isinstance(value, bool)
        if self.choices:
            return value in self.choices
        if isinstance(value, bool) or not isinstance(value, int):
            return False
        return value == self.or_value or self.low <= value <= self.high


RDMA: Final = (
    Knob("qp_per_transfer", 1, "Queue pairs over which one transfer is spread.", 1, 128,
         variable="MORI_IO_QP_PER_TRANSFER"),
    Knob("post_batch_size", -1, "Work requests of one doorbell.", 1, 16384, -1, variable="MORI_IO_POST_BATCH_SIZE"),
    Knob("num_workers", 1, "Threads of the engine that post.", 1, 128, variable="MORI_IO_NUM_WORKER_THREADS"),
    Knob("nics_per_transfer", 1, "NICs over which one transfer is spread.", 1, 16,
         variable="MORI_IO_NUM_NICS_PER_TRANSFER"),
    Knob("poll_cq_mode", "polling", "How the engine waits for its card; both keep one core of the host busy.",
         choices=("polling", "event"), variable="MORI_IO_POLL_CQ_MODE"),
    Knob("transfer_chunking", False, "Cut long work requests into chunks.", variable="MORI_IO_ENABLE_CHUNKING"),
    Knob("chunk_bytes", 65536, "Bytes of a chunk.", 4096, 2**31, variable="MORI_IO_CHUNK_BYTES"),
    Knob("max_chunks_per_transfer", 64, "Chunks of one transfer at most.", 1, 65536, variable="MORI_IO_MAX_CHUNKS"),
    Knob("max_send_wr", 0, "Depth of a send queue, work requests.", 1, 65536, 0, variable="MORI_IO_QP_MAX_SEND_WR"),
    Knob("max_cqe", 0, "Depth of a completion queue.", 1, 2**22, 0, variable="MORI_IO_QP_MAX_CQE"),
    Knob("max_sge", 0, "Scatter/gather entries of one work request.", 1, 64, 0, variable="MORI_IO_QP_MAX_MSG_SGE"),
)  # fmt: skip

XGMI: Final = (
    Knob("num_streams", 64, "Streams of the GPU over which copies are spread.", 1, 1024),
    Knob("num_events", 64, "Events that the engine keeps to see copies end.", 1, 65536),
)


def defaults(knobs: tuple[Knob, ...]) -> dict[str, Any]:
    """Name -> default, as `TransportPlugin.options` has it."""
    return {knob.name: knob.default for knob in knobs}


def check(knobs: tuple[Knob, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The options, checked.

    Raises:
        ConfigurationError: names the key, the value and what was expected.
    """
    for knob in knobs:
        value = options[knob.name]
        if not knob.accepts(value):
            raise ConfigurationError(f"{_PREFIX}.{knob.name}", value, knob.expectation)
    return {knob.name: options[knob.name] for knob in knobs}


def effective(knobs: tuple[Knob, ...], options: Mapping[str, Any]) -> dict[str, Any]:
    """The integer options as the engine will see them: its own variables come first.

    Raises:
        ConfigurationError: a variable that is no integer in its option's range.
    """
    seen = dict(options)
    for knob in knobs:
        text = os.environ.get(knob.variable, "") if knob.variable else ""
        if not text or isinstance(knob.default, (bool, str)):
            continue
        try:
            value = int(text)
        except ValueError:
            raise ConfigurationError(knob.variable, text, knob.expectation) from None
        if not knob.accepts(value):
            raise ConfigurationError(knob.variable, text, knob.expectation)
        seen[knob.name] = value
    return seen


def log_environment() -> None:
    """Show every MORI variable that is set, and refuse the one that would hang transfers.

    Raises:
        TransportUnavailableError: the engine's notification is switched on from outside.
    """
    found = {name: value for name, value in os.environ.items() if name.startswith("MORI_")}
    if found:
        _log.info("MoRI variables override options: %s", " ".join(f"{k}={v}" for k, v in sorted(found.items())))
    notification = found.get("MORI_IO_ENABLE_NOTIFICATION", "")
    if notification.strip().lower() not in ("", "0", "false", "off"):
        raise TransportUnavailableError(
            f"MORI_IO_ENABLE_NOTIFICATION={notification}: expected it unset or 0: both sides of a connection must "
            "agree, and no connector receives the engine's notifications, so transfers would wait for ever"
        )


def knob_table(knobs: tuple[Knob, ...]) -> str:
    """All knobs as a Markdown table, for the documentation (a test compares)."""
    head = ["| Key | Default | Expected | Meaning | Overridden by |", "|---|---|---|---|---|"]
    rows = [
        f"| `{k.name}` | {str(k.default).lower()} | {k.expectation} | {k.doc} | {k.variable and f'`{k.variable}`'} |"
        for k in knobs
    ]
    return "\n".join([*head, *rows]) + "\n"

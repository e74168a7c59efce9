"""The prefill/decode KV-cache transfer protocol: pure state machines, no I/O, no clock.

    core = Core(CoreConfig(role, mode, token, geometry))
    effects = core.receive(event, now)
    effects = core.tick(now)            # when core.next_deadline() has come

`moriio_proto.events` and `moriio_proto.effects` say what goes in and out, `moriio_proto.wire` how messages look in
bytes, `moriio_proto.geometry` where the bytes of blocks lie, `moriio_proto.testing` what tests need.

A name is imported from its module when it is first used: the registration process takes two of them, and no numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moriio_proto.core import Core
    from moriio_proto.effects import Cancel, Connect, Dial, Disconnect, Effect, Post, Reply, Send, Settled
    from moriio_proto.errors import (
        ConfigurationError,
        DecodeError,
        LocalProtocolError,
        MoriioError,
        ParameterError,
        ProtocolError,
        RemoteProtocolError,
    )
    from moriio_proto.events import (
        AbortTransfer,
        Connected,
        Disconnected,
        Endpoint,
        Event,
        Expect,
        Finish,
        HelloReceived,
        Load,
        OpEnded,
        Preempt,
        Progress,
        Received,
        Skip,
        StartOffer,
    )
    from moriio_proto.settings import CoreConfig, Role, Stats, Timing
    from moriio_proto.wire.messages import Mode

__all__ = [
    "AbortTransfer",
    "Cancel",
    "ConfigurationError",
    "Connect",
    "Connected",
    "Core",
    "CoreConfig",
    "DecodeError",
    "Dial",
    "Disconnect",
    "Disconnected",
    "Effect",
    "Endpoint",
    "Event",
    "Expect",
    "Finish",
    "HelloReceived",
    "Load",
    "LocalProtocolError",
    "Mode",
    "MoriioError",
    "OpEnded",
    "ParameterError",
    "Post",
    "Preempt",
    "Progress",
    "ProtocolError",
    "Received",
    "RemoteProtocolError",
    "Reply",
    "Role",
    "Send",
    "Settled",
    "Skip",
    "StartOffer",
    "Stats",
    "Timing",
]

_HOMES = {
    "AbortTransfer": "events",
    "Cancel": "effects",
    "ConfigurationError": "errors",
    "Connect": "effects",
    "Connected": "events",
    "Core": "core",
    "CoreConfig": "settings",
    "DecodeError": "errors",
    "Dial": "effects",
    "Disconnect": "effects",
    "Disconnected": "events",
    "Effect": "effects",
    "Endpoint": "events",
    "Event": "events",
    "Expect": "events",
    "Finish": "events",
    "HelloReceived": "events",
    "Load": "events",
    "LocalProtocolError": "errors",
    "Mode": "wire.messages",
    "MoriioError": "errors",
    "OpEnded": "events",
    "ParameterError": "errors",
    "Post": "effects",
    "Preempt": "events",
    "Progress": "events",
    "ProtocolError": "errors",
    "Received": "events",
    "RemoteProtocolError": "errors",
    "Reply": "effects",
    "Role": "settings",
    "Send": "effects",
    "Settled": "effects",
    "Skip": "events",
    "StartOffer": "events",
    "Stats": "settings",
    "Timing": "settings",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)

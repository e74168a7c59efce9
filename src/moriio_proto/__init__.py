"""The prefill/decode KV-cache transfer protocol: pure state machines, no I/O, no clock.

    core = Core(CoreConfig(role, mode, token, geometry))
    effects = core.receive(event, now)
    effects = core.tick(now)            # when core.next_deadline() has come

`moriio_proto.events` and `moriio_proto.effects` say what goes in and out, `moriio_proto.wire` how messages look in
bytes, `moriio_proto.geometry` where the bytes of blocks lie, `moriio_proto.testing` what tests need.
"""

from moriio_proto.core import Core, CoreConfig, Role, Stats, Timing
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

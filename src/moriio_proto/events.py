"""What a core is told.  Each event names the trigger it fires; the prefix says who speaks.

`cmd_` the caller (vLLM's hooks, through the worker half), `recv_` a peer, `cq_` the transport.  Timers (`due_`)
are the core's own.  The counterpart are the effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import attrs

from moriio_proto.wire.messages import Hello, LayerDescriptors, NotifyMessage

__all__ = [
    "AbortTransfer",
    "Connected",
    "Disconnected",
    "Endpoint",
    "Event",
    "Expect",
    "Finish",
    "HelloReceived",
    "Load",
    "OpEnded",
    "OpOutcome",
    "Preempt",
    "Progress",
    "Received",
    "Skip",
    "StartOffer",
]


@attrs.frozen(order=True, cache_hash=True)
class Endpoint:
    """Where one rank of a peer listens: its own ports, rank offsets already added.

    `other`: the two ports where vLLM's built-in connector would listen with that rank; empty where they are the same.
    """

    host: str
    handshake_port: int
    notify_port: int
    other: tuple[int, ...] = ()

    @property
    def turned(self) -> Endpoint:
        """The same rank, with the other ports in front."""
        handshake_port, notify_port = self.other
        return Endpoint(self.host, handshake_port, notify_port, (self.handshake_port, self.notify_port))


# --- the caller, on a prefill node ------------------------------------------------------------------------------


@attrs.frozen
class StartOffer:
    """vLLM has admitted the request: its blocks will be offered under `transfer_id`.

    `owner`: what `Settled` names; local, never sent.  `peers`: our counterpart in each data-parallel rank of the decode
    instance, where the request names it.  `goal_blocks`: blocks that the prompt fills, ceil(tokens / block_tokens).
    """

    trigger: ClassVar[str] = "cmd_offer"
    transfer_id: str
    owner: str
    peers: Sequence[Endpoint]
    goal_blocks: int
    prompt_digest: str = ""


@attrs.define(unsafe_hash=True)  # by convention frozen; made per layer in the forward pass
class Progress:
    """KV of blocks `[start, end)` is computed for the first `layers` layers; of blocks before `start`, for all.

    `blocks`: all local block ids of the request known by now, by position.
    """

    trigger: ClassVar[str] = "cmd_progress"
    transfer_id: str
    start: int
    end: int
    layers: int
    blocks: Sequence[int]


@attrs.frozen
class Preempt:
    """vLLM took the request's blocks back and will compute it again from the start, into other blocks."""

    trigger: ClassVar[str] = "cmd_preempt"
    transfer_id: str


@attrs.frozen
class Finish:
    """The prefill is done and vLLM hands its blocks over until the core answers `Settled`.

    `blocks`: the prompt's block ids by position; READ tells them to D.
    """

    trigger: ClassVar[str] = "cmd_finish"
    transfer_id: str
    blocks: Sequence[int] = ()


# --- the caller, on a decode node -------------------------------------------------------------------------------


@attrs.frozen
class Expect:
    """A request is in vLLM's queue that will load this transfer once it has blocks."""

    trigger: ClassVar[str] = "cmd_expect"
    transfer_id: str
    peer: Endpoint
    prompt_digest: str = ""


@attrs.frozen
class Load:
    """Blocks are allocated: fill them.  Answered by exactly one `Settled` that names `owner`.

    `blocks[i]` takes what the prefill node has at position `first_block + i`.  `remote_blocks` (READ): the prefill
    node's block ids by position, from 0.
    """

    trigger: ClassVar[str] = "cmd_load"
    transfer_id: str
    owner: str
    peer: Endpoint
    blocks: Sequence[int]
    first_block: int
    remote_blocks: Sequence[int] = ()
    prompt_digest: str = ""


@attrs.frozen
class Skip:
    """Nothing of this transfer is needed (all blocks are here, or the request ended early): release it."""

    trigger: ClassVar[str] = "cmd_skip"
    transfer_id: str
    peer: Endpoint
    prompt_digest: str = ""


# --- the caller, on both ----------------------------------------------------------------------------------------


@attrs.frozen
class AbortTransfer:
    """The request ended before its transfer did.  On a prefill node this hands the blocks over as `Finish` does."""

    trigger: ClassVar[str] = "cmd_abort"
    transfer_id: str


# --- peers ------------------------------------------------------------------------------------------------------


@attrs.frozen
class Received:
    """A message from the notify port, or an answer to one of ours.  `route` takes a `Reply`; opaque."""

    message: NotifyMessage
    route: object = None


@attrs.frozen
class HelloReceived:
    """The answer to a `Dial`."""

    trigger: ClassVar[str] = "recv_hello"
    endpoint: Endpoint
    hello: Hello
    layers: LayerDescriptors


# --- the transport ----------------------------------------------------------------------------------------------


@attrs.frozen
class Connected:
    """The session asked for by `Connect` takes posts."""

    trigger: ClassVar[str] = "cq_connected"
    endpoint: Endpoint
    epoch: int


@attrs.frozen
class Disconnected:
    """The session is over, or was not made.  `proven`: the peer process is dead."""

    trigger: ClassVar[str] = "cq_disconnected"
    endpoint: Endpoint
    epoch: int
    reason: str
    proven: bool = False


OpOutcome: TypeAlias = str  # "done", "failed" or "refused"


@attrs.define(unsafe_hash=True)  # by convention frozen; made per layer
class OpEnded:
    """A `Post` is quiet.  `refused`: the queue was full and nothing moved."""

    token: int
    outcome: OpOutcome
    nbytes: int = 0
    reason: str = ""


Event: TypeAlias = (
    StartOffer
    | Progress
    | Preempt
    | Finish
    | Expect
    | Load
    | Skip
    | AbortTransfer
    | Received
    | HelloReceived
    | Connected
    | Disconnected
    | OpEnded
)

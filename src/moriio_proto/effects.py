"""What a core asks for.  The host carries effects out in order; each class says what it owes back.

`Send`, `Reply`, `Post` and `Settled` are frozen by convention only: attrs takes 0.1 us a field to enforce it, and a
layerwise transfer makes them by the dozen.  No effect blocks, and none is a promise about a peer: losing a `Send` or
a `Reply` is always allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import attrs

from moriio_proto.events import Endpoint
from moriio_proto.wire.messages import Hello, LayerDescriptors, NotifyMessage

__all__ = ["Cancel", "Connect", "Dial", "Disconnect", "Effect", "Forget", "Post", "Reply", "Send", "Settled", "Verdict"]


@attrs.define(unsafe_hash=True)
class Send:
    """Send a message to a peer's notify port.  Owes nothing."""

    endpoint: Endpoint
    message: NotifyMessage


@attrs.define(unsafe_hash=True)
class Reply:
    """Answer on the connection that a message came from; dropped when that is gone.  Owes nothing."""

    route: object
    message: NotifyMessage


@attrs.frozen
class Dial:
    """Ask a peer's handshake port for its hello.  Owes `HelloReceived` when an answer comes."""

    endpoint: Endpoint


@attrs.frozen
class Forget:
    """Nobody is reached at this address, or needs it any more: close the connections to it.  Owes nothing."""

    endpoint: Endpoint


@attrs.frozen
class Connect:
    """Make a transport session with the described peer.  Owes `Connected` or `Disconnected` of this epoch."""

    endpoint: Endpoint
    epoch: int
    hello: Hello
    layers: LayerDescriptors


@attrs.frozen
class Disconnect:
    """End the session.  Owes `Disconnected` at once, and the `OpEnded` of its posts when they are quiet."""

    endpoint: Endpoint
    epoch: int


@attrs.define(unsafe_hash=True)
class Post:
    """Copy blocks one-sidedly.  Owes exactly one `OpEnded(token)`, after which no byte of it moves.

    `local_blocks[i]` and `remote_blocks[i]` are a pair; `write` pushes, otherwise pulls.  Layers are
    `[layer_start, layer_end)` in the order of the local geometry.  No byte starts to move after `not_after`.
    """

    token: int
    endpoint: Endpoint
    write: bool
    layer_start: int
    layer_end: int
    local_blocks: Sequence[int]
    remote_blocks: Sequence[int]
    not_after: float


@attrs.frozen
class Cancel:
    """Ask for an early end of a post.  Its `OpEnded` still comes."""

    token: int


Verdict: TypeAlias = str  # "done", "failed" or "aborted"


@attrs.define(unsafe_hash=True)
class Settled:
    """The transfer is over for vLLM, and its blocks are quiet.

    Exactly one per `Load`, and per `Finish` or `AbortTransfer` that hands blocks over.  `verdict` "done" on a decode
    node: the KV is complete, and was moved under a valid lease.
    """

    transfer_id: str
    owner: str  # as the caller named it in `StartOffer` or `Load`
    verdict: Verdict
    reason: str = ""


Effect: TypeAlias = Send | Reply | Dial | Forget | Connect | Disconnect | Post | Cancel | Settled

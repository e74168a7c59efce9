"""Peer: one rank of a remote instance, as this rank sees it.

Theory of operation
-------------------
A peer is met when a transfer needs it: dial its handshake port, judge the answer (`recv_hello`), and, where this side
is the accessor of the peer's memory, make a transport session.  READY tells every attached transfer (`cq_ready`).

- Identity is the instance token of the hello.  The same address with another token is another process: the old
  one is proven dead, its session is closed, and the transfers bound to it hear `cq_lost`.
- Silence proves nothing.  Transfers that resend without an answer make the peer SUSPECT: it is dialled again, and the
  answer (same token, other token, none) decides.
- LOST is not final: the next transfer dials again.  A broken session ends its posts (the transport's contract); who
  was bound to the peer goes on by its own timers, unless death is proven.
- REFUSED: the caches cannot be copied into each other.  Transfers fail at once, with the factor's name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs

from moriio_proto.effects import Connect, Dial, Disconnect
from moriio_proto.events import Endpoint
from moriio_proto.machines._table import State, compile_machine, declare, row
from moriio_proto.wire.messages import CAP_LEASE, Hello, LayerDescriptors

if TYPE_CHECKING:
    from moriio_proto.core import Core
    from moriio_proto.geometry import CacheGeometry
    from moriio_proto.machines._transfer import Transfer

__all__ = ["MACHINE", "TABLE", "Peer", "PeerState"]


class PeerState(State):
    """Where a peer is."""

    IDLE = "never dialled"
    DIALLING = "handshake asked for"
    CONNECTING = "transport session asked for"
    READY = "known, takes transfers"
    SUSPECT = "silent, asked again"
    LOST = "gone, dialled again when needed"
    REFUSED = "its caches do not fit ours"


S = PeerState
_KNOWN = [S.READY, S.SUSPECT]

ROWS: Final = [
    row("cmd_need", [S.IDLE, S.LOST], S.DIALLING),
    row("cmd_need", [S.DIALLING, S.CONNECTING, S.READY, S.SUSPECT, S.REFUSED], None),
    row("recv_hello", S.DIALLING, S.REFUSED, "refuse", unless="compatible"),
    row("recv_hello", S.DIALLING, S.CONNECTING, "adopt", "connect", conditions="accesses"),
    row("recv_hello", S.DIALLING, S.READY, "adopt", "tell_ready"),
    row("recv_hello", S.READY, None, conditions="same_process"),
    row("recv_hello", S.SUSPECT, S.READY, conditions="same_process"),
    row("recv_hello", _KNOWN, S.REFUSED, "bury", "refuse", unless="compatible"),
    row("recv_hello", _KNOWN, S.CONNECTING, "bury", "adopt", "connect", conditions="accesses"),
    row("recv_hello", _KNOWN, S.READY, "bury", "adopt", "tell_ready"),
    row("recv_hello", [S.IDLE, S.CONNECTING, S.LOST, S.REFUSED], None),
    row("cq_connected", S.CONNECTING, S.READY, "tell_ready"),
    row("cq_connected", [S.DIALLING, S.READY, S.SUSPECT, S.LOST, S.REFUSED], None),
    row("cq_disconnected", [S.CONNECTING, S.READY, S.SUSPECT], S.LOST, "bury", conditions="proven"),
    row("cq_disconnected", [S.CONNECTING, S.READY, S.SUSPECT], S.LOST, "lose"),
    row("cq_disconnected", [S.DIALLING, S.LOST, S.REFUSED], None),
    row("due_silence", S.READY, S.SUSPECT),
    row("due_silence", [S.DIALLING, S.CONNECTING, S.SUSPECT, S.LOST, S.REFUSED], None),
    row("due_retry", [S.DIALLING, S.SUSPECT], None, "dial"),
    row("due_retry", S.REFUSED, S.LOST),
    row("due_deadline", S.DIALLING, S.LOST, "lose"),
    row("due_deadline", [S.CONNECTING, S.SUSPECT], S.LOST, "hang_up", "lose"),
    row("due_drain", [S.READY, S.SUSPECT, S.LOST], None, "hang_up"),
    row("due_drain", [S.DIALLING, S.CONNECTING, S.REFUSED], None),
    row("due_forget", S.LOST, None, "forget"),
]

MACHINE: Final = declare(
    "peer", PeerState, S.IDLE, [], ROWS,
    enter={
        S.DIALLING: "enter_dialling", S.CONNECTING: "enter_connecting", S.READY: "stop_timers",
        S.SUSPECT: "enter_dialling", S.LOST: "enter_lost", S.REFUSED: "enter_refused", S.IDLE: "stop_timers",
    },
)  # fmt: skip


@attrs.frozen
class _Lost:
    """What transfers hear of: the peer may have another reason, or none, by then."""

    reason: str


@attrs.define(eq=False)
class Peer:
    """The record of one remote rank."""

    endpoint: Endpoint
    address: Endpoint = attrs.field(init=False)  # where it really listens: `endpoint`, or that turned
    state: State = S.IDLE
    timers: dict[str, float] = attrs.field(factory=dict)
    token: str = ""
    capabilities: frozenset[str] = frozenset()
    geometry: CacheGeometry | None = None
    hello: Hello | None = None
    layers: LayerDescriptors | None = None
    epoch: int = 0  # counts sessions; events of older ones are void
    session: bool = False
    transfers: dict[str, Transfer] = attrs.field(factory=dict)
    reason: str = ""
    dials: int = 0

    def __attrs_post_init__(self) -> None:
        self.address = self.endpoint

    @property
    def ready(self) -> bool:
        """Whether messages and posts can go to it."""
        return self.state is S.READY or self.state is S.SUSPECT

    @property
    def leases(self) -> bool:
        """Whether it speaks our extension."""
        return CAP_LEASE in self.capabilities

    def suits(self, transfer: Transfer) -> bool:
        """Whether the process here is the one that the transfer is bound to, if it is bound."""
        return not transfer.incarnation or transfer.incarnation == self.token

    # --- guards ---------------------------------------------------------------------------------------------------

    def compatible(self, core: Core, event: Any) -> bool:
        """The core could lay its caches over ours."""
        return event.geometry is not None

    def accesses(self, core: Core, event: Any) -> bool:
        """Our side moves the bytes, so it needs a session."""
        return core.is_accessor

    def same_process(self, core: Core, event: Any) -> bool:
        """The hello comes from the process that we know."""
        return bool(event.token == self.token and event.hello.agent_metadata == self.agent)

    @property
    def agent(self) -> bytes:
        """Engine descriptor of the known process; tells upstream's processes apart, which have no token."""
        return self.hello.agent_metadata if self.hello is not None else b""

    def proven(self, core: Core, event: Any) -> bool:
        """The transport saw the process die."""
        return bool(event.proven)

    # --- actions --------------------------------------------------------------------------------------------------

    def stop_timers(self, core: Core, event: Any) -> None:
        """Nothing is awaited."""
        self.timers.clear()

    def dial(self, core: Core, event: Any) -> None:
        """Ask for the hello, in turn at both ports where the peer may listen."""
        turned = bool(self.endpoint.other) and self.dials % 2 == 1
        self.dials += 1
        core.emit(Dial(self.endpoint.turned if turned else self.endpoint))
        core.arm(self, "due_retry", core.now + core.timing.redial)

    def adopt(self, core: Core, event: Any) -> None:
        """Keep who answered."""
        self.hello, self.layers, self.geometry, self.token = event.hello, event.layers, event.geometry, event.token
        self.capabilities, self.address = event.capabilities, event.endpoint
        self.reason = ""

    def connect(self, core: Core, event: Any) -> None:
        """Make the session that posts go through."""
        assert self.hello is not None
        assert self.layers is not None
        self.epoch += 1
        self.session = True
        core.emit(Connect(self.endpoint, self.epoch, self.hello, self.layers))

    def hang_up(self, core: Core, event: Any) -> None:
        """End the session; its posts become quiet."""
        if self.session:
            core.emit(Disconnect(self.endpoint, self.epoch))

    def tell_ready(self, core: Core, event: Any) -> None:
        """Transfers of this process may begin; those announced by another one are void."""
        for transfer in list(self.transfers.values()):
            core.feed(transfer, "cq_ready" if self.suits(transfer) else "cq_lost", event)

    def bury(self, core: Core, event: Any) -> None:
        """The process that we knew is dead: whoever waits for it waits in vain."""
        self.reason = self.reason or getattr(event, "reason", "") or "the process at this address is another one now"
        for transfer in list(self.transfers.values()):
            if transfer.incarnation is None or transfer.incarnation == self.token:
                core.feed(transfer, "cq_lost", _Lost(self.reason))
        self.hang_up(core, event)
        self.session = False
        self.token, self.capabilities = "", frozenset()

    def lose(self, core: Core, event: Any) -> None:
        """No answer, or a broken session: who has not begun fails, who is bound goes on by its own timers."""
        self.session = False
        self.reason = getattr(event, "reason", "") or "no answer to the handshake"
        for transfer in list(self.transfers.values()):
            if transfer.incarnation is None:
                core.feed(transfer, "cq_lost", _Lost(self.reason))

    def refuse(self, core: Core, event: Any) -> None:
        """Its caches do not fit."""
        self.reason = event.problem
        for transfer in list(self.transfers.values()):
            core.feed(transfer, "cq_lost", _Lost(self.reason))

    def forget(self, core: Core, event: Any) -> None:
        """An address that nobody needs."""
        if self.transfers:
            core.arm(self, "due_forget", core.now + core.timing.forget)
        else:
            core.drop_peer(self)

    # --- entering states ------------------------------------------------------------------------------------------

    def enter_dialling(self, core: Core, event: Any) -> None:
        """Ask, repeat, and give up in time."""
        self.timers.clear()
        self.dial(core, event)
        core.arm(self, "due_deadline", core.now + core.timing.handshake_timeout)

    def enter_connecting(self, core: Core, event: Any) -> None:
        """A session may take as long as a handshake."""
        self.timers.clear()
        core.arm(self, "due_deadline", core.now + core.timing.handshake_timeout)

    def enter_lost(self, core: Core, event: Any) -> None:
        """Dialled again when needed, forgotten when not."""
        self.timers.clear()
        core.close_connections(self)
        core.arm(self, "due_forget", core.now + core.timing.forget)

    def enter_refused(self, core: Core, event: Any) -> None:
        """Asked again after a while: the peer may have been restarted with another configuration."""
        self.timers.clear()
        core.arm(self, "due_retry", core.now + core.timing.forget)


TABLE: Final = compile_machine(MACHINE, Peer)

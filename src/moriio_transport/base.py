"""The contract between the reactor and whatever moves bytes.

A transport copies byte runs one-sidedly between memory that this process registered and memory that a
peer described.  One abstract class, one frozen `Capabilities`, four kinds of event.

Rules that every plugin keeps (`moriio_transport.conformance` checks each):

1. *Nothing blocks.*  `connect`, `post`, `release` and `disconnect` return at once; `post` may copy a batch
   of up to `Capabilities.inline_bytes` itself.  What takes longer ends in an event.
2. *Completion by event.*  When `fileno()` is readable, `poll()` has events.  There is no poll interval.
3. *One end per post.*  Every posted token gets exactly one `Completed`, and none of its bytes move after it:
   a completion, good or bad, means *quiet*.  This is the fence that the protocol frees blocks on.
4. `release(token)` asks for an early end.  The `Completed` still comes, once, when it is quiet: at once for
   what had not started, later for what the hardware cannot call back.
5. `disconnect(session)` makes every token of the session quiet, whatever it takes, and then completes it.
6. *Not after.*  A byte of a post starts to move only while `clock() < not_after`; what is left then ends as
   EXPIRED.  The owner of the remote memory may reuse it soon after: a unit that started in time (a system call of
   at most `max_op_bytes`, a work request) cannot be called back, so whoever sets `not_after` leaves a margin.
7. A peer is who it said it is: the first byte is written only after `connect` proved that the description
   belongs to a live process, and a peer proven dead is reported once as `SessionLost(proven=True)`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

import attrs

from moriio_proto.geometry import TransferPlan

__all__ = [
    "Capabilities",
    "Completed",
    "Connected",
    "Description",
    "Direction",
    "Outcome",
    "PeerRefusedError",
    "Region",
    "Session",
    "SessionLost",
    "Transport",
    "TransportError",
    "TransportEvent",
    "TransportPlugin",
    "TransportUnavailableError",
]


class TransportError(Exception):
    """Something that this transport cannot do; the text says what was tried and what to do."""


class TransportUnavailableError(TransportError):
    """The backend cannot run on this machine (library, device, permission missing)."""


class PeerRefusedError(TransportError):
    """A peer's description is malformed or does not belong to a live process that we may access."""


class Direction(enum.Enum):
    """Which way the bytes go, seen from the side that posts."""

    WRITE = "write"
    READ = "read"


class Outcome(enum.Enum):
    """How a post ended; in each case it is quiet."""

    DONE = "done"  # all bytes moved
    FAILED = "failed"  # an unknown part moved
    CANCELLED = "cancelled"  # ended by release() or disconnect(); an unknown part moved
    EXPIRED = "expired"  # `not_after` came first; an unknown part moved
    REFUSED = "refused"  # queue full: nothing moved, and the same post may work later


@attrs.frozen
class Capabilities:
    """What a transport can do; the reactor and the planner adapt to it."""

    name: str
    devices: frozenset[str]  # torch device types it can register: "cpu", "cuda", ...
    same_host_only: bool
    max_op_bytes: int = 2**32 - 1  # longest contiguous run of one operation, bytes
    max_ops_per_post: int = 2**20  # operations of one post; longer plans are split
    inline_bytes: int = 0  # a post up to this size may be copied inside post()
    can_cancel: bool = False  # release() ends a running post early


@attrs.frozen
class Region:
    """One registered allocation: `nbytes` bytes at virtual address `address`."""

    address: int
    nbytes: int
    device: str = "cpu"
    device_index: int = -1


@attrs.frozen
class Description:
    """What a peer needs to reach this side: opaque to everybody but the same transport on the other side."""

    engine: bytes
    regions: tuple[bytes, ...]  # one per registered region, in order of registration


@attrs.frozen
class Session:
    """Handle of a connection made by `connect`; ids are never reused within a process."""

    id: int


@attrs.frozen
class Connected:
    """`connect` ended well: the session takes posts from now on."""

    session: Session


@attrs.define(unsafe_hash=True)  # by convention frozen; made per post
class Completed:
    """The one end of a post.  `nbytes` counts bytes known to have moved."""

    token: int
    outcome: Outcome
    nbytes: int = 0
    reason: str = ""


@attrs.frozen
class SessionLost:
    """A session will never take posts again (or `connect` failed).  `proven`: the peer process is dead."""

    session: Session
    reason: str
    proven: bool = False


TransportEvent: TypeAlias = Connected | Completed | SessionLost


class Transport(ABC):
    """One engine of one worker.  All methods are called from the reactor thread, save `register` before it."""

    capabilities: Capabilities

    @abstractmethod
    def register(self, regions: Sequence[Region]) -> None:
        """Make all regions reachable or none.  Called once, before `describe`.

        Raises:
            TransportError: names the region and the reason; what was registered before it is rolled back.
        """

    @abstractmethod
    def describe(self) -> Description:
        """What the handshake carries to peers."""

    @abstractmethod
    def connect(self, peer: Description) -> Session:
        """Begin a session; ends in `Connected` or `SessionLost`.

        Raises:
            PeerRefusedError: the description is malformed (nothing was started).
        """

    @abstractmethod
    def post(self, token: int, session: Session, direction: Direction, plan: TransferPlan, not_after: float) -> None:
        """Start the copies of `plan`; ends in one `Completed(token)`.

        A session that is not connected (any more), and a plan of which a run leaves its region on either side, end
        as FAILED with no byte moved.

        Args:
            token: chosen by the caller, not in use.
            session: a connected session.
            direction: WRITE moves local to remote, READ remote to local.
            plan: byte runs within the two sides' registered regions.
            not_after: `time.monotonic()` second after which no further byte may start to move.

        Raises:
            TransportError: the token is in use.
        """

    @abstractmethod
    def release(self, token: int) -> None:
        """Ask for an early end of a post; unknown or ended tokens are ignored."""

    @abstractmethod
    def disconnect(self, session: Session) -> None:
        """End a session: its tokens are completed when quiet.  Unknown sessions are ignored."""

    @abstractmethod
    def fileno(self) -> int:
        """A file descriptor that is readable while `poll()` has events."""

    @abstractmethod
    def poll(self) -> list[TransportEvent]:
        """All events since the last call; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """Stop all copies, wait until quiet, give memory and threads back.  Idempotent.

        `poll` may be called once more, for the ends of what was stopped.
        """


class TransportPlugin(ABC):
    """What an entry point of the group `moriio.transports` names: an instance of this class."""

    name: ClassVar[str]
    api_version: ClassVar[int] = 1
    options: ClassVar[Mapping[str, Any]] = {}  # the keys of kv_connector_extra_config it reads -> default

    @abstractmethod
    def create(self, *, engine_key: str, host: str, options: Mapping[str, Any]) -> Transport:
        """Make a transport.

        Args:
            engine_key: unique to this process start (contains the instance token) and rank.
            host: address under which peers reach this worker.
            options: the plugin's `options`, validated and complete.

        Raises:
            TransportUnavailableError: what was looked for, what was found, what else can be used.
        """

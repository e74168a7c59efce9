"""One node of the explored pair: a real core, what vLLM does with it, and what its transport has under way.

A node's states are few compared with the worlds they make together with the other node and the network, so each is
numbered, and what a move does in it is worked out once.
"""

from __future__ import annotations

from collections import deque

from moriio_proto.core import Role
from moriio_proto.effects import Connect, Dial, Disconnect, Effect, Post, Reply, Send, Settled
from moriio_proto.errors import IllegalEventError, ProtocolError
from moriio_proto.events import (
    AbortTransfer,
    Connected,
    Disconnected,
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
from moriio_proto.testing.explore import Move, Violation
from moriio_proto.testing.explore_moves import chunks_of, facts_of
from moriio_proto.testing.explore_snapshot import (
    LEASE,
    NOW,
    TRANSFER,
    Recorded,
    Snapshot,
    SnapshotCore,
    default_tables,
    hello_of,
)
from moriio_proto.testing.explore_story import (
    DEAD,
    ENDPOINTS,
    IDLE,
    LENT,
    OVER,
    RUNNING,
    Facts,
    Letter,
    Local,
    Setting,
    Step,
    Under,
    geometry_of,
    message_of,
)
from moriio_proto.wire.messages import (
    CAPABILITIES,
    Mode,
)

__all__ = ["Node"]


class Node:
    """All local states of one role that were met, and what moves do in them."""

    def __init__(self, role: Role, setting: Setting, tables: tuple[Recorded, Recorded] | None = None) -> None:
        self.role, self.name, self.setting = role, role.value, setting
        self.far = "D" if self.name == "P" else "P"
        self.tables = tables or default_tables(role)
        self._cores = {n: self._make_core(n) for n in (1, 2)}
        self._numbers: dict[Local, int] = {}
        self.locals: list[Local] = []
        self._facts: list[Facts] = []
        self._steps: dict[tuple[int, Move], Step] = {}
        self.first = self.intern(self.fresh(1))

    def _make_core(self, number: int) -> SnapshotCore:
        token = f"{self.name}{number}"
        far = ENDPOINTS[self.far]
        core = SnapshotCore(self.role, self.setting.mode, token, far, geometry_of(self.setting, token))
        core.use(*self.tables)
        for n in (1, 2):
            core.learn(self.hello(f"{self.far}{n}"))
        return core

    def hello(self, token: str) -> HelloReceived:
        """What a process at the far address says when it is dialled."""
        capabilities = frozenset() if self.setting.plain else CAPABILITIES
        return hello_of(ENDPOINTS[self.far], token, geometry_of(self.setting, token), capabilities)

    def fresh(self, number: int) -> Local:
        """A process that has just started; one that took a dead one's place gets no request of this transfer."""
        phase = IDLE if number == 1 else DEAD
        return Local(Snapshot(None, None), number, (phase, 0, 0, False), None, ())

    def intern(self, local: Local) -> int:
        """The number of a local state."""
        known = self._numbers.get(local)
        if known is None:
            known = self._numbers[local] = len(self.locals)
            self.locals.append(local)
            self._facts.append(facts_of(self.name, self.setting, local))
        return known

    def facts(self, at: int) -> Facts:
        """What can happen in a local state."""
        return self._facts[at]

    def step(self, at: int, move: Move) -> Step:
        """What `move` does in local state `at`."""
        key = (at, move)
        known = self._steps.get(key)
        if known is None:
            known = self._steps[key] = _Run(self, self.locals[at]).take(move)
        return known

    def core(self, local: Local) -> SnapshotCore:
        """The core, in this state."""
        core = self._cores[local.number]
        core.thaw(local.core)
        return core

    # --- the geometry of the story ----------------------------------------------------------------------------------

    def cells(self, post: Post) -> int:
        """The cells of D's blocks that a post fills, as bits."""
        mine = post.remote_blocks if post.write else post.local_blocks
        layers = range(post.layer_start, post.layer_end)
        return sum(1 << (layer * self.setting.goal + block - 70) for layer in layers for block in mine)

    def copies_kv(self, post: Post, vllm: tuple[int, int, int, bool]) -> bool:
        """Whether each block of the post is paired with its own position, and is computed."""
        ours, theirs = (
            (post.local_blocks, post.remote_blocks) if post.write else (post.remote_blocks, post.local_blocks)
        )
        base = 10 + 100 * (vllm[2] if post.write else 0)
        if any(a - base != b - 70 for a, b in zip(ours, theirs, strict=True)):
            return False
        computed = vllm[1]
        last = max((b - 70) * self.setting.layers + post.layer_end for b in theirs)
        return not post.write or last <= computed


class _Run:
    """One move in one local state."""

    def __init__(self, node: Node, local: Local) -> None:
        self.node, self.local = node, local
        self.vllm, self.link = local.vllm, local.link
        self.sent: list[Letter] = []
        self.dials = self.done = False
        self.filled = self.spoilt = self.target = 0
        self.owed: deque[Event] = deque()

    def take(self, move: Move) -> Step:
        if move == ("boot",):
            return Step(self.node.intern(self.node.fresh(2)))
        if move == ("die",):
            return Step(self.node.intern(Local(Snapshot(None, None), 0, (DEAD, 0, 0, False), None, ())))
        self.core = self.node.core(self.local)
        self.posts = dict(enumerate(self.local.posts, 1))
        try:
            self.carry_out(getattr(self, f"do_{move[0]}")(*move[1:]))
            while self.owed:
                self.carry_out(self.give(self.owed.popleft()))
        except (ProtocolError, IllegalEventError, AssertionError) as e:
            return Step(-1, wrong=f"{self.node.name}: {e}")
        except Violation as e:
            return Step(-1, wrong=e.what)
        return self.result()

    def result(self) -> Step:
        record = self.core.transfer
        tokens = sorted(record.pending) if record is not None else []
        if sorted(self.posts) != tokens:
            return Step(-1, wrong=f"{self.node.name}: its record forgets posts that are under way")
        posts = tuple(self.posts[token] for token in tokens)
        after = Local(self.core.freeze(), self.local.number, self.vllm, self.link, posts)
        return Step(
            self.node.intern(after), tuple(dict.fromkeys(self.sent)), self.dials, self.filled, self.spoilt, self.target,
            self.done, self.local.core.transfer is not None and record is None,
        )  # fmt: skip

    def give(self, event: Event) -> list[Effect]:
        return self.core.receive(event, NOW)

    # --- moves ------------------------------------------------------------------------------------------------------

    def do_timer(self, whose: str, trigger: str) -> list[Effect]:
        record = self.core.transfer if whose == "transfer" else self.core.peers[self.core.far]
        assert record is not None
        return self.core.fire_timer(record, trigger)

    def do_silence(self) -> list[Effect]:
        return self.core.fall_silent()

    def do_tick(self) -> list[Effect]:
        self.core.let_pass()
        return []

    def do_post(self, token: int, outcome: str) -> list[Effect]:
        record = self.core.transfer
        assert record is not None
        foreign, self.target, _ = self.posts.pop(token)
        cells = self.node.cells(record.pending[token])
        if outcome == "done" and not foreign:
            self.filled = cells
        elif outcome != "refused":
            self.spoilt = cells
        return self.give(OpEnded(token, outcome, reason="" if outcome == "done" else "injected"))

    def do_link(self, what: str) -> list[Effect]:
        epoch = self.core.peers[self.core.far].epoch
        if what == "up":
            assert self.link is not None
            self.link = ("up", self.link[1])
            return self.give(Connected(self.core.far, epoch))
        self.cut()
        return self.give(Disconnected(self.core.far, epoch, "lost", proven=what == "dead"))

    def cut(self) -> None:
        self.link = None
        self.posts = {token: post._replace(adrift=True) for token, post in self.posts.items()}

    def do_vllm(self, what: str) -> list[Effect]:
        phase, computed, parity, aborted = self.vllm
        node, far = self.node, self.core.far
        first, goal = node.setting.first, node.setting.goal
        ours = [10 + 100 * parity + i for i in range(goal)]
        event: Event
        if what == "start":
            event, phase, computed = StartOffer(TRANSFER, "r", (far,), goal), RUNNING, 0
        elif what == "progress":
            start, end, layers = chunks_of(node.setting)[computed]
            event, computed = Progress(TRANSFER, start, end, layers, ours[:end]), computed + 1
        elif what == "preempt":
            event, computed, parity = Preempt(TRANSFER), 0, 1 - parity
            self.posts = {token: post._replace(foreign=True) for token, post in self.posts.items()}
        elif what == "finish":
            event, phase = Finish(TRANSFER), LENT
        elif what == "expect":
            event, phase = Expect(TRANSFER, far), RUNNING if phase == IDLE else phase
        elif what == "skip":
            event, phase = Skip(TRANSFER, far), OVER
        elif what == "load":
            remote = [10 + i for i in range(goal - node.setting.short)] if node.setting.mode is Mode.READ else ()
            event, phase = Load(TRANSFER, "r", far, [70 + i for i in range(first, goal)], first, remote), LENT
            aborted = False
        else:
            event, aborted = AbortTransfer(TRANSFER), True
            phase = LENT if node.name == "P" else OVER if phase == RUNNING else phase
        self.vllm = (phase, computed, parity, aborted)
        return self.give(event)

    def do_recv(self, letter: Letter) -> list[Effect]:
        if letter.kind == "Hello":
            return self.give(self.node.hello(letter.token))
        return self.give(Received(message_of(self.node.setting, letter), route=letter.token or "back"))

    # --- effects ----------------------------------------------------------------------------------------------------

    def carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send | Reply):
                self.send(effect)
            elif isinstance(effect, Post):
                self.post(effect)
            elif isinstance(effect, Settled):
                self.settle(effect)
            elif isinstance(effect, Dial):
                self.dials = True
            elif isinstance(effect, Connect):
                self.link = ("asked", int(effect.hello.agent_metadata.decode()[1:]))
            elif isinstance(effect, Disconnect) and self.link is not None:
                self.cut()
                self.owed.append(Disconnected(effect.endpoint, effect.epoch, "hung up"))

    def send(self, effect: Send | Reply) -> None:
        message = effect.message
        stamp = getattr(message, "stamp", None)
        age = -1.0 if stamp is None else min(NOW - stamp / 1e6, LEASE)
        only = str(effect.route) if isinstance(effect, Reply) and effect.route != "back" else ""
        failed, why = bool(getattr(message, "failed", False)), bool(getattr(message, "reason", ""))
        token = getattr(message, "token", "")
        self.sent.append(Letter(self.node.far, only, type(message).__name__, token, age, failed, why))

    def post(self, post: Post) -> None:
        if self.link is None or self.link[0] != "up":
            self.owed.append(OpEnded(post.token, "failed", reason="no session with the peer"))
        else:
            self.posts[post.token] = Under(not self.node.copies_kv(post, self.vllm), self.link[1])

    def settle(self, effect: Settled) -> None:
        phase, computed, parity, aborted = self.vllm
        if phase != LENT:
            raise Violation(f"{self.node.name} settles blocks that vLLM has not lent it, or twice")
        if self.posts:
            raise Violation(f"{self.node.name} settles with posts under way")
        self.vllm = (OVER, computed, parity, aborted)
        self.done = effect.verdict == "done"

"""Two cores, an unfair network and an unreliable transport, against a reference model of what may be promised.

The model knows nothing of the protocol.  It knows who is owed an answer (`owed`), what each block of D holds (`cells`),
and which blocks vLLM has taken back.
"""

from __future__ import annotations

import attrs
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from moriio_proto.effects import Post
from moriio_proto.events import OpEnded
from moriio_proto.testing.transcript import LAYERS, Transcript
from moriio_proto.wire.messages import Mode

GOAL = 2
IDS = ("t", "u")
D_BLOCKS = {"t": (40, 41), "u": (42, 43)}
P_BLOCKS = (10, 11)  # the transcript's, by position


@attrs.define
class _Host:
    """What vLLM knows of one transfer on one side."""

    stage: str = "new"
    computed: int = 0  # P: blocks
    computation: int = 0  # P: counts preemptions
    aborted: bool = False


class TwoCores(RuleBasedStateMachine):
    """Rules are what the outside world may do at any moment."""

    mode: Mode

    def __init__(self) -> None:
        super().__init__()
        self.world = Transcript(self.mode)
        self.hosts = {(side, t): _Host() for side in "PD" for t in IDS}
        self.owed: set[tuple[str, str]] = set()
        self.posted: dict[tuple[str, int], int] = {}  # a post -> P's computation when it was made
        self.cells: dict[tuple[int, int], tuple[int, int]] = {}  # D's block, layer -> P's block, computation

    def run_line(self, line: str) -> None:
        """One command, and what the model thinks of its output."""
        self.judge(self.world.run(line))

    def judge(self, lines: list[str]) -> None:
        """Settlements are owed, and true."""
        for line in lines:
            side, _, rest = line.partition(" ")
            if rest.startswith("SETTLED"):
                _, owner, verdict = rest.split()[:3]
                t = owner.removeprefix("req-")
                assert (side, t) in self.owed, f"nobody waits for: {line}"
                self.owed.remove((side, t))
                if side == "D":
                    self.judge_landing(t, verdict)
            assert not rest.startswith("LocalProtocolError"), line
        for side, node in self.world.nodes.items():
            for post in node.ops:
                self.posted.setdefault((side, post.token), self.hosts["P", self.transfer_of(post)].computation)

    def judge_landing(self, t: str, verdict: str) -> None:
        """A landing is "done" only with every byte of the last computation, "aborted" only when vLLM has gone."""
        host = self.hosts["D", t]
        assert (verdict == "aborted") <= host.aborted
        if verdict == "done":
            want = self.hosts["P", t].computation
            for block, source in zip(D_BLOCKS[t], P_BLOCKS, strict=True):
                for layer in range(LAYERS):
                    assert self.cells.get((block, layer)) == (source, want), f"{t}: block {block} layer {layer}"

    def transfer_of(self, post: Post) -> str:
        """Whose post it is: D's blocks are disjoint."""
        blocks = post.remote_blocks if post.write else post.local_blocks
        return next(t for t in IDS if set(blocks) <= set(D_BLOCKS[t]))

    @initialize(begun=st.sets(st.sampled_from(IDS)))
    def begin(self, begun: set[str]) -> None:
        """Some transfers have met already: random steps alone seldom get that far."""
        for t in sorted(begun):
            self.start(t)
            if self.mode is Mode.READ:
                self.hosts["P", t].computed = GOAL
                self.end_prefill(t, aborted=False)
            self.load(t, wanted=True)
        self.run_line("deliver")

    # --- vLLM -----------------------------------------------------------------------------------------------------

    @rule(t=st.sampled_from(IDS))
    def start(self, t: str) -> None:
        """P admits the request."""
        if self.hosts["P", t].stage == "new":
            self.hosts["P", t].stage = "running"
            self.run_line(f"P start {t} goal={GOAL}")

    @rule(t=st.sampled_from(IDS), layers=st.sampled_from([LAYERS, LAYERS, 2]))
    def progress(self, t: str, layers: int) -> None:
        """P computes layers of the next block."""
        host = self.hosts["P", t]
        if host.stage == "running" and host.computed < GOAL:
            at = host.computed
            host.computed += layers == LAYERS
            if self.mode is Mode.WRITE:
                self.run_line(f"P progress {t} {at} {at + 1} {layers}")

    @rule(t=st.sampled_from(IDS))
    def preempt(self, t: str) -> None:
        """P's blocks are taken back and computed again."""
        host = self.hosts["P", t]
        if host.stage == "running" and self.mode is Mode.WRITE:
            host.computed, host.computation = 0, host.computation + 1
            self.run_line(f"P preempt {t}")

    @rule(t=st.sampled_from(IDS), aborted=st.booleans())
    def end_prefill(self, t: str, aborted: bool) -> None:
        """P hands its blocks over."""
        host = self.hosts["P", t]
        if host.stage == "running" and (aborted or host.computed == GOAL):
            host.stage = "over"
            self.owed.add(("P", t))
            self.run_line(f"P {'abort' if aborted else 'finish'} {t}")

    @rule(t=st.sampled_from(IDS))
    def expect(self, t: str) -> None:
        """D queues the request."""
        if self.hosts["D", t].stage == "new":
            self.hosts["D", t].stage = "queued"
            self.run_line(f"D expect {t}")

    @rule(t=st.sampled_from(IDS), wanted=st.booleans())
    def load(self, t: str, wanted: bool) -> None:
        """D has blocks for it, or needs none.  In READ that is after P has answered."""
        host = self.hosts["D", t]
        if host.stage not in {"new", "queued"} or (self.mode is Mode.READ and self.hosts["P", t].stage != "over"):
            return
        host.stage = "over"
        if wanted:
            self.owed.add(("D", t))
            remote = f" remote={','.join(map(str, P_BLOCKS))}" if self.mode is Mode.READ else ""
            self.run_line(f"D load {t} {','.join(map(str, D_BLOCKS[t]))}{remote}")
        else:
            self.run_line(f"D skip {t}")

    @rule(t=st.sampled_from(IDS))
    def abort_decode(self, t: str) -> None:
        """D's client leaves while the load is under way."""
        if ("D", t) in self.owed and not self.hosts["D", t].aborted:
            self.hosts["D", t].aborted = True
            self.run_line(f"D abort {t}")

    # --- the network ----------------------------------------------------------------------------------------------

    @rule(data=st.data(), what=st.sampled_from(["deliver", "deliver", "deliver", "repeat", "lose"]))
    def network(self, data: st.DataObject, what: str) -> None:
        """Any message under way comes now, or comes twice, or never."""
        flying = self.world.flying
        if flying:
            i = data.draw(st.integers(0, min(3, len(flying) - 1)))
            kind, to, event = flying[i]
            if what != "repeat":
                del flying[i]
            if what != "lose" or kind in {"Connected", "Disconnected"}:  # these are no messages, and never lost
                self.give(to, event)

    @rule()
    def deliver_all(self) -> None:
        """A quiet moment."""
        self.run_line("deliver")

    def give(self, side: str, event: object) -> None:
        """Hand one event to a core."""
        self.world.lines = []
        self.world._give(self.world.nodes[side], event)  # type: ignore[arg-type]
        self.judge(self.world.lines)

    # --- the transport --------------------------------------------------------------------------------------------

    @precondition(lambda self: any(node.ops for node in self.world.nodes.values()))
    @rule(data=st.data(), outcome=st.sampled_from(["done", "done", "done", "failed", "refused"]))
    def end_post(self, data: st.DataObject, outcome: str) -> None:
        """Any post ends; in time, or not well."""
        side, node = next((side, node) for side, node in self.world.nodes.items() if node.ops)
        post = node.ops.pop(data.draw(st.integers(0, len(node.ops) - 1)))
        if outcome == "done" and self.world.now >= post.not_after:
            outcome = "failed"
        if outcome == "done":
            self.move(side, post)
        self.give(side, OpEnded(post.token, outcome, reason="" if outcome == "done" else "injected"))

    def move(self, side: str, post: Post) -> None:
        """The bytes of a post arrive; what vLLM has taken back is neither written nor worth reading."""
        t = self.transfer_of(post)
        assert ("D", t) in self.owed, f"{t}: D's blocks are touched after D settled"
        ours, theirs = post.local_blocks, post.remote_blocks
        source, target = (ours, theirs) if post.write else (theirs, ours)
        valid = post.write or ("P", t) in self.owed
        for a, b in zip(source, target, strict=True):
            for layer in range(post.layer_start, post.layer_end):
                self.cells[b, layer] = (a if valid else -1, self.posted[side, post.token])

    # --- time -----------------------------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.001, 0.001, 0.001, 0.3, 3.0, 12.0]))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.run_line(f"wait {seconds}")

    def teardown(self) -> None:
        """vLLM ends what it has begun, the network heals: everything owed comes, and nothing is left."""
        for t in IDS:
            for _ in range(GOAL):
                self.progress(t, LAYERS)
            self.end_prefill(t, aborted=False)
            if self.hosts["D", t].stage == "queued":
                self.hosts["D", t].stage = "over"
                self.run_line(f"D skip {t}")
        for _ in range(120):
            self.run_line("deliver")
            for side, node in self.world.nodes.items():
                while node.ops:
                    post = node.ops.pop(0)
                    good = self.world.now < post.not_after
                    if good:
                        self.move(side, post)
                    self.give(side, OpEnded(post.token, "done" if good else "failed"))
            self.run_line("wait 3")
        assert not self.owed
        assert [dict(node.core.transfers) for node in self.world.nodes.values()] == [{}, {}]


@pytest.mark.parametrize("mode", list(Mode))
def test_cores_agree_with_the_model(mode: Mode) -> None:
    """Whatever the outside does in whatever order: one answer each, true, and nothing left."""
    machine = type(f"TwoCores{mode.value}", (TwoCores,), {"mode": mode})
    machine.TestCase.settings = settings(
        max_examples=100, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
    )
    machine.TestCase("runTest").runTest()

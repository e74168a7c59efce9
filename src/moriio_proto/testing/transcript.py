"""Two cores and a network under full control, driven by a script whose expected output stands in the same file.

    # the story
    > P start t goal=2
      P dial D
    > deliver
      ...

Commands (`N` is P or D, `t` a transfer id):

    N start t goal=2              P: vLLM admitted the request
    N progress t 0 2 4            P: blocks [0, 2) computed in 4 layers
    N preempt t | N finish t | N abort t
    ... prompt=aa                 of start, load, expect and skip: the prompt's digest
    N expect t | N skip t
    N load t 7,8 first=0 remote=1,2
    deliver [n]                   deliver n messages (all, until nothing moves), oldest first
    drop KIND | again KIND        lose, or deliver twice, the oldest message of a kind
    ops N done|failed|refused [n] end n (all) posts of N, oldest first
    wait 2.5                      let time pass; timers fire in order
    restart N                     a new process at the same address
    gone N                        the other side's transport sees N's process die
    states                        print every record's state
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from moriio_proto.core import Core, CoreConfig, Role, Timing
from moriio_proto.effects import Cancel, Connect, Dial, Disconnect, Effect, Forget, Post, Reply, Send, Settled
from moriio_proto.errors import ProtocolError
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
from moriio_proto.geometry import CacheGeometry, LayerLayout, Piece
from moriio_proto.wire.messages import CAPABILITIES, Hello, HelloExtension, LayerDescriptors, Mode, WriteDone

__all__ = ["LAYERS", "Transcript", "run_transcript", "small_geometry"]

LAYERS = 4


def small_geometry(layers: int = LAYERS, blocks: int = 64, block_bytes: int = 256) -> CacheGeometry:
    """A cache of equal layers, each in its own part of one region."""
    size = blocks * block_bytes
    pieces = [(Piece(0, i * size, block_bytes, block_bytes),) for i in range(layers)]
    made = tuple(LayerLayout(f"layer.{i}", piece, "bytes") for i, piece in enumerate(pieces))
    return CacheGeometry(layers=made, region_bytes=(layers * size,), num_blocks=blocks, block_tokens=16)


@attrs.define(eq=False)
class _Node:
    name: str
    core: Core
    endpoint: Endpoint
    starts: int = 1
    ops: list[Post] = attrs.field(factory=list)


class Transcript:
    """One run of a script."""

    def __init__(self, mode: Mode, timing: Timing | None = None) -> None:
        self.mode, self.timing, self.now = mode, timing or Timing(), 0.0
        self.nodes: dict[str, _Node] = {}
        for name, role in (("P", Role.PREFILL), ("D", Role.DECODE)):
            self.nodes[name] = _Node(name, self._core(name, role, 1), Endpoint(name.lower(), 6301, 61005))
        self.flying: list[tuple[str, str, Event]] = []  # kind, to whom, what
        self.lines: list[str] = []

    def _core(self, name: str, role: Role, start: int) -> Core:
        return Core(CoreConfig(role, self.mode, f"{name}{start}", small_geometry(), timing=self.timing))

    def other(self, name: str) -> _Node:
        """The node at the other end."""
        return self.nodes["D" if name == "P" else "P"]

    def run(self, line: str) -> list[str]:
        """Carry one command out; returns what it printed."""
        self.lines = []
        word, *rest = line.split()
        if word in self.nodes:
            self._command(self.nodes[word], rest[0], rest[1:])
        else:
            getattr(self, f"_do_{word}")(*rest)
        return self.lines

    # --- commands -------------------------------------------------------------------------------------------------

    def _command(self, node: _Node, verb: str, args: list[str]) -> None:
        transfer, *rest = args
        plain = [a for a in rest if "=" not in a]
        named = dict(a.split("=") for a in rest if "=" in a)
        peer, digest = self.other(node.name).endpoint, named.get("prompt", "")
        event: Event
        if verb == "start":
            event = StartOffer(transfer, f"req-{transfer}", (peer,), int(named["goal"]), digest)
        elif verb == "progress":
            start, end, layers = map(int, plain)
            event = Progress(transfer, start, end, layers, list(range(10, 10 + end)))
        elif verb == "load":
            first, remote = int(named.get("first", 0)), _ids(named.get("remote", ""))
            event = Load(transfer, f"req-{transfer}", peer, _ids(plain[0]), first, remote, digest)
        elif verb == "finish":
            event = Finish(transfer, _ids(named.get("blocks", "")))
        elif verb in {"expect", "skip"}:
            event = (Expect if verb == "expect" else Skip)(transfer, peer, digest)
        else:
            event = Preempt(transfer) if verb == "preempt" else AbortTransfer(transfer)
        self._give(node, event)

    def _do_deliver(self, count: str = "1000") -> None:
        for _ in range(int(count)):
            if not self.flying:
                return
            _, to, event = self.flying.pop(0)
            self._give(self.nodes[to], event)

    def _oldest(self, kind: str) -> int:
        return next(i for i, (k, _, _) in enumerate(self.flying) if k == kind)

    def _do_drop(self, kind: str) -> None:
        del self.flying[self._oldest(kind)]

    def _do_again(self, kind: str) -> None:
        _, to, event = self.flying[self._oldest(kind)]
        self._give(self.nodes[to], event)

    def _do_ops(self, name: str, outcome: str, count: str = "1000") -> None:
        node = self.nodes[name]
        for _ in range(int(count)):
            if not node.ops:
                return
            post = node.ops.pop(0)
            self._give(node, OpEnded(post.token, outcome, reason="" if outcome == "done" else "injected"))

    def _do_wait(self, seconds: str) -> None:
        end = self.now + float(seconds)
        while True:
            due = [(d, n) for n in self.nodes.values() if (d := n.core.next_deadline()) is not None and d <= end]
            if not due:
                break
            self.now, node = min(due, key=lambda pair: pair[0])
            self._effects(node, node.core.tick(self.now))
        self.now = end

    def _do_restart(self, name: str) -> None:
        node = self.nodes[name]
        node.starts += 1
        node.core, node.ops = self._core(name, node.core.role, node.starts), []

    def _do_gone(self, name: str) -> None:
        node = self.other(name)
        peer = node.core.peers[self.nodes[name].endpoint]
        for post in list(node.ops):
            self._give(node, OpEnded(post.token, "failed", reason="the peer process is dead"))
        node.ops.clear()
        self._give(node, Disconnected(peer.endpoint, peer.epoch, "the peer process is dead", proven=True))

    def _do_states(self) -> None:
        for node in self.nodes.values():
            for transfer in node.core.transfers.values():
                self.lines.append(f"{node.name} {transfer.id} {transfer.state.name}")
            for peer in node.core.peers.values():
                self.lines.append(f"{node.name} peer {peer.endpoint.host.upper()} {peer.state.name}")

    # --- the world ------------------------------------------------------------------------------------------------

    def _give(self, node: _Node, event: Event) -> None:
        try:
            effects = node.core.receive(event, self.now)
        except ProtocolError as e:
            self.lines.append(f"{node.name} {type(e).__name__}: {e}")
            return
        self._effects(node, effects)

    def _effects(self, node: _Node, effects: list[Effect]) -> None:
        for effect in effects:
            self.lines.append(f"{node.name} {self._carry_out(node, effect)}")

    def _carry_out(self, node: _Node, effect: Effect) -> str:
        far = self.other(node.name)
        if isinstance(effect, Send | Reply):
            kind = type(effect.message).__name__
            self.flying.append((kind, far.name, Received(effect.message, route=node.name)))
            message = effect.message
            failed = isinstance(message, WriteDone) and message.failed
            return f"sends {kind}" + (f" FAILED ({getattr(message, 'reason', '')})" if failed else "")
        if isinstance(effect, Post):
            node.ops.append(effect)
            pairs = " ".join(f"{a}>{b}" for a, b in zip(effect.local_blocks, effect.remote_blocks, strict=True))
            verb = "writes" if effect.write else "reads"
            return f"{verb} #{effect.token} layers {effect.layer_start}:{effect.layer_end} blocks {pairs}"
        if isinstance(effect, Settled):
            return f"SETTLED {effect.owner} {effect.verdict}" + (f" ({effect.reason})" if effect.reason else "")
        if isinstance(effect, Cancel):
            return f"cancels #{effect.token}"
        if isinstance(effect, Dial):
            self.flying.append(("Hello", node.name, _hello(effect.endpoint, far.core)))
            return "dials"
        if isinstance(effect, Connect):
            self.flying.append(("Connected", node.name, Connected(effect.endpoint, effect.epoch)))
            return "connects"
        if isinstance(effect, Forget):
            return "forgets the connection"
        assert isinstance(effect, Disconnect)
        self.flying.append(("Disconnected", node.name, Disconnected(effect.endpoint, effect.epoch, "hung up")))
        return "hangs up"


def _hello(endpoint: Endpoint, core: Core) -> HelloReceived:
    extension = HelloExtension(
        token=core.token, global_dp_rank=0, tp_rank=0, dp_size=1, dp_size_local=1, tp_size=core.tp_size,
        capabilities=CAPABILITIES, notify_port=endpoint.notify_port, transport="fake", regions=(b"r",),
        geometry=core.config.geometry, transfer_mode=core.mode.value,
    )  # fmt: skip
    hello = Hello("engine", core.token.encode(), (0,), 64, 256, "fake", extension)
    return HelloReceived(endpoint, hello, LayerDescriptors({}))


def _ids(text: str) -> list[int]:
    return [int(x) for x in text.split(",") if x]


def run_transcript(text: str) -> str:
    """Run a script and give it back with the output that it has now.

    The first line that begins with `mode ` names the mode.
    """
    return "".join(f"{line}\n" for line in _replayed(text))


def _replayed(text: str) -> Iterator[str]:
    transcript: Transcript | None = None
    for line in text.splitlines():
        if line.startswith("mode "):
            transcript = Transcript(Mode[line.split()[1]])
            yield line
        elif line.startswith("> "):
            assert transcript is not None, "the script must say its mode before its first command"
            yield line
            yield from (f"  {out}" for out in transcript.run(line[2:]))
        elif not line.startswith("  "):
            yield line

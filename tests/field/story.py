"""Two cores and a network under full control: `Transcript` with what was settled kept aside."""

from __future__ import annotations

from moriio_proto.core import Timing
from moriio_proto.testing.transcript import Transcript
from moriio_proto.wire.messages import Mode


class Story(Transcript):
    """A run of transcript commands; `said` is all output, `settled` the verdicts in order as (node, owner, verdict)."""

    def __init__(self, mode: Mode | str, timing: Timing | None = None) -> None:
        super().__init__(Mode[mode] if isinstance(mode, str) else mode, timing)
        self.said: list[str] = []

    def play(self, *commands: str) -> list[str]:
        """Carry commands out; returns what they printed."""
        out = [line for command in commands for line in self.run(command)]
        self.said += out
        return out

    @property
    def settled(self) -> list[tuple[str, ...]]:
        """(node, owner, verdict) of every settlement so far."""
        words = (line.split() for line in self.said)
        return [(line[0], line[2], line[3]) for line in words if line[1] == "SETTLED"]

    def count(self, kind: str) -> int:
        """How many messages of a kind were sent."""
        return sum(1 for line in self.said if line.split()[1:3] == ["sends", kind])

    def calm(self, rounds: int = 400) -> None:
        """Let messages, posts and timers go on until both sides have nothing to wait for but to forget."""
        for _ in range(rounds):
            self.play("deliver", "ops P done", "ops D done", "wait 0.5")
            if not self.flying and all(self.quiet(name) for name in self.nodes):
                return

    def silence(self, seconds: int) -> None:
        """No message arrives any more; transports go on, and end what a node hangs up on."""
        for _ in range(2 * seconds):
            self.flying = [
                (kind, to, event) for kind, to, event in self.flying if kind in ("Connected", "Disconnected")
            ]
            for line in self.play("deliver", "wait 0.5"):
                if line.endswith("hangs up"):
                    self.play(f"ops {line[0]} failed")

    def quiet(self, name: str) -> bool:
        """Whether a node's transfers are over."""
        return all(t.state.name in ("FREED", "CLOSED") for t in self.nodes[name].core.transfers.values())

    def begin(self, name: str = "t") -> None:
        """A prompt of two blocks: D has its blocks, and P has computed it and handed it over."""
        self.play(f"P start {name} goal=2", f"D load {name} 7,8 remote=10,11", *self.prefill(name))

    def prefill(self, name: str = "t") -> list[str]:
        """What vLLM does on P, once the request is admitted."""
        return [f"P progress {name} 0 2 4", f"P finish {name}"] if self.mode is Mode.WRITE else [f"P finish {name}"]

    def works(self, name: str) -> None:
        """The next request is right."""
        self.begin(name)
        self.calm()
        assert {("P", f"req-{name}", "done"), ("D", f"req-{name}", "done")} <= set(self.settled)

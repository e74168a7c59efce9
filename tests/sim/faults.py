"""Carries a schedule of faults out on a world.  Each fault heals by itself; `heal` ends all that are left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moriio_proto.testing.network import NetworkFaults
from moriio_proto.testing.schedule import Fault
from moriio_transport.testing import TransportFaults
from tests.sim.plan import NETWORK_KINDS, POST_KINDS

if TYPE_CHECKING:
    from tests.sim.world import World

__all__ = ["Nemesis"]


class Nemesis:
    """Who makes things go wrong."""

    def __init__(self, world: World, faults: Sequence[Fault]) -> None:
        self.counts: Counter[str] = Counter()
        self._world = world
        self._active: list[Fault] = []
        for fault in faults:
            world.queue.at(fault.at, lambda fault=fault: self._begin(fault))  # type: ignore[misc]

    def _begin(self, fault: Fault) -> None:
        self.counts[f"fault {fault.kind} (times)"] += 1
        self._world.note("fault", fault)
        self._active.append(fault)
        self._world.queue.after(fault.seconds, lambda: self._end(fault))
        one_shot = getattr(self, f"_begin_{fault.kind}", None)
        if one_shot is not None:
            one_shot(fault)
        self.refresh()

    def _end(self, fault: Fault) -> None:
        if fault not in self._active:
            return
        self._active.remove(fault)
        self._world.note("healed", fault)
        one_shot = getattr(self, f"_end_{fault.kind}", None)
        if one_shot is not None:
            one_shot(fault)
        self.refresh()

    def heal(self) -> None:
        """End everything."""
        for fault in list(self._active):
            self._end(fault)

    def refresh(self) -> None:
        """Set what is a number: the worst of the active faults counts."""
        for kind in NETWORK_KINDS:
            setattr(self._world.network.faults, kind, self._amount(kind, ""))
        for name, node in self._world.nodes.items():
            for kind in POST_KINDS:
                setattr(node.transport.faults, kind, self._amount(kind, name))
            node.engine.resets = self._amount("reset", name)
            node.step_seconds = max(0.01, self._amount("slow", name))

    def _amount(self, kind: str, name: str) -> float:
        return max((f.amount for f in self._active if f.kind == kind and name in {"", f.node}), default=0.0)

    # --- what has a beginning and an end --------------------------------------------------------------------------

    def _begin_partition(self, fault: Fault) -> None:
        self._world.network.cut(fault.node, fault.peer)
        self._world.network.cut(fault.peer, fault.node)

    def _end_partition(self, fault: Fault) -> None:
        self._world.network.mend(fault.node, fault.peer)
        self._world.network.mend(fault.peer, fault.node)

    def _begin_one_way(self, fault: Fault) -> None:
        self._world.network.cut(fault.node, fault.peer)

    def _end_one_way(self, fault: Fault) -> None:
        self._world.network.mend(fault.node, fault.peer)

    def _begin_stop(self, fault: Fault) -> None:
        self._world.nodes[fault.node].stop()

    def _end_stop(self, fault: Fault) -> None:
        if not any(f.kind == "stop" and f.node == fault.node for f in self._active):
            self._world.nodes[fault.node].resume()

    def _begin_kill(self, fault: Fault) -> None:
        node = self._world.nodes[fault.node]
        if node.alive:
            node.die()

    def _end_kill(self, fault: Fault) -> None:
        if not self._world.nodes[fault.node].alive:
            self._world.start_node(fault.node)

    def _begin_break(self, fault: Fault) -> None:
        node, peer = self._world.nodes[fault.node], self._world.nodes[fault.peer]
        if node.alive and peer.alive:
            self._world.fabric.break_sessions(node.key, peer.key)


assert set(NETWORK_KINDS) <= set(NetworkFaults.__slots__)
assert set(POST_KINDS) <= set(TransportFaults.__slots__)

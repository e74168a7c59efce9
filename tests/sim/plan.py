"""What happens in a run, as data drawn from its seed: the options, the clients' jobs and the faults."""

from __future__ import annotations

import random

import attrs

from moriio_proto.core import Timing
from moriio_proto.testing.schedule import Fault
from moriio_proto.wire.messages import Mode

__all__ = ["FAULT_KINDS", "Job", "Options", "make_faults", "make_jobs", "make_options"]

NETWORK_KINDS = ("loss", "duplicate", "truncate", "delay")
POST_KINDS = ("refuse", "fail", "late", "hang", "wedge", "unconnected")
FAULT_KINDS = (*NETWORK_KINDS, *POST_KINDS, "partition", "one_way", "stop", "kill", "break", "slow", "reset")
WORLD_SECONDS = 120.0  # of the safety phase; faults and jobs lie in it


@attrs.frozen
class Options:
    """What is fixed for a run."""

    mode: Mode
    recompute: bool  # kv_load_failure_policy
    prefills: int = 2
    decodes: int = 3
    blocks: int = 64  # of each node's pool
    rates: tuple[float, float] = (0.97, 1.03)  # the slowest and the fastest clock
    timing: Timing = attrs.field(factory=Timing)


@attrs.frozen
class Job:
    """One client's request, and what the router and the client do with it."""

    at: float
    name: str
    prompt: tuple[int, ...]
    max_tokens: int
    prefill: str
    decode: str
    kind: str = "both"  # both, plain, p_only, d_only, wrong_d, wrong_p
    leaves_after: float | None = None  # the client goes away, seconds
    retry_after: float | None = None  # the router sends again with the same transfer id
    retry_kind: str = "both"  # both, or d_only: the answer of P is used twice


def make_options(seed: int) -> Options:
    """Mode, policy and sizes."""
    rng = random.Random(f"{seed}/options")
    timing = Timing(transfer_timeout=rng.choice([5.0, 30.0]), recv_abort_timeout=rng.choice([20.0, 120.0]))
    return Options(
        mode=rng.choice(list(Mode)), recompute=rng.random() < 0.7, prefills=rng.randint(1, 3),
        decodes=rng.randint(1, 3), blocks=rng.choice([40, 64, 128]), timing=timing,
    )  # fmt: skip


def make_jobs(seed: int, options: Options, count: int) -> list[Job]:
    """Requests with shared prefixes, in bursts; one in five has something wrong with it."""
    rng = random.Random(f"{seed}/jobs")
    families = [[rng.getrandbits(16) for _ in range(60)] for _ in range(4)]
    jobs = []
    for n in range(count):
        shared = rng.choice(families)[: rng.choice([0, 0, 4, 8, 15, 24])]
        tail = [rng.getrandbits(16) for _ in range(rng.choice([1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 30]))]
        kind = rng.choice(["plain", "p_only", "d_only", "wrong_d", "wrong_p"]) if rng.random() < 0.1 else "both"
        jobs.append(
            Job(
                at=rng.choice([rng.uniform(0, WORLD_SECONDS), 10 * rng.randrange(12) + rng.random()]),
                name=f"t{n}",
                prompt=tuple(shared + tail),
                max_tokens=rng.choice([1, 2, 4, 8]),
                prefill=f"p{rng.randrange(options.prefills)}",
                decode=f"d{rng.randrange(options.decodes)}",
                kind=kind,
                leaves_after=rng.choice([0.0, rng.uniform(0, 0.05), rng.uniform(0, 8)]) if rng.random() < 0.1 else None,
                retry_after=rng.choice([0.0, rng.uniform(0, 0.1), rng.uniform(0, 40)]) if rng.random() < 0.05 else None,
                retry_kind=rng.choice(["both", "d_only"]),
            )
        )  # fmt: skip
    return sorted(jobs, key=lambda job: job.at)


def make_faults(seed: int, options: Options) -> list[Fault]:
    """A few kinds per run (so that runs differ), each a few times."""
    rng = random.Random(f"{seed}/faults")
    prefills, decodes = (
        [f"{side}{i}" for i in range(n)] for side, n in (("p", options.prefills), ("d", options.decodes))
    )
    faults = []
    for kind in sorted(rng.sample(FAULT_KINDS, rng.randint(1, 7))):
        for _ in range(rng.randint(1, 4)):
            seconds = rng.choice([rng.uniform(0.1, 2), rng.uniform(2, 15), rng.uniform(15, 60)])
            amount = rng.choice([0.05, 0.3, 0.8]) if kind != "slow" else rng.uniform(1, 15)
            node, peer = rng.choice(prefills), rng.choice(decodes)
            if options.mode is Mode.READ if kind in POST_KINDS else rng.random() < 0.5:
                node, peer = peer, node
            when = rng.choice([rng.uniform(0, WORLD_SECONDS - 5), 10 * rng.randrange(11) + rng.random()])
            faults.append(Fault(when, kind, seconds, node, peer, amount))
    for _ in range(rng.choice([0, 1, 1, 2])):
        faults += _storm(rng, options, rng.choice(prefills), rng.choice(decodes))
    return sorted(faults)


def _storm(rng: random.Random, options: Options, prefill: str, decode: str) -> list[Fault]:
    """Copies that are slow, and then the two sides hear nothing of each other for longer than a lease.

    That is when leases alone protect the blocks; single faults at random meet in this way too seldom.
    """
    accessor, owner = (prefill, decode) if options.mode is Mode.WRITE else (decode, prefill)
    at = 10 * rng.randrange(9) + rng.uniform(-0.5, 0.5)
    faults = [Fault(max(0.0, at), "late", rng.uniform(1, 4), accessor, owner, 0.9)]
    if rng.random() < 0.5:
        faults.append(Fault(max(0.0, at), "delay", rng.uniform(1, 4), accessor, owner, 0.5))
    if rng.random() < 0.3:
        faults.append(Fault(max(0.0, at), "reset", rng.uniform(0.5, 3), prefill, decode, 0.3))
        faults.append(Fault(max(0.0, at), "slow", 4.0, prefill, decode, 0.1))  # so that it meets prompts half computed
    silence, node, peer = rng.choice(
        [
            ("stop", accessor, owner),
            ("partition", accessor, owner),
            ("one_way", owner, accessor),
            ("slow", owner, accessor),
        ]
    )
    return [*faults, Fault(max(0.0, at) + rng.uniform(0, 4), silence, rng.uniform(11, 30), node, peer, 5.0)]

"""The schedule says which processes are killed and stopped, and when: it is a pure function of the seed.

    wave: faults over some seconds --> the cluster mends itself --> quiet --> the next wave

In each wave one rank of each role and one router are left alone: while they stand no client has a right to an
error but the one whose router was killed. etcd's members are not spared: without a majority of them a cluster
goes on with what it knows. No rank's file of --kv-tier is spared either: without it, it computes.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

WAVE_S = 30.0
QUIET_S = 12.0
MEAN_PAUSE_S = 2.5  # between two faults
# A stop is short, or longer than some of those who wait for it bear: 5 s for a decode rank's silence, 15 s
# for the lease of a writer and its fence, 20 to 30 s for gRPC's keepalive.
_STOPS_S = ((0.05, 1.0), (1.0, 6.0), (6.0, 20.0), (25.0, 40.0))
_STOP_WEIGHTS = (4, 4, 3, 1)
_START_AGAIN_S = (0.2, 3.0)  # for Kubernetes to start what was killed
_UNDRAINED_AFTER_S = (0.2, 15.0)  # in the middle of its hand-over, or long after it


class Kind(StrEnum):
    KILL = "kill"
    STOP = "stop"
    DRAIN = "drain"  # others take over what it has cached; then it is put back into service
    TERMINATE = "terminate"  # as Kubernetes ends a pod, which hands over, too
    FLIP = "flip"  # some bytes
    CUT = "cut"
    REMOVE = "remove"


class Target(StrEnum):
    PREFILL_RANK = "prefill rank"
    DECODE_RANK = "decode rank"
    SUPERVISOR = "supervisor"
    ROUTER = "router"
    ETCD = "etcd member"
    TIER = "tier's file"


_FAULTY = (Kind.KILL, Kind.STOP)
KINDS: dict[Target, tuple[Kind, ...]] = {
    Target.PREFILL_RANK: (*_FAULTY, Kind.DRAIN),
    Target.DECODE_RANK: (*_FAULTY, Kind.DRAIN),
    Target.SUPERVISOR: (*_FAULTY, Kind.TERMINATE),
    Target.ROUTER: _FAULTY,
    Target.ETCD: _FAULTY,
    Target.TIER: (Kind.FLIP, Kind.CUT, Kind.REMOVE),
}
_TARGET_WEIGHTS = {
    Target.PREFILL_RANK: 6,
    Target.DECODE_RANK: 6,
    Target.SUPERVISOR: 3,
    Target.ROUTER: 2,
    Target.ETCD: 3,
    Target.TIER: 3,
}


TIER_OF = "tier of "


@dataclass(frozen=True, slots=True)
class Layout:
    prefill_workers: int
    prefill_dp_size: int
    decode_workers: int
    decode_dp_size: int
    routers: int
    members: int

    def __post_init__(self) -> None:
        ranks = self.prefill_workers * self.prefill_dp_size, self.decode_workers * self.decode_dp_size
        if min(*ranks, self.routers) < 2 or min(self.prefill_workers, self.decode_workers) < 2:
            raise ValueError(f"what is killed needs another one beside it: {self}")


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """`lasts_s`: until a stopped process goes on, a drained rank is put back into service, or somebody starts
    again what was killed. A rank is started by its supervisor, at once."""

    at_s: float  # after the wave's beginning
    kind: Kind
    target: Target
    name: str  # prefill-0/0, decode-1, router-1, etcd-2, tier of decode-0/1
    lasts_s: float


@dataclass(frozen=True, slots=True)
class Wave:
    faults: tuple[Fault, ...]  # in the order of their times
    spared: frozenset[str]


def waves(seed: int, layout: Layout, wave_s: float = WAVE_S) -> Iterator[Wave]:
    """Yield waves without end, the same for the same seed and layout, however long each takes."""
    index = 0
    while True:
        yield _wave(random.Random(f"{seed}:{index}"), layout, wave_s)
        index += 1


def _wave(rng: random.Random, layout: Layout, wave_s: float) -> Wave:
    spared = _spared(rng, layout)
    choices = {target: sorted(names) for target, names in _names(layout, spared).items()}
    faults: list[Fault] = []
    at_s = rng.expovariate(1 / MEAN_PAUSE_S)
    while at_s < wave_s or not faults:
        faults.append(_fault(rng, at_s, choices))
        at_s += rng.expovariate(1 / MEAN_PAUSE_S)
    return Wave(tuple(faults), spared)


def _fault(rng: random.Random, at_s: float, choices: dict[Target, list[str]]) -> Fault:
    targets = [target for target in Target if choices[target]]
    (target,) = rng.choices(targets, [_TARGET_WEIGHTS[target] for target in targets])
    kind = rng.choice(KINDS[target])
    name = rng.choice(choices[target])
    return Fault(at_s, kind, target, name, _lasts_s(rng, kind, target))


def _lasts_s(rng: random.Random, kind: Kind, target: Target) -> float:
    if kind is Kind.STOP:
        return rng.uniform(*rng.choices(_STOPS_S, _STOP_WEIGHTS)[0])
    if kind is Kind.DRAIN:
        return rng.uniform(*_UNDRAINED_AFTER_S)
    is_nothing_to_start = target in (Target.PREFILL_RANK, Target.DECODE_RANK, Target.TIER)
    return 0.0 if is_nothing_to_start else rng.uniform(*_START_AGAIN_S)


def _spared(rng: random.Random, layout: Layout) -> frozenset[str]:
    """Return a rank of each role, its supervisor, and a router."""
    prefill = f"prefill-{rng.randrange(layout.prefill_workers)}"
    decode = f"decode-{rng.randrange(layout.decode_workers)}"
    ranks = (
        f"{prefill}/{rng.randrange(layout.prefill_dp_size)}",
        f"{decode}/{rng.randrange(layout.decode_dp_size)}",
    )
    return frozenset({prefill, decode, *ranks, f"router-{rng.randrange(layout.routers)}"})


def _names(layout: Layout, spared: frozenset[str]) -> dict[Target, set[str]]:
    prefill = {f"prefill-{number}" for number in range(layout.prefill_workers)}
    decode = {f"decode-{number}" for number in range(layout.decode_workers)}
    prefill_ranks = {f"{worker}/{i}" for worker in prefill for i in range(layout.prefill_dp_size)}
    decode_ranks = {f"{worker}/{i}" for worker in decode for i in range(layout.decode_dp_size)}
    return {
        Target.PREFILL_RANK: prefill_ranks - spared,
        Target.DECODE_RANK: decode_ranks - spared,
        Target.SUPERVISOR: (prefill | decode) - spared,
        Target.ROUTER: {f"router-{number}" for number in range(layout.routers)} - spared,
        Target.ETCD: {f"etcd-{number}" for number in range(layout.members)},
        Target.TIER: {f"{TIER_OF}{rank}" for rank in prefill_ranks | decode_ranks},
    }

"""A placer with what it knows of its ranks: what they hold and how much waits there."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from services.index.read.prefix_index import PrefixIndex
from services.router.placement.candidates import Asked
from services.router.placement.placer import Placer, PlacerSettings
from services.router.placement.price import PriceWeights
from services.router.ranks.balance import Balance
from services.values.kv import BlockHash, GroupKind, KvGroup, KvLayout, PageBooks
from services.values.rank import Generation, Plan, RankAddress, RankId, RankKey, Role
from services.values.rank_reports import RankLoad, Registration
from services.values.request import Admitted, Pulled

BLOCK = 64
HASHES = [BlockHash(number) for number in range(1, 41)]
LAYOUT = KvLayout(page_size=BLOCK, page_bytes=1 << 20, model_fingerprint=1)
STATE_BYTES = 62 << 20
HYBRID = replace(
    LAYOUT,
    page_bytes=BLOCK * 20 << 10,
    groups=(
        KvGroup(GroupKind.FULL_ATTENTION, (3,), 2, 256, "bfloat16"),
        KvGroup(GroupKind.RECURRENT, (0, 1, 2), 0, 0, "bfloat16", unit_bytes=STATE_BYTES),
    ),
)
ROOMY = PageBooks(total=10_000, free=5_000, cached=5_000, locked=0, private=0, quarantined=0)
BOTH = frozenset(Plan)
NO_SLACK = PriceWeights(slack_ratio=0.0, slack_s=0.0)
REMOTE = frozenset({Plan.REMOTE})


def registration(
    role: Role, index: int, layout: KvLayout = LAYOUT, capabilities: tuple[str, ...] = ()
) -> Registration:
    rank = RankId(role.value, index, Generation(1))
    address = RankAddress(rank, "host:1")
    return Registration(role, address, layout, "m", 100_000, 10_000, "fake", capabilities=capabilities)


class Router:
    """A placer and what it stands on. `held` and `waiting` are of each rank: blocks of HASHES, tokens."""

    def __init__(
        self,
        decodes: int,
        prefills: int,
        weights: PriceWeights = NO_SLACK,
        layout: KvLayout = LAYOUT,
        capabilities: tuple[str, ...] = (),
        pulls: bool = True,
    ) -> None:
        self.now = 100.0
        self.index, self.below = PrefixIndex(), PrefixIndex()
        self.balance = Balance(lambda: self.now)
        self.records: Counter[RankKey] = Counter()
        self.placer = Placer(
            PlacerSettings(BLOCK, 512, weights, pulls),
            self.index,
            self.balance,
            self.records.__getitem__,
            lambda rank: True,
            self.below,
        )
        self.decodes, self.prefills = (
            [registration(role, i, layout, capabilities) for i in range(number)]
            for role, number in ((Role.DECODE, decodes), (Role.PREFILL, prefills))
        )
        self.placer.set_ranks(self.decodes, self.prefills)
        for rank in (*self.decodes, *self.prefills):
            self.holds(rank, 0)
            self.waits(rank, 0)
        self.now += 1

    def holds(self, rank: Registration, num_blocks: int, *resumable: int) -> None:
        """`resumable`: how many of them lie before where it can go on, each."""
        self.index.apply_snapshot(rank.id, HASHES[:num_blocks], [HASHES[depth - 1] for depth in resumable])

    def keeps(
        self, rank: Registration, num_blocks: int, files: Sequence[int] = (), resumable: Sequence[int] = ()
    ) -> None:
        """Its tiers hold so many; `files` are positions of those in files. `resumable` as in `holds`."""
        points = [HASHES[depth - 1] for depth in resumable]
        self.below.apply_snapshot(rank.id, HASHES[:num_blocks], points, [HASHES[at] for at in files])

    def share(self, groups: Sequence[str]) -> None:
        """The decode ranks that say the same, and not "", read each other's files."""
        pairs = zip(self.decodes, groups, strict=True)
        self.decodes = [replace(rank, shared_files=group) for rank, group in pairs]
        self.placer.set_ranks(self.decodes, self.prefills)

    def waits(self, rank: Registration, tokens: int, **load: object) -> None:
        load = {"books": ROOMY, "step_s": 0.01, "prefill_tokens_per_s": 10_000.0, **load}
        self.balance.report(rank.id.key, RankLoad(pending_tokens=tokens, **load))

    def all_but(self, *ranks: Registration) -> frozenset[RankId]:
        return frozenset(rank.id for rank in (*self.decodes, *self.prefills) if rank not in ranks)

    def place(self, num_blocks: int = 40, **changes):
        return self.placer.place(self.asked(num_blocks, **changes), 0.5)

    def asked(self, num_blocks: int = 40, **changes) -> Asked:
        asked = Asked(chains(num_blocks), num_blocks * BLOCK + 7, BOTH)
        return replace(asked, **changes)


def chains(num_blocks: int = 40) -> list[BlockHash]:
    return HASHES[:num_blocks]


def admitted(
    decode_prefix_len: int,
    prefill_prefix_len: int = 0,
    plan: Plan = Plan.LOCAL,
    pulled: Pulled | None = None,
) -> Admitted:
    prefixes, rest = (decode_prefix_len, prefill_prefix_len), (100, 0, 0, 0.0, 0.0, 0.01, 0.0)
    return Admitted(2_567, *prefixes, *rest, plan, pulled=pulled)


def of_other_layout(ranks: list[Registration], num: int) -> list[Registration]:
    """The first ones with pages of another size."""
    layout = replace(LAYOUT, page_bytes=1 << 19)
    return [replace(rank, layout=layout) for rank in ranks[:num]] + ranks[num:]

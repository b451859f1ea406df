"""Plan remote goes by one of the KV layouts in a cluster. Pure."""

from collections import Counter
from collections.abc import Container, Iterable
from dataclasses import replace

from services.values.kv import KvLayout
from services.values.rank import RankKey
from services.values.registration import Registration


def common_layout(
    decodes: Iterable[Registration], prefills: Iterable[Registration], draining: Container[RankKey] = ()
) -> KvLayout | None:
    """Return the layout of the most pairs of a decode and a prefill rank; without pairs, of the most decode
    ranks.

    So the first ranks that a roll-out reaches stay out of plan remote, until it can do more with them than
    with the others. Nor do those count that are `draining`, unless all decode ranks are. TP degrees and draft
    models do not count. None: there is no decode rank.
    """
    staying = [rank for rank in decodes if rank.id.key not in draining]
    if staying:
        decodes, prefills = staying, [rank for rank in prefills if rank.id.key not in draining]
    receivers, senders = (
        Counter(replace(rank.layout, tp_size=1, draft=None) for rank in ranks)
        for ranks in (decodes, prefills)
    )

    def pairs(layout: KvLayout) -> tuple[int, int]:
        return receivers[layout] * senders[layout], receivers[layout]

    return max(receivers, key=pairs, default=None)

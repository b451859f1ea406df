"""Of the KV layouts in a cluster, the one that plan remote goes by. Pure."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from services.index.registry import Registration
from services.kv.types import KvLayout


def common_layout(decodes: Sequence[Registration], prefills: Sequence[Registration]) -> KvLayout | None:
    """Of the most pairs of a decode and a prefill rank that speak the same version of the handshake; where
    there are none, of the most decode ranks.

    So the first ranks that a roll-out reaches stay out of plan remote, until it can do more with them than
    with the others. TP degrees do not count. None: there is no decode rank.
    """
    receivers, senders = (
        Counter((replace(rank.layout, tp_size=1), rank.handshake_version) for rank in ranks)
        for ranks in (decodes, prefills)
    )
    pairs, receiving = Counter[KvLayout](), Counter[KvLayout]()
    for kind, number in receivers.items():
        pairs[kind[0]] += number * senders[kind]
        receiving[kind[0]] += number
    return max(receiving, key=lambda layout: (pairs[layout], receiving[layout]), default=None)

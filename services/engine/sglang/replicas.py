"""Whose writes are counted where several processes of a rank hold the same head of the KV. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TpPlace:
    """A process among those of its DP rank that share the attention heads."""

    rank: int
    size: int


def is_counted(num_kv_heads: int, writer: TpPlace, reader: TpPlace) -> bool:
    """Of the writes that carry one and the same head, the first one is; `num_kv_heads`: of the whole model.

    With more processes than heads SGLang gives each process one, so neighbours hold the same, and each of
    them is written. The latent of MLA is one head, which every process holds.
    """
    wider = writer if writer.size >= reader.size else reader
    replicas = max(1, wider.size // num_kv_heads)
    return wider.rank % replicas == 0

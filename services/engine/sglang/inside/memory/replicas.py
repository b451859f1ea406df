"""Several processes of a rank hold the same head of the KV: this says whose writes are counted, and which
pairs of ranks are refused. All is pure."""

from dataclasses import dataclass

from services.values.errors import ProtocolError
from services.values.kv import DraftKv, GroupKind, KvLayout


@dataclass(frozen=True, slots=True)
class TpPlace:
    rank: int
    size: int


def is_counted(num_kv_heads: int, writer: TpPlace, reader: TpPlace) -> bool:
    """Return whether this is the first of the writes that carry one and the same head.

    `num_kv_heads` is the whole model's. With more processes than heads SGLang gives each process one, so
    neighbours hold the same, and each of them is written. The latent of MLA is one head, which every process
    holds.
    """
    wider = writer if writer.size >= reader.size else reader
    replicas = max(1, wider.size // num_kv_heads)
    return wider.rank % replicas == 0


def check_drafts(prefill: KvLayout, decode: KvLayout) -> None:
    """Raise ProtocolError for a pair between which SGLang fails every transfer, or writes a draft's KV into
    another's.

    It sends what prefill has, by position. Decode may have a draft alone.
    """
    if prefill.draft is None:
        return
    if decode.draft is None:
        raise ProtocolError(
            "prefill speculates and decode does not: the draft's KV that SGLang sends has no place there"
        )
    if prefill.draft != decode.draft:
        both = f"{_said(prefill.draft)}; {_said(decode.draft)}"
        raise ProtocolError(f"prefill and decode speculate with different drafts: {both}")


def _said(draft: DraftKv) -> str:
    group = draft.group
    return (
        f"{draft.model_fingerprint:016x} with {len(group.layer_ids)} layers, {group.num_kv_heads} heads of "
        f"{group.head_dim} in {group.dtype}, {group.unit_bytes} bytes a page"
    )


def check_tensor_parallel(prefill: KvLayout, decode: KvLayout) -> None:
    """Raise ProtocolError for a pair between which SGLang 0.5.23 writes KV that is wrong, without an error.

    It was seen at TP 2:1 of a model with one KV head, where decode's greedy output was not the model's.
    """
    attention = [group.num_kv_heads for group in prefill.groups if group.kind is not GroupKind.RECURRENT]
    heads = min(attention, default=prefill.tp_size)
    if prefill.tp_size > max(heads, decode.tp_size):
        raise ProtocolError(
            f"prefill has {heads} KV heads over {prefill.tp_size} processes, decode over {decode.tp_size}: "
            f"a wider prefill can have no more than {heads}"
        )

"""Every head of the KV is counted once, however many processes hold it."""

from collections import Counter

import pytest

from services.engine.sglang.inside.process_memory import TpPlace, check_tensor_parallel, is_counted
from services.values.errors import ProtocolError
from services.values.kv import GroupKind, KvGroup, KvLayout

SIZES = (1, 2, 4, 8)


def heads_of(place, num_kv_heads):
    """As SGLang shards them (ModelConfig.get_num_kv_heads): a share each, or one where there are too few."""
    if place.size <= num_kv_heads:
        share = num_kv_heads // place.size
        return set(range(place.rank * share, (place.rank + 1) * share))
    return {place.rank // (place.size // num_kv_heads)}


def pairs(prefill_size, decode_size, is_mla):
    """Who writes to whom (CommonKVManager._resolve_rank_mapping); with MLA one writer is enough."""
    for rank in range(decode_size):
        reader = TpPlace(rank, decode_size)
        if decode_size >= prefill_size:
            yield TpPlace(rank // (decode_size // prefill_size), prefill_size), reader
            continue
        wider = prefill_size // decode_size
        for number in range(1 if is_mla else wider):
            yield TpPlace(rank * wider + number, prefill_size), reader


def test_each_head_is_counted_once(subtests):
    for decode_size in SIZES:
        for prefill_size in SIZES:
            for num_kv_heads in [*SIZES, "MLA"]:
                with subtests.test(
                    decode_size=decode_size, prefill_size=prefill_size, num_kv_heads=num_kv_heads
                ):
                    is_mla = num_kv_heads == "MLA"
                    heads = 1 if is_mla else num_kv_heads
                    counted = Counter(
                        head
                        for writer, reader in pairs(prefill_size, decode_size, is_mla)
                        if is_counted(heads, writer, reader)
                        for head in heads_of(writer, heads) & heads_of(reader, heads)
                    )
                    assert counted == Counter(range(heads))


def test_sides_of_different_widths_pair_where_no_head_is_shared(subtests):
    for num_kv_heads, prefill_size, decode_size, works in [
        *[(8, prefill, decode, True) for prefill in SIZES for decode in SIZES],
        *[(1, prefill, decode, prefill <= decode) for prefill in SIZES for decode in SIZES],
        (4, 8, 4, False),
        (4, 4, 2, True),
        (4, 8, 8, True),
    ]:
        with subtests.test(
            num_kv_heads=num_kv_heads, prefill_size=prefill_size, decode_size=decode_size, works=works
        ):
            group = KvGroup(GroupKind.FULL_ATTENTION, (0,), num_kv_heads, 8, "float32")
            prefill, decode = (KvLayout(16, 4096, 7, size, (group,)) for size in (prefill_size, decode_size))
            if works:
                check_tensor_parallel(prefill, decode)
            else:
                with pytest.raises(ProtocolError):
                    check_tensor_parallel(prefill, decode)
    with subtests.test("a state has no heads to share"):
        attention = KvGroup(GroupKind.FULL_ATTENTION, (0,), 8, 8, "float32")
        state = KvGroup(GroupKind.RECURRENT, (1,), 0, 0, "float32", unit_bytes=64)
        prefill, decode = (KvLayout(16, 4096, 7, size, (attention, state)) for size in (4, 1))
        check_tensor_parallel(prefill, decode)

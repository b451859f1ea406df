from dataclasses import replace

from services.kv.tiers.tier_keys import ROOT, keys_of, next_key, scope
from services.values.kv import GroupKind, KvGroup, KvLayout

LAYOUT = KvLayout(4, 64, 7, groups=(KvGroup(GroupKind.FULL_ATTENTION, (0, 1), 2, 4, "float32"),))


def test_a_key_stands_for_the_whole_prefix_and_all_that_its_kv_depends_on():
    group = LAYOUT.groups[0]
    scopes = [
        scope(LAYOUT, 8, ""),
        scope(LAYOUT, 8, "salt"),
        scope(LAYOUT, 16, ""),
        *(
            scope(replace(LAYOUT, **change), 8, "")
            for change in (
                {"page_bytes": 65},
                {"model_fingerprint": 8},
                {"tp_size": 2},
                {"handshake_version": 9},
                {"groups": (replace(group, dtype="float16"),)},
            )
        ),
    ]
    ids = list(range(20))
    changed = [9, *ids[1:]]
    keys = [keys_of(each, ids, 8) for each in (*scopes, scopes[0])]
    assert keys[0] == keys[-1] and len({key for each in keys for key in each}) == 2 * len(scopes)
    first, second = keys_of(scopes[0], changed, 8)
    assert first not in keys[0] and second not in keys[0], "the second block is the same, its prefix is not"
    assert keys_of(scopes[0], ids[:7], 8) == []


def test_the_bytes_of_a_key_stay_as_they_are():
    assert next_key(bytes(32), ROOT, b"\0" * 32).hex() == "cdb912051a873df7229942981a70c509"

from collections import Counter
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.chaos.schedule import KINDS, TIER_OF, WAVE_S, Kind, Layout, waves

pytestmark = pytest.mark.long


layouts = st.builds(
    Layout,
    prefill_workers=st.integers(2, 3),
    prefill_dp_size=st.integers(1, 3),
    decode_workers=st.integers(2, 3),
    decode_dp_size=st.integers(1, 3),
    routers=st.integers(2, 4),
    members=st.integers(1, 3),
)
SMALL = Layout(prefill_workers=2, prefill_dp_size=1, decode_workers=2, decode_dp_size=2, routers=2, members=3)


def first(count, seed, layout=SMALL):
    return list(islice(waves(seed, layout), count))


@given(st.integers(0, 2**32), layouts)
def test_each_wave_leaves_a_rank_of_each_role_and_a_router_alone(seed, layout):
    for wave in first(3, seed, layout):
        hit = {fault.name for fault in wave.faults}
        assert not hit & wave.spared
        for role in ("prefill", "decode"):
            (rank,) = (name for name in wave.spared if name.startswith(role) and "/" in name)
            assert rank.partition("/")[0] in wave.spared  # or its supervisor's end would be its own
        assert sum(name.startswith("router") for name in wave.spared) == 1


@given(st.integers(0, 2**32), layouts)
def test_faults_come_in_order_and_within_the_wave(seed, layout):
    for wave in first(3, seed, layout):
        times = [fault.at_s for fault in wave.faults]
        assert times and times == sorted(times)
        assert all(at_s < WAVE_S for at_s in times[1:])
        assert all(fault.lasts_s > 0 for fault in wave.faults if fault.kind is Kind.STOP)


def test_schedules(subtests):
    with subtests.test("the seed says it all"):
        assert first(5, 7) == first(5, 7)
        assert first(5, 7) != first(5, 8)
        assert len({wave.faults for wave in first(5, 7)}) == 5
    with subtests.test("in the long run everything happens to everybody"):
        faults = [fault for wave in first(200, 1) for fault in wave.faults]
        counts = Counter((fault.target, fault.kind) for fault in faults)
        assert min(counts[target, kind] for target, kinds in KINDS.items() for kind in kinds) > 50
        names = {fault.name for fault in faults}
        ranks = ("prefill-0/0", "prefill-1/0", "decode-0/0", "decode-0/1", "decode-1/0", "decode-1/1")
        assert names == {
            *("prefill-0", "prefill-1", "decode-0", "decode-1", "router-0", "router-1"),
            *(*ranks, *(f"{TIER_OF}{rank}" for rank in ranks)),
            *("etcd-0", "etcd-1", "etcd-2"),
        }
        # Faults meet: the next one comes while another lasts.
        assert any(b.at_s < a.at_s + a.lasts_s for wave in first(20, 1) for a, b in pairwise(wave.faults))
    for fewer in ["prefill_workers", "decode_workers", "routers"]:
        with subtests.test("where nobody would be left there is no schedule", fewer=fewer):
            fields = dict(
                prefill_workers=2, prefill_dp_size=2, decode_workers=2, decode_dp_size=2, routers=2, members=3
            )
            with pytest.raises(ValueError, match="another one beside it"):
                Layout(**fields | {fewer: 1})

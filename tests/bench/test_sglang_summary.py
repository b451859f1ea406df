"""These tests show what bench.sglang makes of its turns."""

import pytest

from bench.sglang_load import Turn
from bench.sglang_summary import (
    Measured,
    differing,
    medians,
    nested,
    part_of,
    percentile,
    ranges,
    ratios,
    summary,
    table_rows,
)

pytestmark = pytest.mark.long


def a_turn(conversation=0, turn=0, rank="d/0", **fields):
    given = dict(prompt=[5] * 40, known_tokens=0, token_ids=[7, 8], attempts=1, ttft_s=0.5, gaps_s=[0.1])
    return Turn(conversation, turn, rank=rank, **{**given, **fields})


TURNS = [
    a_turn(0, 0, kv_bytes_moved=300),
    a_turn(0, 1, known_tokens=41, decode_prefix_len=32, kv_bytes_moved=100, ttft_s=0.1, gaps_s=[0.3]),
    a_turn(1, 0, "d/1", attempts=3, kv_bytes_moved=300, ttft_s=0.2),
    a_turn(1, 1, "d/0", known_tokens=41, kv_bytes_moved=300, ttft_s=0.3, gaps_s=[]),
]
MEASURED = Measured(TURNS, elapsed_s=4.0, cpu_s_by_part={"router": 1.0, "schedulers": 5.0}, load_average=1.5)


def test_a_summary_beside_sglang(subtests):
    with subtests.test("a summary counts what the turns say"):
        assert summary(MEASURED) == {
            "turns": 4,
            "failed_attempts": 2,
            "on_rank_share": 0.5,  # of the two later turns
            "busiest_rank_share": 0.75,
            "prompt_tokens": 160,
            "hit_tokens": 32,
            "hit_share_of_possible": 0.5,  # 41 known tokens are two full pages
            "kv_bytes_moved": 1000,
            "ttft_p50_s": 0.2,
            "ttft_p99_s": 0.5,
            "itl_p50_s": 0.1,
            "tpot_p50_s": 0.1,
            "output_tokens_per_s": 2.0,
            "elapsed_s": 4.0,
            "cpu_s": 6.0,
            "cpu_ms_per_turn": 1500.0,
            "cpu_ms_per_token": 750.0,
            "router_cpu_ms_per_turn": 250.0,
            "schedulers_cpu_ms_per_turn": 1250.0,
            "load_average": 1.5,
        }
    for share, expected in [(0.0, 1), (0.25, 1), (0.26, 2), (0.5, 2), (0.99, 4), (1.0, 4)]:
        with subtests.test(
            "a percentile is the smallest sample that covers the share", share=share, expected=expected
        ):
            assert percentile([4, 1, 3, 2], share) == expected
    for name, part in [
        ("python -m services.router --model=m", "router"),
        ("sglang::router", "router"),
        ("python -m sglang_router.launch_router --decode http://127.0.0.1:1", "router"),
        ("python -m services.decode --engine=sglang --etcd=127.0.0.1:1", "decode_service"),
        ("python -m services.prefill --engine=sglang --etcd=127.0.0.1:1", "prefill_service"),
        ("sglang::scheduler_DP1", "schedulers"),
        ("python -m sglang.launch_server --dp-size=2", "sglang_others"),
        ("sglang::data_parallel_controller", "sglang_others"),
        ("/.venv-sglang/bin/etcd --name=isthmus", "etcd"),
        ("bash", None),
    ]:
        with subtests.test("processes are known by their names", name=name, part=part):
            assert part_of(name) == part
    with subtests.test("answers are compared turn by turn"):
        others = [a_turn(0, 1, token_ids=[7, 9]), a_turn(0, 0), a_turn(1, 0)]
        assert differing(TURNS, others) == 1
    with subtests.test("ratios are ours by theirs where theirs is not nothing"):
        ours = summary(MEASURED)
        theirs = {**ours, "hit_tokens": 0, "output_tokens_per_s": 4.0}
        found = ratios(ours, theirs)
        assert found["output_tokens_per_s"] == 0.5
        assert found["kv_bytes_moved"] == found["ttft_p50_s"] == 1.0
        assert "hit_tokens" not in found and "elapsed_s" not in found
    with subtests.test("rounds come to medians and ranges"):
        rounds = [{"turns": 4, "cpu_s": cpu_s} for cpu_s in (3.0, 1.0, 2.0)]
        assert medians(rounds) == {"turns": 4, "cpu_s": 2.0}
        assert ranges(rounds) == {"cpu_s": [1.0, 3.0]}
    with subtests.test("policies are nested under their system"):
        rows = {"ours": {"a": 1}, "router/one": {"a": 2}, "router/two": {"a": 3}}
        assert nested(rows) == {"ours": {"a": 1}, "router": {"one": {"a": 2}, "two": {"a": 3}}}
    with subtests.test("the table has a line for each system"):
        lines = table_rows({"ours": summary(MEASURED), "router/one": summary(MEASURED)})
        assert [line["system"] for line in lines] == ["ours", "router/one"]
        assert {"failed_attempts", "on_rank_share", "cpu_s", "output_tokens_per_s"} <= set(lines[0])

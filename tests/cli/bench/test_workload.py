"""Workloads are functions of their settings and the seed."""

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.bench import workload
from services.cli.bench.workload import Chance, Traced, count_lines, read_trace
from services.values.errors import ConfigError

pytestmark = pytest.mark.long

VOCAB_SIZE = 300
chances = st.builds(Chance, st.integers(0, 2**40), st.just(VOCAB_SIZE))


@given(chances, st.integers(1, 4), st.integers(1, 3), st.integers(1, 40), st.floats(0, 1))
def test_conversations(chance, count, num_turns, most, range_ratio):
    made = list(workload.conversations(chance, count, num_turns, most, 7, range_ratio))
    assert made == list(workload.conversations(chance, count, num_turns, most, 7, range_ratio))
    assert [len(session.turns) for session in made] == [num_turns] * count
    for turn in (turn for session in made for turn in session.turns):
        assert max(1, int(most * range_ratio)) <= len(turn.token_ids) <= most and 1 <= turn.output_len <= 7
        assert all(0 <= token < VOCAB_SIZE for token in turn.token_ids)


@given(chances, st.integers(1, 4), st.integers(1, 4))
def test_groups_share_their_prefix_and_nothing_else(chance, groups, prompts):
    made = list(workload.shared_prefixes(chance, groups, prompts, 30, 20, 5))
    assert sorted(int(session.name) for session in made) == list(range(groups * prompts))
    by_group = {}
    for session in made:
        (turn,) = session.turns
        assert len(turn.token_ids) == 50 and turn.output_len == 5
        by_group.setdefault(int(session.name) // prompts, []).append(turn.token_ids)
    prefixes = {group: {tuple(ids[:30]) for ids in asked} for group, asked in by_group.items()}
    assert all(len(each) == 1 for each in prefixes.values())
    assert len(set.union(*prefixes.values())) == groups
    assert len({tuple(ids[30:]) for asked in by_group.values() for ids in asked}) == groups * prompts


@given(chances, st.floats(0.1, 100))
def test_arrivals(chance, rate):
    sessions = list(workload.conversations(chance, 20, 1, 5, 5))
    arrived = list(workload.arriving(chance, sessions, rate))
    assert arrived[0].at_s == 0 and [each.turns for each in arrived] == [each.turns for each in sessions]
    assert all(before.at_s < after.at_s for before, after in pairwise(arrived))


def test_seeds_traces_and_rates(subtests):
    with subtests.test("another seed asks something else"):
        first, second = (
            list(workload.conversations(Chance(seed, VOCAB_SIZE), 3, 1, 20, 5)) for seed in (1, 2)
        )
        prompts = [tuple(session.turns[0].token_ids) for session in first + second]
        assert len(set(prompts)) == 6 and {len(prompt) for prompt in prompts} == {20}
    with subtests.test("a load of more begins with that of less"):
        few, many = (list(workload.conversations(Chance(1, VOCAB_SIZE), n, 1, 20, 5)) for n in (3, 6))
        assert many[:3] == few
    with subtests.test("a trace"):
        lines = [Traced(500, 1300, 10, (7, 8, 9)), Traced(1500, 1300, 20, (7, 8, 3)), Traced(1500, 60, 1, ())]
        first, second, third = workload.replayed(Chance(1, VOCAB_SIZE), lines, slowdown=2.0, scale=0.1)
        assert [session.at_s for session in (first, second, third)] == [0.0, 2.0, 2.0]
        prompts = [session.turns[0].token_ids for session in (first, second, third)]
        assert [len(prompt) for prompt in prompts] == [130, 130, 6]
        assert [session.turns[0].output_len for session in (first, second, third)] == [1, 2, 1]
        assert prompts[0][:102] == prompts[1][:102], "two blocks of 51 tokens have the same names"
        assert prompts[0][102:] != prompts[1][102:]
    with subtests.test("arrivals are of the rate"):
        sessions = list(workload.conversations(Chance(1, VOCAB_SIZE), 2000, 1, 1, 1))
        *_, last = workload.arriving(Chance(1, VOCAB_SIZE), sessions, 50.0)
        assert last.at_s == pytest.approx(2000 / 50, rel=0.1)


LINE = {"timestamp": 0, "input_length": 700, "output_length": 5, "hash_ids": [1, 2]}


def written(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_a_trace_is_read_and_a_wrong_line_named(subtests, tmp_path_factory):
    with subtests.test("lines are read as far as wanted"):
        tmp_path = tmp_path_factory.mktemp("case")
        path = written(tmp_path, LINE, "", LINE | {"timestamp": 7.5}, "not read")
        assert list(read_trace(path, 2)) == [Traced(0, 700, 5, [1, 2]), Traced(7.5, 700, 5, [1, 2])]
        assert count_lines(path, 2) == 2 and count_lines(path, None) == 3
    for wrong, says in [
        ("{", "line 2"),
        ({"timestamp": 0}, "input_length"),
        (LINE | {"timestamp": -1}, "before"),
        (LINE | {"output_length": 0}, "1 or more"),
        (LINE | {"hash_ids": [-1]}, "0 or more"),
        (LINE | {"hash_ids": 3}, "line 2"),
    ]:
        with subtests.test("a line that is none is named", wrong=wrong, says=says):
            tmp_path = tmp_path_factory.mktemp("case")
            with pytest.raises(ConfigError, match=says):
                list(read_trace(written(tmp_path, LINE, wrong), None))
    with subtests.test("no file"):
        tmp_path = tmp_path_factory.mktemp("case")
        with pytest.raises(ConfigError, match="--trace"):
            count_lines(tmp_path / "none", None)

"""This module compares the turns of one system with those of another, and tells CPU time by process. It is
pure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from bench.report import Row, number, percentile
from bench.sglang_load import Turn

PAGE_SIZE = 16  # tokens
# Of a summary: what ratios and the table show.
_COMPARED = (
    "on_rank_share",
    "hit_tokens",
    "kv_bytes_moved",
    "ttft_p50_s",
    "ttft_p99_s",
    "itl_p50_s",
    "tpot_p50_s",
    "output_tokens_per_s",
    "cpu_s",
    "cpu_ms_per_turn",
    "cpu_ms_per_token",
)
_SHOWN = ("failed_attempts", *_COMPARED[:1], "busiest_rank_share", "hit_share_of_possible", *_COMPARED[1:])


@dataclass(frozen=True, slots=True)
class Measured:
    """A load, and what it took."""

    turns: Sequence[Turn]
    elapsed_s: float
    cpu_s_by_part: Mapping[str, float]  # of all processes of the system, its engines included
    load_average: float  # of the machine in the last minute: other programs' too


def summary(measured: Measured) -> Row:
    """Summarize at least two turns of a conversation.

    A turn is on its rank when the turn before ran there. `possible` hits are all full pages of the prompt
    whose KV was made before. Tokens that reach the client together have gaps of 0 between them, so the time
    per output token of a turn (tpot) says more than the gaps (itl) where answers are short.
    """
    turns = measured.turns
    later = [turn for turn in turns if turn.turn > 0]
    rank_of = {(turn.conversation, turn.turn): turn.rank for turn in turns}
    on_rank = sum(turn.rank == rank_of[turn.conversation, turn.turn - 1] for turn in later)
    possible = sum(turn.known_tokens // PAGE_SIZE * PAGE_SIZE for turn in later)
    num_tokens, by_part = sum(len(turn.token_ids) for turn in turns), measured.cpu_s_by_part
    cpu_s = sum(by_part.values())
    ttft_s, gaps_s = [turn.ttft_s for turn in turns], [gap for turn in turns for gap in turn.gaps_s]
    return {
        "turns": len(turns),
        "failed_attempts": sum(turn.attempts - 1 for turn in turns),
        "on_rank_share": on_rank / len(later),
        "busiest_rank_share": max(Counter(turn.rank for turn in turns).values()) / len(turns),
        "prompt_tokens": sum(len(turn.prompt) for turn in turns),
        "hit_tokens": sum(turn.decode_prefix_len for turn in turns),
        "hit_share_of_possible": sum(turn.decode_prefix_len for turn in later) / possible,
        "kv_bytes_moved": sum(turn.kv_bytes_moved for turn in turns),
        "ttft_p50_s": percentile(ttft_s, 0.50),
        "ttft_p99_s": percentile(ttft_s, 0.99),
        "itl_p50_s": median(gaps_s),
        "tpot_p50_s": median(sum(turn.gaps_s) / len(turn.gaps_s) for turn in turns if turn.gaps_s),
        "output_tokens_per_s": num_tokens / measured.elapsed_s,
        "elapsed_s": measured.elapsed_s,
        "cpu_s": cpu_s,
        "cpu_ms_per_turn": 1e3 * cpu_s / len(turns),
        "cpu_ms_per_token": 1e3 * cpu_s / num_tokens,
        **{f"{part}_cpu_ms_per_turn": 1e3 * part_s / len(turns) for part, part_s in by_part.items()},
        "load_average": measured.load_average,
    }


def differing(ours: Sequence[Turn], others: Sequence[Turn]) -> int:
    """Turns whose greedy answer is another one."""
    answers = {turn.name: turn.token_ids for turn in ours}
    return sum(answers[turn.name] != turn.token_ids for turn in others)


# -- several rounds ------------------------------------------------------------------------------------


def medians(rounds: Sequence[Row]) -> Row:
    return {name: median(number(row[name]) for row in rounds) for name in rounds[0]}


def ranges(rounds: Sequence[Row]) -> Row:
    """The lowest and the highest of each figure that was not the same in all rounds."""
    pairs = {name: [f([number(row[name]) for row in rounds]) for f in (min, max)] for name in rounds[0]}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def ratios(ours: Row, theirs: Row) -> Row:
    """Ours divided by theirs; nothing where theirs is 0."""
    pairs = {name: (number(ours[name]), number(theirs[name])) for name in _COMPARED}
    return {name: mine / other for name, (mine, other) in pairs.items() if other}


def nested(rows: Mapping[str, Row]) -> Row:
    """Return SYSTEM/POLICY as two levels of keys."""
    levels: dict[str, object] = {}
    for name, row in rows.items():
        system, _, policy = name.partition("/")
        if policy:
            policies = levels.setdefault(system, {})
            assert isinstance(policies, dict)
            policies[policy] = row
        else:
            levels[system] = row
    return levels


def table_rows(rows: Mapping[str, Row]) -> list[Row]:
    """Return one line per system, for a person."""
    return [{"system": name, **{key: row[key] for key in _SHOWN}} for name, row in rows.items()]


# -- CPU time ------------------------------------------------------------------------------------------

# Of a command line or a process's title; the first that is in it counts.
_PARTS = (
    ("services.router", "router"),
    ("sglang::router", "router"),
    ("sglang_router", "router"),
    ("services.decode", "decode_service"),
    ("services.prefill", "prefill_service"),
    ("sglang::scheduler", "schedulers"),
    ("/etcd --name", "etcd"),
    ("sglang", "sglang_others"),  # its HTTP servers, DP controllers, detokenizers
)
PARTS = tuple(dict.fromkeys(part for _, part in _PARTS))


def part_of(name: str) -> str | None:
    return next((part for word, part in _PARTS if word in name), None)


def spent(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {part: after[part] - before[part] for part in PARTS}

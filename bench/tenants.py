"""This benchmark measures what tenants cost each other where requests wait, on a rank.

    python -m bench.tenants --json FILE

Virtual time, real decisions: the core of our own engines with its queue, pages and tree, around a fake runner
whose steps take 10 ms and 0.1 ms for each prompt token. All sides get the same requests in one run:

    fair     requests tell whose they are, the weight, and what the session has had, as --tenants does
    turns    requests have a salt of their tenant alone: tenants take turns by their numbers of requests
    unfair   requests say nothing: they are served as they arrive

    burst      a quiet tenant beside one that suddenly asks for 20 times as much, and alone, on a rank that
               computes and generates (local) and on one that only computes prompts (prefill)
    sessions   three tenants whose conversations take three times the pool, one of them with half of all
    weights    two tenants of weights 4 and 1 that always want more
"""

import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from bench.report import Row, parser_of, table, verdict, write_json
from services.engine.fake import VOCAB_SIZE, FakeRunner, FakeSpeed
from services.engine.paged.admitting import Limits
from services.engine.paged.core import EngineCore
from services.engine.paged.core_events import Token
from services.engine.paged.sequence import Sequence as Running
from services.kv.prefix_cache import PrefixCache
from services.values.rank import TransferId
from services.values.request import GenerationRequest, SamplingParams, TenantShare

SIDES = ("fair", "turns", "unfair")
STEP_S, TOKEN_S, CHUNK, PAGE = 0.010, 0.0001, 512, 16


@dataclass(frozen=True, slots=True)
class Asked:
    at_s: float
    tenant: str
    session: str
    ids: tuple[int, ...]
    output_tokens: int
    weight: float = 1.0


class Rank:
    """A core with a clock of its own."""

    def __init__(self, num_pages: int, max_running: int, *, prefills: bool = False) -> None:
        self.now_s = 0.0
        self.prefills = prefills
        speed = FakeSpeed(STEP_S, TOKEN_S)
        runner = FakeRunner(num_pages=num_pages, page_size=PAGE, speed=speed, sleep=self.wait)
        cache = PrefixCache(num_pages, PAGE, 4 * PAGE, "fake", clock=lambda: self.now_s)
        self.core = EngineCore(runner, cache, Limits(max_running, CHUNK), lambda: self.now_s)

    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    def submit(self, number: int, request: GenerationRequest) -> Running:
        prefills = self.prefills
        transfer = TransferId(number) if prefills else None
        seq = Running(request, number, transfer_id=transfer, single_token=prefills, transfer_open=prefills)
        self.core.submit(seq)
        return seq

    def step(self) -> list[tuple[Running, Token | int]]:
        """Compute one step and return its tokens. What a prefill rank writes is there at once."""
        if not self.core.step():
            self.wait(STEP_S)
        tokens = [(seq, event) for seq, event in self.core.take_outputs() if isinstance(event, Token | int)]
        for seq, _ in tokens if self.prefills else ():
            self.core.transfer_ended(seq)
        self.core.take_cache_events()
        return tokens


class Served:
    """Serve requests on a rank; tokens are counted by tenant up to `until_s`, while all want more."""

    def __init__(self, side: str, asked: Sequence[Asked], rank: Rank, until_s: float = math.inf) -> None:
        self.first_token_s: dict[str, list[float]] = {}
        self.tokens = Counter[str]()
        self.had = Counter[str]()
        self.prompt_tokens = self.reused_tokens = 0
        self._side, self._rank, self._until_s = side, rank, until_s
        self._asked = dict[Running, Asked]()
        for number, each in enumerate(sorted(asked, key=lambda each: each.at_s)):
            while rank.now_s < each.at_s and self._asked:
                self._step()
            rank.now_s = max(rank.now_s, each.at_s)
            self._asked[rank.submit(number, self._request(number, each))] = each
        while self._asked:
            self._step()
        self.took_s = rank.now_s

    @property
    def hits(self) -> float:
        return self.reused_tokens / self.prompt_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens.total() / self.took_s

    def p99_s(self, tenant: str) -> float:
        ordered = sorted(self.first_token_s[tenant])
        return ordered[math.ceil(0.99 * len(ordered)) - 1]

    def _request(self, number: int, asked: Asked) -> GenerationRequest:
        sampling = SamplingParams(temperature=0, max_tokens=asked.output_tokens)
        session_tokens = self.had[asked.session]
        share = TenantShare(asked.tenant, asked.weight, session_tokens) if self._side == "fair" else None
        salt = "" if self._side == "unfair" else asked.tenant
        return GenerationRequest(f"r{number}", asked.ids, sampling, cache_salt=salt, share=share)

    def _step(self) -> None:
        for seq, event in self._rank.step():
            asked, tokens = self._asked[seq], 1
            if seq.num_output == 1:
                self.first_token_s.setdefault(asked.tenant, []).append(self._rank.now_s - asked.at_s)
                self.prompt_tokens += len(asked.ids)
                self.reused_tokens += seq.reused_tokens
                tokens += len(asked.ids) - seq.reused_tokens
            self.had[asked.session] += tokens
            if self._rank.now_s <= self._until_s:
                self.tokens[asked.tenant] += tokens
            if isinstance(event, Token) and event.finished is not None:
                del self._asked[seq]


def _ids(chance: random.Random, length: int) -> tuple[int, ...]:
    return tuple(chance.choices(range(VOCAB_SIZE), k=length))


def _arrivals(chance: random.Random, per_s: float, from_s: float, to_s: float) -> Iterator[float]:
    at_s = from_s + chance.expovariate(per_s)
    while at_s < to_s:
        yield at_s
        at_s += chance.expovariate(per_s)


def burst(rows: list[Row], chance: random.Random) -> Iterator[Row]:
    """The quiet one asks for about 8 % of what the rank computes, and the burst for 20 times that."""
    quiet_per_s, length_s = 0.32, 240.0
    quiet = [
        Asked(at_s, "quiet", f"q{number}", _ids(chance, 2048), 32)
        for number, at_s in enumerate(_arrivals(chance, quiet_per_s, 0.0, length_s))
    ]
    crowd = [
        Asked(at_s, "crowd", f"c{number}", _ids(chance, 2048), 32)
        for number, at_s in enumerate(_arrivals(chance, 20 * quiet_per_s, 40.0, length_s))
    ]
    for role in ("local", "prefill"):
        alone = Served("unfair", quiet, Rank(4096, 32, prefills=role == "prefill")).p99_s("quiet")
        for side in SIDES:
            served = Served(side, quiet + crowd, Rank(4096, 32, prefills=role == "prefill"))
            beside = served.p99_s("quiet")
            rows.append(
                {
                    "workload": f"burst, {role}",
                    "side": side,
                    "quiet alone p99 ms": 1e3 * alone,
                    "beside p99 ms": 1e3 * beside,
                    "ratio": beside / alone,
                    "crowd mean ms": 1e3 * mean(served.first_token_s["crowd"]),
                    "tokens/s": served.tokens_per_s,
                }
            )
            if side == "fair":
                yield verdict(f"burst, {role}: quiet TTFT p99 beside / alone", "<=", 1.2, beside / alone)


def sessions(rows: list[Row], chance: random.Random) -> Iterator[Row]:
    """Conversations of 8 turns grow from 1,000 to 5,000 tokens. All turns' prompts are known from the start:
    what an answer would have been is drawn, too, and is no hit."""
    asked = list[Asked]()
    for number, tenant in enumerate(chance.choices(("a", "b", "c"), (2, 1, 1), k=60)):
        ids, at_s = _SYSTEM[tenant] + _ids(chance, 744), chance.uniform(0, 40)
        for _ in range(8):
            asked.append(Asked(at_s, tenant, f"{tenant}{number}", ids, 64))
            ids, at_s = ids + _ids(chance, 512), at_s + chance.uniform(8, 16)
    served = {side: Served(side, asked, Rank(6144, 24)) for side in SIDES}
    for side, each in served.items():
        firsts = [seconds for of in each.first_token_s.values() for seconds in of]
        rows.append(
            {
                "workload": "sessions",
                "side": side,
                "hits": each.hits,
                "tokens/s": each.tokens_per_s,
                "TTFT mean ms": 1e3 * mean(firsts),
            }
        )
    fair, unfair = served["fair"], served["unfair"]
    yield verdict("sessions: throughput, fair / unfair", ">=", 0.95, unfair.took_s / fair.took_s)
    yield verdict("sessions: hits, fair / unfair", ">=", 0.95, fair.hits / unfair.hits)


_SYSTEM = {name: _ids(random.Random(name), 256) for name in "abc"}


def weights(rows: list[Row], chance: random.Random) -> Iterator[Row]:
    """All of it is asked at once, and counted until the first of the two has nothing left."""
    for shape, prompt, output in (("prompts", 1536, 8), ("answers", 64, 256), ("both", 512, 64)):
        number = 400_000 // (prompt + 4 * output)
        asked = [
            Asked(0.0, tenant, f"{tenant}{each}", _ids(chance, prompt), output, weight)
            for each in range(number)
            for tenant, weight in (("four", 4.0), ("one", 1.0))
        ]
        for side in SIDES:
            served = Served(side, asked, Rank(4096, 32), until_s=_until_s(shape))
            ratio = served.tokens["four"] / served.tokens["one"]
            rows.append({"workload": f"weights, {shape}", "side": side, "four / one": ratio})
            if side == "fair":
                yield verdict(f"weights, {shape}: |shares / 4 - 1|", "<=", 0.05, abs(ratio / 4 - 1))


def _until_s(shape: str) -> float:
    return {"prompts": 25.0, "answers": 20.0, "both": 25.0}[shape]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", nargs="*", choices=WORKLOADS, default=list(WORKLOADS))
    arguments = parser.parse_args()
    rows, goals = list[Row](), list[Row]()
    for name in arguments.workloads:
        of_workload = list[Row]()
        goals += WORKLOADS[name](of_workload, random.Random(arguments.seed))
        print(table(of_workload), flush=True)
        rows += of_workload
    print(table(goals))
    if arguments.json is not None:
        settings: Row = {"seed": arguments.seed, "step_s": STEP_S, "token_s": TOKEN_S, "chunk": CHUNK}
        write_json(arguments.json, "tenants", settings, rows, {"goals": goals})


WORKLOADS = {"burst": burst, "sessions": sessions, "weights": weights}

if __name__ == "__main__":
    main()

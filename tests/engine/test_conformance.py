"""These tests show what services/engine/base.py promises, over every engine: fake, torch and real SGLang,
memcpy and NIXL.

Each engine comes with its oracle: the fake's own function, or what transformers generates. SGLang takes
a minute to start, so that one pair of it serves all tests here (`make test-sglang`). It is excused from:
  plan local         its decode computes no prompts
  no cache           a flag of its start, so another pair
  the page books     it tells how much is in use, not by whom: cached and evictable pages count as free
  seeded sampling    its random numbers are not a function of (seed, position)
  answers' log-probabilities, min_tokens    it is refused what it cannot give; of prompts ranks are not told
"""

import asyncio
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from engine.pair import FAKE, Pair, core_of, eager
from exactness.checkpoints import tiny_checkpoint
from exactness.prompt_scores import check_scores, prompt_scores
from exactness.reference import count_near_ties, random_prompt, reference_generation
from net.certificates import make_certificates
from services.engine.engine_config import EngineConfig
from services.engine.fake import continuation, parse_carried
from services.engine.paged.shell import pulling
from services.engine.paged.shell.pulling import PullBounds
from services.engine.sglang.directory import look_up
from services.kv.block_hash import scope_seed, sequence_hashes
from services.kv.tails import carried_bytes
from services.net import channels, grpc_errors
from services.net.channels import TlsConfig
from services.values.errors import InvalidRequest, IsthmusError, NoCapacity, Unavailable
from services.values.rank import Plan, TakeOver
from services.values.request import FinishReason, SamplingParams
from services.wire.isthmus.v1 import handshake_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")

HAS_SGLANG = find_spec("sglang") is not None and find_spec("sglang.srt") is not None
SGLANG_MARKS = (
    pytest.mark.sglang,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not HAS_SGLANG, reason="SGLang is not installed here: make test-sglang"),
)


@dataclass(frozen=True)
class Fake:
    settings: EngineConfig = FAKE
    plans: frozenset[Plan] = frozenset(Plan)
    seeded: bool = True  # sampled tokens are a function of (seed, position)

    def pair(self, is_eager=False, dp_size=1, **changes):
        settings = replace(self.settings, **changes)
        return Pair(eager(settings) if is_eager else settings, dp_size=dp_size)

    def check(self, prompt, tokens):
        assert list(tokens) == self.expected(prompt, len(tokens))

    def expected(self, prompt, count):
        return continuation(prompt, count, parse_carried(self.settings.fake_carried))

    def check_scores(self, prompt, start, told):
        carried = parse_carried(self.settings.fake_carried)
        assert told == prompt_scores(prompt, max(1, start), told.num_top, carried)


@dataclass(frozen=True)
class Torch(Fake):
    def check(self, prompt, tokens):
        count_near_ties(self._reference(prompt, len(tokens)), tokens)

    def expected(self, prompt, count):
        return list(self._reference(prompt, count).token_ids)

    def check_scores(self, prompt, start, told):
        check_scores(Path(self.settings.model), prompt, start, told)

    def _reference(self, prompt, count):
        return reference_generation(Path(self.settings.model), tuple(prompt), count)


@dataclass(frozen=True)
class Sglang(Torch):
    """`running` is shared by all tests of the module, and keeps what it has cached."""

    plans: frozenset[Plan] = frozenset({Plan.REMOTE})
    seeded: bool = False
    running: Pair | None = None

    def check_scores(self, prompt, start, told):
        check_scores(Path(self.settings.model), prompt, start, told, ranks=False)

    @asynccontextmanager
    async def pair(self, is_eager=False, kv_pages=0, **changes):
        """`kv_pages` bounds how long a test takes; with what there is it takes longer."""
        if "decode_cache" in changes:
            pytest.skip("SGLang's cache is a flag of its start: it would take another pair")
        yield self.running


CARRYING = {"torch-recurrent": "falcon_h1", "torch-windowed": "gpt_oss"}


def torch_settings(transport="local", **changes):
    settings = replace(
        FAKE,
        engine="torch",
        model=str(tiny_checkpoint("qwen3")),
        page_size=16,
        index_block=16,
        kv_pages=64,
        transport=transport,
        chunk_size=24,
    )
    return replace(settings, **changes)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sglang_pair(tmp_path_factory):
    """All its streams are under mutual TLS: the prefill leg, DescribeRanks, and what SGLang's processes
    say to each other."""
    folder = make_certificates(tmp_path_factory.mktemp("certificates"), "IP:127.0.0.1")
    tls = TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem", mutual=True)
    settings = torch_settings(
        "nixl",
        engine="sglang",
        dtype="float32",
        chunk_size=32,  # whole pages
        engine_arg=("--num-reserved-decode-tokens=16",),
    )
    async with Pair(settings, tls=tls) as pair:
        yield pair


ENGINES = {
    "fake": (),
    "fake-carried": (),
    "torch": (),
    "torch-recurrent": (pytest.mark.exact,),
    "torch-windowed": (pytest.mark.exact,),
    "torch-nixl": (pytest.mark.nixl,),
    "sglang": SGLANG_MARKS,
}


def pytest_generate_tests(metafunc):
    """Every engine runs under every plan; NIXL, which moves little under plan local, in make test-exact."""
    if "plan" in metafunc.fixturenames:
        waits = {("torch-nixl", Plan.LOCAL): (pytest.mark.exact,)}
        pairs = [
            pytest.param(name, plan, marks=marks + waits.get((name, plan), ()), id=f"{name}-{plan.value}")
            for plan in Plan
            for name, marks in ENGINES.items()
        ]
        metafunc.parametrize(("engine", "plan"), pairs, indirect=True)
        return
    has_its_own = any(mark.args[0] == "engine" for mark in metafunc.definition.iter_markers("parametrize"))
    if "engine" in metafunc.fixturenames and not has_its_own:
        engines = [pytest.param(name, marks=marks) for name, marks in ENGINES.items()]
        metafunc.parametrize("engine", engines, indirect=True)


@pytest.fixture
def engine(request):
    if request.param == "fake":
        return Fake()
    if request.param == "fake-carried":
        return Fake(replace(FAKE, fake_carried="window:6,state"))
    if request.param == "sglang":
        pair = request.getfixturevalue("sglang_pair")
        return Sglang(pair.settings, running=pair)
    if request.param in CARRYING:
        model = str(tiny_checkpoint(CARRYING[request.param]))
        return Torch(torch_settings(model=model, window_pages=64))  # of a small pool's windows few could run
    return Torch(torch_settings("nixl" if request.param == "torch-nixl" else "local"))


@pytest.fixture
def plan(request, engine):
    if request.param not in engine.plans:
        pytest.skip(f"this engine does not offer plan {request.param.value}")
    return request.param


def prompt_of(length, seed=0):
    return list(random_prompt(length, seed))


async def test_tokens_are_the_oracles(engine, plan):
    async with engine.pair() as pair:
        for length in (1, 15, 16, 17, 50):
            answer = await pair.generate(prompt_of(length, length), 8, plan)
            engine.check(prompt_of(length, length), answer.tokens)
            assert answer.finished is FinishReason.LENGTH
            admitted = answer.admitted
            assert (admitted.prompt_tokens, admitted.plan) == (length, plan)
            reused = admitted.prefill_prefix_len if plan is Plan.REMOTE else admitted.decode_prefix_len
            assert admitted.prompt_tokens == reused + admitted.computed_tokens
        await pair.assert_nothing_held()


async def test_the_next_turn_reuses_the_last_one_with_its_answer(engine, plan):
    async with engine.pair() as pair:
        page = engine.settings.page_size
        first = await pair.generate(prompt_of(40), 9, plan)
        turn = [*prompt_of(40), *first.tokens, *prompt_of(5, 9)]
        second = await pair.generate(turn, 9, plan)
        engine.check(turn, second.tokens)
        assert second.admitted.decode_prefix_len == 48 // page * page
        pages = -(-len(turn) // page) - 48 // page
        layout = pair.decode.layout
        due = pages * layout.page_bytes + carried_bytes(layout, len(turn))
        moved = due if plan is Plan.REMOTE else 0
        assert second.admitted.kv_bytes_moved == moved
        await pair.assert_nothing_held()


async def test_what_is_told_of_a_prompts_tokens_is_the_oracles(engine, plan):
    """From anywhere on. Who computes uses nothing that is cached behind that; only the delta moves."""
    async with engine.pair() as pair:
        prompt = prompt_of(50)
        for start in (0, 1, 17, 33, 49, 0):
            sampling = SamplingParams(temperature=0, prompt_logprobs=3, prompt_logprobs_start=start)
            answer = await pair.generate(prompt, 3, plan, sampling=sampling)
            engine.check(prompt, answer.tokens)
            assert answer.prompt_logprobs.num_top == 3
            engine.check_scores(prompt, start, answer.prompt_logprobs)
            assert answer.admitted.reused_tokens <= max(0, start - 1)
            assert answer.admitted.computed_tokens == 50 - answer.admitted.reused_tokens
        if plan is Plan.REMOTE:
            assert answer.admitted.decode_prefix_len == 48
        sampling = SamplingParams(temperature=0, prompt_logprobs=0, prompt_logprobs_start=50)
        with pytest.raises(InvalidRequest, match="prompt_logprobs_start must be less than the prompt's 50"):
            await pair.generate(prompt, 3, plan, sampling=sampling)
        await pair.assert_nothing_held()


async def test_what_another_rank_holds_is_pulled_and_the_tokens_are_the_oracles(engine, plan, monkeypatch):
    """Each rank that computes pulls; what prefill pulled from decode, another prefill rank pulls from it."""
    if isinstance(engine, Sglang):
        assert not (engine.running.decode.lends or engine.running.prefill.pulls)
        pytest.skip("SGLang's ranks neither lend nor pull")
    monkeypatch.setattr(pulling, "BOUNDS", PullBounds(least_s=60.0, unknown_s=60.0, grant_s=60.0))
    async with engine.pair(dp_size=2) as pair:
        first = await pair.generate(prompt_of(40), 9, Plan.LOCAL)
        turn = [*prompt_of(40), *first.tokens, *prompt_of(5, 9)]
        layout = pair.decode.layout
        for asked, source in enumerate([pair.decode, pair.prefill][: 1 + (plan is Plan.REMOTE)]):
            where = {"decode": 1, "prefill": asked, "pull_from": pair.source(source, 48)}
            answer = await pair.generate(turn, 9, plan, **where)
            engine.check(turn, answer.tokens)
            pulled = answer.admitted.pulled
            assert pulled.tokens == pulled.held_tokens >= 48 and not pulled.refused
            assert answer.admitted.computed_tokens == len(turn) - pulled.tokens
            pages = pulled.tokens // layout.page_size
            assert pulled.bytes == pages * layout.page_bytes + carried_bytes(layout, pulled.tokens)
        await pair.assert_nothing_held()


async def test_what_a_rank_leaves_behind_is_taken_over_and_the_tokens_are_the_oracles(engine):
    if isinstance(engine, Sglang):
        assert engine.running.decode.hands_over is None
        pytest.skip("SGLang's ranks hand nothing over")
    async with engine.pair(dp_size=2) as pair:
        first = await pair.generate(prompt_of(40), 9, Plan.LOCAL)
        turn = [*prompt_of(40), *first.tokens, *prompt_of(5, 9)]
        leaver, successor = (decode.hands_over for decode in pair.decodes)
        (prefix,) = await leaver.idle_prefixes()
        source = pair.source(pair.decode, 0).rank
        ids = await leaver.spell(prefix)
        taken = await successor.take_over(TakeOver(source, "", ids, prefix.idle_s, 0, 60.0))
        assert taken.refused == "" and taken.held_tokens == taken.pulled_tokens >= 32
        answer = await pair.generate(turn, 9, Plan.LOCAL, decode=1)
        engine.check(turn, answer.tokens)
        assert answer.admitted.computed_tokens == len(turn) - taken.held_tokens
        await pair.assert_nothing_held()


async def test_a_full_hit_moves_nothing_but_what_is_carried(engine):
    async with engine.pair() as pair:
        await pair.generate(prompt_of(48), 4)
        answer = await pair.generate(prompt_of(48), 4)
        assert answer.admitted.decode_prefix_len == 48
        assert answer.admitted.kv_bytes_moved == carried_bytes(pair.decode.layout, 48)
        engine.check(prompt_of(48), answer.tokens)


async def test_without_a_cache_nothing_is_reused(engine, plan):
    async with engine.pair(decode_cache="off", prefill_cache="off") as pair:
        for _ in range(2):
            answer = await pair.generate(prompt_of(40), 5, plan)
            engine.check(prompt_of(40), answer.tokens)
            assert answer.admitted.decode_prefix_len == answer.admitted.prefill_prefix_len == 0
        await pair.assert_nothing_held()
        books = await pair.decode.books()
        assert books.free == books.total


async def test_a_tier_changes_no_token(engine, plan):
    """The pool holds a prompt or two, so that most of what is reused has been below it.

    The fake computes slowly enough that reading is worth it.
    """
    if isinstance(engine, Sglang):
        pytest.skip("SGLang's pool has no tier of ours")
    pages = 160 // engine.settings.page_size
    changes = {"kv_pages": pages, "index_block": 2 * engine.settings.page_size, "fake_prompt_token_s": 1e-3}
    async with engine.pair(kv_tier=("memory:4MiB",), **changes) as pair:
        prompts = [prompt_of(100, seed) for seed in range(4)]
        ranks = (pair.prefill, pair.decode) if plan is Plan.REMOTE else (pair.decode,)
        rank = ranks[0]  # It computes.
        for prompt in prompts * 20:
            answer = await pair.generate(prompt, 8, plan)
            engine.check(prompt, answer.tokens)
            brought = [core_of(rank).tiers.figures().tokens_up for rank in ranks]
            if brought[0]:
                assert rank.load().memory_tier_bytes_per_s > 0 and not rank.load().tiers_off
            else:
                assert answer.admitted.brought_tokens == 0
            if all(brought):
                break
            await asyncio.sleep(0.01)  # What is stored takes a moment, and is evicted by the next prompt.
        again = await asyncio.gather(*(pair.generate(prompt, 8, plan) for prompt in [*prompts, *prompts]))
        for prompt, answer in zip([*prompts, *prompts], again, strict=True):
            engine.check(prompt, answer.tokens)
            assert 0 <= answer.admitted.brought_tokens <= answer.admitted.reused_tokens
        assert any(answer.admitted.brought_tokens for answer in again)
        assert all(core_of(rank).tiers.figures().tokens_up for rank in ranks)
        await pair.assert_nothing_held()
        told = set()
        async with aclosing(rank.below_events()) as events, asyncio.timeout(30):
            follow = asyncio.create_task(_follow(events, told))
            while len(told) != core_of(rank).tiers.books.num_blocks:
                await asyncio.sleep(0.01)
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)
        assert rank.has_tiers and told


async def test_a_mixed_batch_is_exact(engine):
    async with engine.pair() as pair:
        prompts = [prompt_of(32, 1) + prompt_of(1 + 5 * i, 50 + i) for i in range(8)]
        offered = [plan for plan in Plan if plan in engine.plans]
        plans = [offered[i % len(offered)] for i in range(8)]
        answers = await asyncio.gather(
            *(pair.generate(p, 12, plan) for p, plan in zip(prompts, plans, strict=True))
        )
        for prompt, answer in zip(prompts, answers, strict=True):
            engine.check(prompt, answer.tokens)
        await pair.assert_nothing_held()


CROWD = 6


@asynccontextmanager
async def crowded(engine):
    """A pair, and the length of output by which CROWD sequences need half as many pages again as there are.

    Our ranks keep nothing back for growth at first, and the fake takes its time, so that they are in the
    pool together.
    """
    pages = 240 // engine.settings.page_size
    async with engine.pair(is_eager=True, kv_pages=pages, fake_step_s=0.01) as pair:
        pool_tokens = (await pair.decode.books()).total * engine.settings.page_size
        yield pair, pool_tokens // 4 - 20
        await pair.assert_nothing_held()


async def until_retracted(engine, pair, generate):
    """(prompts, answers) of a crowd that had one retracted; of another where all came too late to meet."""
    before = pair.decode.load().retractions
    for number in range(5):
        prompts = [prompt_of(20, 10 + CROWD * number + i) for i in range(CROWD)]
        answers = await asyncio.gather(*(generate(p) for p in prompts))
        if await retracts(pair, before):
            return prompts, answers
    if not engine.seeded:
        pytest.skip("SGLang retracted nothing in five crowds")
    raise AssertionError("no sequence was retracted")


async def retracts(pair, before):
    """SGLang is asked for its load every quarter of a second."""
    try:
        async with asyncio.timeout(1.0):
            while pair.decode.load().retractions <= before:
                await asyncio.sleep(0.01)
    except TimeoutError:
        return False
    return True


async def test_retraction_changes_no_token(engine, plan):
    async with crowded(engine) as (pair, length):
        generate = partial(pair.generate, max_tokens=length, plan=plan)
        for prompt, answer in zip(*await until_retracted(engine, pair, generate), strict=True):
            engine.check(prompt, answer.tokens)


async def test_retraction_changes_no_sampled_token(engine, plan):
    if not engine.seeded:
        pytest.skip("its random numbers are not a function of (seed, position)")
    async with crowded(engine) as (pair, length):
        sampling = SamplingParams(temperature=1.3, seed=5)
        generate = partial(pair.generate, max_tokens=length, plan=plan, sampling=sampling)
        prompts, together = await until_retracted(engine, pair, generate)
        alone = [await generate(p) for p in prompts]
        assert [a.tokens for a in together] == [a.tokens for a in alone]


async def test_generation_goes_on_after_output_so_far(engine, plan):
    async with engine.pair() as pair:
        whole = engine.expected(prompt_of(30), 12)
        answer = await pair.generate(prompt_of(30), 12, plan, output_ids_so_far=tuple(whole[:5]))
        assert whole[:5] + answer.tokens == whole
        assert answer.admitted.prompt_tokens == 35


async def test_penalties_count_over_output_so_far_or_it_is_refused(engine, plan):
    sampling = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5)
    async with engine.pair() as pair:
        whole = (await pair.generate(prompt_of(30), 12, plan, sampling=sampling)).tokens
        moved = pair.generate(prompt_of(30), 12, plan, sampling=sampling, output_ids_so_far=tuple(whole[:5]))
        assert pair.decode.moves_penalties is not isinstance(engine, Sglang)
        if pair.decode.moves_penalties:
            assert whole[:5] + (await moved).tokens == whole
        else:
            with pytest.raises(Unavailable, match="penalties"):
                await moved
        await pair.assert_nothing_held()


async def test_end_of_sequence_and_stop_tokens(engine, plan):
    async with engine.pair() as pair:
        expected = engine.expected(prompt_of(30), 12)
        end = expected[4]
        until = expected[: expected.index(end) + 1]
        stopped = await pair.generate(prompt_of(30), 12, plan, eos_token_ids=(end,))
        assert (stopped.tokens, stopped.finished) == (until, FinishReason.STOP)
        sampling = SamplingParams(temperature=0, stop_token_ids=(end,))
        stopped = await pair.generate(prompt_of(30), 12, plan, sampling=sampling)
        assert (stopped.tokens, stopped.finished) == (until, FinishReason.STOP)
        sampling = SamplingParams(temperature=0, ignore_eos=True)
        ignored = await pair.generate(prompt_of(30), 12, plan, sampling=sampling, eos_token_ids=(end,))
        assert (ignored.tokens, ignored.finished) == (expected, FinishReason.LENGTH)
        await pair.assert_nothing_held()


async def test_closing_the_iterator_gives_every_page_back(engine, plan):
    async with engine.pair() as pair:
        for taken in range(4):
            async with pair.outputs(pair.request(prompt_of(40, taken), 30, plan)) as outputs:
                tokens = 0
                while tokens < taken:
                    tokens += len((await anext(outputs)).token_ids)
        await pair.assert_nothing_held()
        engine.check(prompt_of(40), (await pair.generate(prompt_of(40), 5, plan)).tokens)


async def test_what_can_never_work_is_refused(engine, plan):
    async with engine.pair() as pair:
        limit = pair.decode.max_context_tokens
        for prompt, error in (([], InvalidRequest), ([1, 10**6], InvalidRequest), ([5] * limit, NoCapacity)):
            with pytest.raises(error):
                await pair.generate(prompt, plan=plan)
        answer = await pair.generate(prompt_of(limit - 2), 50, plan)
        assert (len(answer.tokens), answer.finished) == (2, FinishReason.LENGTH)
        await pair.assert_nothing_held()


async def test_cache_events_tell_what_the_tree_holds(engine, plan):
    async with engine.pair() as pair:
        assert pair.decode.reports_checkpoints is not isinstance(engine, Sglang)
        assert pair.decode.takes_turns is pair.prefill.takes_turns is not isinstance(engine, Sglang)
        held = set()
        async with aclosing(pair.decode.cache_events()) as events:
            follow = asyncio.create_task(_follow(events, held))
            prompt = prompt_of(40, 99)  # of no other test
            ids = [*prompt, *(await pair.generate(prompt, 9, plan)).tokens]
            block, seed = engine.settings.index_block, scope_seed(engine.settings.served_name)
            expected = set(sequence_hashes(ids[:-1], block, seed))
            shared = isinstance(engine, Sglang)  # and then holds what other tests left
            async with asyncio.timeout(30):
                while not (held >= expected if shared else held == expected):
                    await asyncio.sleep(0.01)
            follow.cancel()
            await asyncio.gather(follow, return_exceptions=True)


async def _follow(events, held):
    async for change in events:
        held -= set(change.removed)
        held |= set(change.stored)


async def test_only_plans_that_are_offered_are_taken(engine):
    async with engine.pair() as pair:
        assert pair.decode.plans == engine.plans
        for refused in set(Plan) - engine.plans:
            with pytest.raises(InvalidRequest):
                await pair.generate(prompt_of(20), plan=refused)


@pytest.mark.parametrize("engine", [pytest.param("sglang", marks=SGLANG_MARKS)], indirect=True)
@pytest.mark.parametrize("sampling", [SamplingParams(logprobs=2), SamplingParams(min_tokens=3)])
async def test_what_sglang_cannot_give_is_refused(engine, sampling):
    async with engine.pair() as pair:
        with pytest.raises(InvalidRequest):
            await pair.generate(prompt_of(20), sampling=sampling)


@pytest.mark.parametrize("engine", [pytest.param("sglang", marks=SGLANG_MARKS)], indirect=True)
async def test_sglangs_own_processes_ask_for_a_certificate(engine):
    """The tests above went through these streams under mutual TLS."""
    async with engine.pair() as pair:
        (rank,) = (await look_up(pair.peer.endpoint, pair.tls)).endpoints.values()
        for tls in (None, TlsConfig(ca=pair.tls.ca)):
            for endpoint in (pair.peer.endpoint, rank):
                async with channels.open_channel(endpoint, tls) as channel:
                    with pytest.raises(IsthmusError), grpc_errors.renaming():
                        await handshake_pb2_grpc.HandshakeStub(channel).Connect().read()


# The last test, for it ends the pair that SGLang's tests share.
async def test_stopping_ends_requests_as_unavailable(engine, plan):
    async with engine.pair(fake_step_s=0.005) as pair:
        async with pair.outputs(pair.request(prompt_of(20), 200, plan)) as outputs:
            await anext(outputs)
            stop = asyncio.create_task(pair.decode.stop())
            with pytest.raises(Unavailable):
                async for _ in outputs:
                    pass
        await stop

"""A rank pulls what another holds of a prompt: exact tokens, computed only where it must be, no leaks."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from engine.pair import FAKE, Pair, core_of, has_crashed
from net.certificates import make_certificates
from services.engine.fake import continuation, parse_carried
from services.engine.paged.shell import pulling
from services.engine.paged.shell.pulling import PullBounds
from services.net.channels import TlsConfig
from services.transfer.local import LocalTransport, _LandedWrite
from services.transfer.sending import receivers
from services.values.errors import PeerFailed, Unavailable
from services.values.rank import Plan, PullSource, RankAddress, RankId
from transfer.spoiling_transport import SpoilingTransport

SETTINGS = replace(FAKE, kv_pages=128)
HYBRIDS = ("state", "window:6,state", "chunk:12,window:6")
PROMPT = list(range(100, 147))  # 11 pages and 3 tokens


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Sources have all the time that a busy machine may need, unless a test says otherwise."""
    wait(monkeypatch, 20.0)


def wait(monkeypatch, seconds):
    monkeypatch.setattr(pulling, "BOUNDS", PullBounds(0.0, seconds, seconds, seconds, seconds))


class Ranks(Pair):
    """Two of either role. The first decode rank holds; the second one asks, or prefill for it."""

    def __init__(self, settings=SETTINGS, prefill_settings=None, tls=None, **changes):
        super().__init__(replace(settings, **changes), prefill_settings, tls, dp_size=2)

    async def hold(self, prompt=PROMPT, max_tokens=6, **options):
        """The first decode rank holds a conversation's first turn. Return its second prompt."""
        answer = await self.generate(prompt, max_tokens, Plan.LOCAL, **options)
        return [*prompt, *answer.tokens, 7, 8]

    async def ask(self, prompt, plan=Plan.LOCAL, source=None, tokens=None, **options):
        """The second decode rank is asked, or the first prefill rank through it."""
        source = self.decodes[0] if source is None else source
        held = len(prompt) // 4 * 4 if tokens is None else tokens
        pull_from = self.source(source, held)
        answer = await self.generate(prompt, 8, plan, decode=1, pull_from=pull_from, **options)
        carried = parse_carried(self.settings.fake_carried)
        assert answer.tokens == continuation(prompt, 8, carried)
        return answer.admitted


async def test_what_a_source_holds_is_not_computed_again(subtests):
    """The rank holds this for whoever asks; its own answers are part of it, to the page."""
    for plan in Plan:
        with subtests.test(plan=plan):
            async with Ranks() as ranks:
                prompt = await ranks.hold()
                held = (len(prompt) - 3) // 4 * 4  # the last token's KV is of no use to anybody
                admitted = await ranks.ask(prompt, plan)
                assert admitted.pulled.tokens == admitted.pulled.held_tokens == held
                assert admitted.pulled.bytes == held * 8 and admitted.pulled.refused == ""
                assert admitted.pulled.digested_pages == (held // 4 if plan is Plan.LOCAL else 0)
                assert admitted.computed_tokens == len(prompt) - held
                assert admitted.reused_tokens == held
                assert (await ranks.ask(prompt)).computed_tokens == len(prompt) - (len(prompt) - 1) // 4 * 4
                await ranks.assert_nothing_held()
    with subtests.test("prefill to prefill"):
        async with Ranks() as ranks:
            await ranks.generate(PROMPT, 4, Plan.REMOTE, prefill=1)
            admitted = await ranks.ask(PROMPT, Plan.REMOTE, ranks.prefills[1])
            assert admitted.pulled.tokens == 44
            assert (admitted.prefill_prefix_len, admitted.computed_tokens) == (44, 3)
            await ranks.assert_nothing_held()
    with subtests.test("prefill to decode"):
        async with Ranks() as ranks:
            await ranks.generate(PROMPT, 4, Plan.REMOTE, prefill=1)
            assert (await ranks.ask(PROMPT, source=ranks.prefills[1])).computed_tokens == 3
            await ranks.assert_nothing_held()


async def test_only_what_is_lacked_crosses():
    async with Ranks() as ranks:
        prompt = await ranks.hold()
        await ranks.generate(PROMPT[:20], 2, Plan.LOCAL, decode=1)
        admitted = await ranks.ask(prompt)
        assert admitted.pulled.tokens == admitted.pulled.held_tokens - 20
        assert admitted.pulled.bytes == admitted.pulled.tokens * 8
        longer = [*await ranks.hold([5, *PROMPT]), *range(30)]
        admitted = await ranks.ask(longer)
        assert 0 < admitted.pulled.tokens == admitted.pulled.held_tokens < len(longer) // 4 * 4
        await ranks.assert_nothing_held()


async def test_what_is_not_needed_is_not_asked_for(subtests):
    async with Ranks() as ranks:
        prompt = await ranks.hold()
        await ranks.ask(prompt)
        with subtests.test("the rank holds it by now"):
            assert (await ranks.ask(prompt)).pulled is None
        with subtests.test("the source is said to hold less"):
            assert (await ranks.ask([*prompt, 9, 9, 9, 9], tokens=8)).pulled is None
        with subtests.test("the source is the rank itself"):
            assert (await ranks.ask([1, *prompt], source=ranks.decodes[1])).pulled is None
        with subtests.test("log-probabilities of the prompt are wanted"):
            sampling = replace(ranks.request([0]).sampling, prompt_logprobs=0)
            assert (await ranks.ask([2, *prompt], sampling=sampling)).pulled is None
        await ranks.assert_nothing_held()
    with subtests.test("it may be left off"):
        async with Ranks(pull="off") as ranks:
            prompt = await ranks.hold()
            assert (await ranks.ask(prompt)).pulled is None
            assert ranks.decode.handshake() is None


async def test_a_hybrid_is_pulled_to_its_deepest_checkpoint(subtests):
    for carried in HYBRIDS:
        for plan in Plan:
            with subtests.test(carried=carried, plan=plan):
                async with Ranks(fake_carried=carried, index_block=8) as ranks:
                    prompt = await ranks.hold()
                    admitted = await ranks.ask(prompt, plan)
                    assert admitted.pulled.tokens == admitted.pulled.held_tokens
                    assert admitted.pulled.tokens % 8 == 0 < admitted.pulled.tokens
                    assert admitted.computed_tokens == len(prompt) - admitted.pulled.tokens
                    # It is a checkpoint here now.
                    again = [*prompt[: admitted.pulled.tokens], 3, 1, 4]
                    assert (await ranks.ask(again)).computed_tokens <= 3 + (plan is Plan.REMOTE) * len(again)
                    await ranks.assert_nothing_held()
    with subtests.test("its end is another one than was expected"):
        async with Ranks(fake_carried="window:6,state", index_block=8) as ranks:
            prompt = await ranks.hold()
            assert (await ranks.ask(prompt, tokens=8)).pulled.tokens > 8
            longer = [*await ranks.hold([5, *PROMPT]), *range(30)]
            admitted = await ranks.ask(longer)
            assert 0 < admitted.pulled.tokens == admitted.pulled.held_tokens < len(longer) // 8 * 8
            await ranks.assert_nothing_held()


@pytest.mark.exact
async def test_the_drafts_pages_cross_where_the_source_has_them_all(subtests):
    settings = replace(SETTINGS, fake_draft="agree:1")
    with subtests.test("prefill computes them with every prompt"):
        async with Ranks(settings) as ranks:
            await ranks.generate(PROMPT, 4, Plan.REMOTE, prefill=1)
            admitted = await ranks.ask(PROMPT, Plan.REMOTE, ranks.prefills[1])
            assert (admitted.pulled.tokens, admitted.pulled.bytes) == (44, 2 * 44 * 8)
            assert admitted.carried_bytes["draft"] == 12 * 4 * 8  # It has them of the whole prompt now.
            await ranks.assert_nothing_held()
    with subtests.test("decode has none of what it has generated without drafting"):
        async with Ranks(settings) as ranks:
            prompt = await ranks.hold()
            admitted = await ranks.ask(prompt, Plan.REMOTE)
            assert admitted.pulled.bytes == admitted.pulled.tokens * 8
            await ranks.assert_nothing_held()
    for one, other in ((settings, SETTINGS), (SETTINGS, settings)):
        with subtests.test("only one of the two drafts", source_drafts=one is settings):
            async with Ranks(one, other) as ranks:
                await ranks.hold()
                admitted = await ranks.ask(PROMPT, Plan.REMOTE)
                assert (admitted.pulled.tokens, admitted.pulled.bytes) == (44, 44 * 8)
                assert (await ranks.ask(PROMPT, Plan.REMOTE)).pulled is None
                await ranks.assert_nothing_held()


async def test_sources_are_asked_over_mutual_tls(tmp_path, subtests):
    folder = make_certificates(tmp_path, "IP:127.0.0.1")
    tls = TlsConfig(folder / "ca.pem", folder / "cert.pem", folder / "key.pem", mutual=True)
    for plan in Plan:
        with subtests.test(plan=plan):
            async with Ranks(tls=tls) as ranks:
                prompt = await ranks.hold()
                assert (await ranks.ask(prompt, plan)).pulled.tokens >= 48


async def test_a_moved_request_pulls_what_it_had_generated(subtests):
    """Its output so far is among what its source holds; penalties and constraints go on over it."""
    for plan in Plan:
        with subtests.test(plan=plan):
            async with Ranks() as ranks:
                answer = await ranks.generate(PROMPT, 14, Plan.LOCAL)
                so_far = tuple(answer.tokens[:10])
                moved = await ranks.generate(
                    PROMPT,
                    14,
                    plan,
                    decode=1,
                    output_ids_so_far=so_far,
                    pull_from=ranks.source(ranks.decode, 56),
                )
                assert (*so_far, *moved.tokens) == tuple(answer.tokens)
                assert moved.admitted.pulled.tokens == 56
                assert moved.admitted.computed_tokens == 1
                await ranks.assert_nothing_held()


async def test_another_tenants_prefix_is_not_there():
    async with Ranks() as ranks:
        prompt = await ranks.hold(cache_salt="one")
        admitted = await ranks.ask(prompt, cache_salt="two")
        assert (admitted.pulled.refused, admitted.pulled.held_tokens) == ("evicted", 0)
        assert (await ranks.ask(prompt, cache_salt="one")).pulled.tokens > 40
        await ranks.assert_nothing_held()


@asynccontextmanager
async def computed_instead(**changes):
    """Yield ranks and a prompt; what is asked for meanwhile is computed on the asked rank alone."""
    async with Ranks(**changes) as ranks:
        prompt = await ranks.hold()
        yield ranks, prompt
        await ranks.assert_nothing_held()


async def test_a_source_that_does_not_write_costs_time_only(subtests, monkeypatch):
    for plan in Plan:
        with subtests.test("it holds nothing any more", plan=plan):
            async with computed_instead() as (ranks, prompt):
                other = [*range(300, 340)]
                admitted = await ranks.ask(other, plan)
                assert (admitted.pulled.refused, admitted.pulled.held_tokens) == ("evicted", 0)
                assert admitted.computed_tokens == len(other)
        with subtests.test("it is another life", plan=plan):
            async with computed_instead() as (ranks, prompt):
                former = ranks.decode_peers[0]
                former = RankAddress(RankId("decode", 0, former.id.generation ^ 1), former.endpoint)
                answer = await ranks.generate(prompt, 8, plan, decode=1, pull_from=PullSource(former, 40))
                assert answer.tokens == continuation(prompt, 8)
                assert answer.admitted.pulled.refused == "gone"
                assert answer.admitted.pulled.held_tokens is None
        with subtests.test("nobody is there", plan=plan):
            async with computed_instead() as (ranks, prompt):
                nobody = RankAddress(RankId("decode", 7, 1), "127.0.0.1:1")
                answer = await ranks.generate(prompt, 8, plan, decode=1, pull_from=PullSource(nobody, 40))
                assert answer.tokens == continuation(prompt, 8)
                assert answer.admitted.pulled.refused == "gone"
        with subtests.test("it is being stopped", plan=plan):
            async with computed_instead() as (ranks, prompt):
                ranks.decode._stopping = True
                assert (await ranks.ask(prompt, plan)).pulled.refused == "gone"
                ranks.decode._stopping = False
        with subtests.test("it says nothing", plan=plan):
            async with computed_instead() as (ranks, prompt):
                monkeypatch.setattr(core_of(ranks.decode).pulls, "grant", lambda *request: None)
                wait(monkeypatch, 0.1)
                admitted = await ranks.ask(prompt, plan)
                wait(monkeypatch, 20.0)
                assert admitted.pulled.refused == "late"
                assert admitted.computed_tokens == len(prompt)
                assert admitted.pulled.seconds < 10


async def test_a_pull_has_one_limit_by_what_it_saves(subtests, monkeypatch):
    with subtests.test("what asking took is no more there for the writes"):
        held = Held(monkeypatch)
        async with Ranks() as ranks:
            prompt = await ranks.hold()
            grant = core_of(ranks.decode).pulls.grant
            monkeypatch.setattr(
                core_of(ranks.decode).pulls, "grant", lambda *request: time.sleep(0.5) or grant(*request)
            )
            held.closed = True
            monkeypatch.setattr(pulling, "BOUNDS", PullBounds(1e9, 0.01, 0.6, 0.6, 0.6))
            task = asyncio.create_task(ranks.ask(prompt))
            await until_quarantined(ranks.decodes[1])
            held.closed = False
            pulled = (await task).pulled
            assert pulled.refused == "late" and 0.6 <= pulled.seconds < 1.0
            await ranks.assert_nothing_held()
    with subtests.test("a source holds more than was known"):
        saved = []

        class Noting(PullBounds):
            def limit_s(self, tokens, tokens_per_s):
                saved.append(tokens)
                return 20.0

        async with Ranks() as ranks:
            prompt = await ranks.hold()
            monkeypatch.setattr(pulling, "BOUNDS", Noting())
            assert (await ranks.ask(prompt, tokens=8)).pulled.tokens == 52
            assert saved == [8, 52]


async def test_bytes_that_come_changed_are_not_used(subtests, monkeypatch):
    monkeypatch.setattr("services.engine.choose.open_transport", lambda name, nixl: SpoilingTransport())
    for plan in Plan:
        with subtests.test(plan=plan):
            monkeypatch.setattr(SpoilingTransport, "spoils", 0)
            async with computed_instead() as (ranks, prompt):
                SpoilingTransport.spoils = 1
                admitted = await ranks.ask(prompt, plan)
                assert admitted.pulled.refused == "corrupt"
                assert admitted.computed_tokens == len(prompt)
                assert (await ranks.ask(prompt, plan)).pulled is None


class Held:
    """Writes do not land while it is closed; their bytes have, for the transport copies at once."""

    def __init__(self, monkeypatch):
        self.closed = False
        poll = _LandedWrite.poll
        monkeypatch.setattr(_LandedWrite, "poll", lambda write: not self.closed and poll(write))


class Deferred(LocalTransport):
    """While it is told to, it copies when its write is polled first after `let`, not when it is posted."""

    waits: threading.Event | None = None

    def write(self, peer, moves):
        if Deferred.waits is None:
            return super().write(peer, moves)
        return DeferredWrite(self, peer, moves, Deferred.waits)


class DeferredWrite:
    def __init__(self, transport, peer, moves, let):
        self._args, self._let, self._landed = (transport, peer, moves), let, None

    @property
    def group_bytes(self):
        return self._landed.group_bytes

    def poll(self):
        if self._landed is None and self._let.is_set():
            transport, peer, moves = self._args
            self._landed = LocalTransport.write(transport, peer, moves)
        return self._landed is not None

    def release(self):
        assert self._landed is not None


@pytest.fixture
def deferred(monkeypatch):
    """All transports copy late; `deferred()` begins that, and what it returns lets them."""
    monkeypatch.setattr("services.engine.choose.open_transport", lambda name, nixl: Deferred())

    def begin():
        Deferred.waits = threading.Event()
        return Deferred.waits

    yield begin
    Deferred.waits = None


async def test_what_is_granted_stays_as_it_is_until_it_was_read(deferred, subtests):
    """Others need all that the source's pools hold meanwhile."""
    for carried in ("", "window:6,state"):
        with subtests.test(carried=carried):
            async with Ranks(fake_carried=carried, kv_pages=40, max_running_requests=3) as ranks:
                prompt = await ranks.hold()
                let = deferred()
                task = asyncio.create_task(ranks.ask(prompt))
                await until(lambda: ranks.decode.sender.writes_in_flight)
                for first in range(200, 440, 30):
                    other = [*range(first, first + 60)]
                    answer = await ranks.generate(other, 8, Plan.LOCAL)
                    assert answer.tokens == continuation(other, 8, parse_carried(carried))
                let.set()
                Deferred.waits = None
                assert (await task).pulled.tokens >= 48
                await ranks.assert_nothing_held()


async def test_what_is_on_its_way_counts_for_nobody(deferred, subtests):
    for carried in ("", "window:6,state"):
        with subtests.test(carried=carried):
            async with Ranks(fake_carried=carried) as ranks:
                prompt = await ranks.hold()
                let = deferred()
                task = asyncio.create_task(ranks.ask(prompt))
                await until(lambda: ranks.decode.sender.writes_in_flight)
                beside = await ranks.generate(prompt, 8, Plan.LOCAL, decode=1)
                assert beside.tokens == continuation(prompt, 8, parse_carried(carried))
                assert beside.admitted.computed_tokens == len(prompt)
                let.set()
                Deferred.waits = None
                assert (await task).pulled.tokens >= 48
                await ranks.assert_nothing_held()


async def test_a_source_that_writes_late_harms_nobody(deferred, subtests, monkeypatch):
    """It is given up; its bytes land when others have all pages that there are."""
    for carried in ("", "window:6,state"):
        with subtests.test(carried=carried):
            async with Ranks(fake_carried=carried, kv_pages=60, max_running_requests=3) as ranks:
                prompt = await ranks.hold()
                let = deferred()
                wait(monkeypatch, 0.1)
                admitted = await ranks.ask(prompt)
                assert admitted.pulled.refused == "late" and admitted.computed_tokens == len(prompt)
                others = [[*range(first, first + 60)] for first in range(200, 440, 30)]
                tasks = [asyncio.create_task(ranks.generate(o, 30, Plan.LOCAL, decode=1)) for o in others]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                let.set()
                Deferred.waits = None
                for other, answer in zip(others, await asyncio.gather(*tasks), strict=True):
                    assert answer.tokens == continuation(other, 30, parse_carried(carried))
                await ranks.assert_nothing_held()


async def until(holds):
    async with asyncio.timeout(20):
        while not holds():
            await asyncio.sleep(0.002)


async def until_quarantined(engine):
    await until(lambda: engine.load().books.quarantined)


async def test_pages_that_a_source_may_still_write_are_replaced(subtests, monkeypatch):
    """The request goes on at once, on other pages; the first wait until the source has said its last word."""
    held = Held(monkeypatch)
    for carried in ("", "window:6,state"):
        for plan in Plan:
            with subtests.test(carried=carried, plan=plan):
                async with Ranks(fake_carried=carried) as ranks:
                    prompt = await ranks.hold()
                    asked = ranks.prefill if plan is Plan.REMOTE else ranks.decodes[1]
                    held.closed = True
                    wait(monkeypatch, 0.2)
                    task = asyncio.create_task(ranks.ask(prompt, plan))
                    await until_quarantined(asked)
                    if plan is Plan.LOCAL:  # Otherwise its own delta does not land either.
                        admitted = await task
                    assert (await asked.books()).quarantined == len(prompt) // 4
                    assert ranks.decode.load().granted_pages == len(prompt) // 4
                    held.closed = False
                    admitted = await task
                    assert admitted.pulled.refused == "late"
                    assert admitted.computed_tokens == len(prompt)
                    await ranks.assert_nothing_held()
                    wait(monkeypatch, 20.0)


async def test_a_client_that_leaves_meanwhile_leaves_nothing(subtests, monkeypatch):
    held = Held(monkeypatch)
    for carried in ("", "window:6,state"):
        for plan in Plan:
            with subtests.test(carried=carried, plan=plan):
                async with Ranks(fake_carried=carried) as ranks:
                    prompt = await ranks.hold()
                    asked = ranks.prefill if plan is Plan.REMOTE else ranks.decodes[1]
                    held.closed = True
                    task = asyncio.create_task(ranks.ask(prompt, plan))
                    await until(lambda: ranks.decode.sender.writes_in_flight)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)
                    await until_quarantined(asked)
                    held.closed = False
                    await ranks.assert_nothing_held()


async def test_a_client_that_leaves_before_the_grant_ends_it(monkeypatch):
    async with Ranks() as ranks:
        prompt = await ranks.hold()
        grants = []
        monkeypatch.setattr(core_of(ranks.decode).pulls, "grant", lambda *request: grants.append(request))
        task = asyncio.create_task(ranks.ask(prompt))
        await until(lambda: grants)
        monkeypatch.undo()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ranks.assert_nothing_held()


async def test_a_grant_without_a_ticket_ends_by_itself(monkeypatch):
    monkeypatch.setattr(pulling, "_MOST_KEPT_S", 0.2)
    monkeypatch.setattr(pulling._Pull, "_fill", lambda pull, grant: asyncio.sleep(3600))
    async with Ranks() as ranks:
        prompt = await ranks.hold()
        task = asyncio.create_task(ranks.ask(prompt))
        await until(lambda: ranks.decode.load().granted_pages)
        await until(lambda: not ranks.decode.load().granted_pages)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await ranks.assert_nothing_held()


async def test_an_engine_that_stops_meanwhile_ends_its_pulls(subtests, monkeypatch):
    held = Held(monkeypatch)
    with subtests.test("the one that pulls"):
        async with Ranks(write_lease_s=0.5, fence_margin_s=0.1) as ranks:
            prompt = await ranks.hold()
            held.closed = True
            task = asyncio.create_task(ranks.ask(prompt))
            await until(lambda: ranks.decode.sender.writes_in_flight)
            stopping = asyncio.create_task(ranks.decodes[1].stop())
            with pytest.raises(Unavailable, match="stopping"):
                await task
            held.closed = False
            await stopping
    with subtests.test("the source"):
        async with Ranks(write_lease_s=0.5, fence_margin_s=0.1) as ranks:
            prompt = await ranks.hold()
            held.closed = True
            task = asyncio.create_task(ranks.ask(prompt))
            await until(lambda: ranks.decode.sender.writes_in_flight)
            stopping = asyncio.create_task(ranks.decode.stop())
            await asyncio.sleep(0.05)
            held.closed = False
            assert (await task).pulled.refused in ("failed", "gone")
            await stopping


async def test_two_that_pull_from_each_other_end():
    async with Ranks() as ranks:
        one = await ranks.hold()
        other = [*range(300, 347)]
        await ranks.generate(other, 6, Plan.LOCAL, decode=1)
        answers = await asyncio.gather(
            *(
                ranks.generate(prompt, 8, Plan.LOCAL, decode=1 - holder, pull_from=ranks.source(source, 40))
                for _ in range(3)
                for holder, (prompt, source) in enumerate(zip((one, other), ranks.decodes, strict=True))
            )
        )
        assert [answer.tokens for answer in answers] == [
            continuation(prompt, 8) for _ in range(3) for prompt in (one, other)
        ]
        assert sum(answer.admitted.pulled is not None for answer in answers) >= 2
        await ranks.assert_nothing_held()


async def test_many_at_once_are_exact_whatever_comes_of_each():
    """The holder refuses some, for it lends no more than it may; two ask for the same."""
    async with Ranks(kv_pages=256) as ranks:
        prompts = [await ranks.hold([first, *PROMPT]) for first in range(12)]
        admitted = await asyncio.gather(
            *(ranks.ask(prompt, list(Plan)[i % 2]) for i, prompt in enumerate([*prompts, *prompts[:4]]))
        )
        told = [each.pulled for each in admitted if each.pulled is not None]
        assert any(pulled.tokens for pulled in told)
        assert {pulled.refused for pulled in told} <= {"", "busy"}
        await ranks.assert_nothing_held()


async def test_a_failed_source_fails_no_prefill_leg(monkeypatch):
    """The peer's failure is not the request's: nobody sees PeerFailed."""

    def fails(transport, peer, moves):
        raise PeerFailed("the network is down")

    async with Ranks() as ranks:
        prompt = await ranks.hold()
        write = LocalTransport.write
        monkeypatch.setattr(LocalTransport, "write", fails)
        task = asyncio.create_task(ranks.ask(prompt))
        admitted = await task
        monkeypatch.setattr(LocalTransport, "write", write)
        assert admitted.pulled.refused == "failed"
        await ranks.assert_nothing_held()


async def test_a_source_that_can_write_to_nobody_goes_on_without(monkeypatch):
    """Its own requests need no writer, so they do not end with it."""

    def fails(transport, peer, moves):
        raise PeerFailed("the network is down")

    monkeypatch.setattr(receivers, "MIN_SPAN_S", 0.0)
    async with Ranks(write_lease_s=0.5, fence_margin_s=0.1) as ranks:
        prompts = [await ranks.hold([first, *PROMPT], 2) for first in range(receivers.MAX_FAILURES + 1)]
        monkeypatch.setattr(LocalTransport, "write", fails)
        told = []
        for prompt in prompts:
            told.append((await ranks.ask(prompt)).pulled.refused)
            await ranks.assert_nothing_held()  # The source would be busy until the last grant has ended.
        # The stream may end before the last failure is told on it.
        assert told[: receivers.MAX_FAILURES - 1] == ["failed"] * (receivers.MAX_FAILURES - 1)
        assert told[-1] == "gone"
        answer = await ranks.generate(PROMPT, 8, Plan.LOCAL)
        assert answer.tokens == continuation(PROMPT, 8)
        assert not await has_crashed(ranks.decode)
        await ranks.assert_nothing_held()


async def test_several_answers_to_a_prompt_pull_it_once(deferred, subtests):
    """The others go on from what the first one pulled, or compute where nothing came of it."""
    for carried in ("", "window:6,state"):
        async with Ranks(fake_carried=carried, index_block=8) as ranks:
            for first, fails in ((1, False), (2, True)):
                prompt, granted = await ranks.hold([first, *PROMPT]), []
                pulls, let = core_of(ranks.decode).pulls, deferred()
                grant = pulls.grant
                pulls.grant = lambda *asked, grant=grant, granted=granted: granted.append(1) or grant(*asked)
                tasks = [asyncio.create_task(ranks.ask(prompt)) for _ in range(4)]
                await until(lambda: ranks.decode.sender.writes_in_flight)
                await until(lambda: ranks.decodes[1].load().running == 4)
                if fails:
                    tasks.pop(0).cancel()
                else:
                    let.set()
                    Deferred.waits = None
                told = await asyncio.gather(*tasks)
                let.set()
                Deferred.waits = None
                with subtests.test(carried=carried, fails=fails):
                    assert len(granted) == 1
                    assert sum(each.pulled is not None for each in told) == (not fails)
                    least = min(each.computed_tokens for each in told)
                    most = max(each.computed_tokens for each in told)
                    assert most == (len(prompt) if fails else least) and least <= 8
                pulls.grant = grant
                await ranks.assert_nothing_held()

"""A step that the runner cannot compute costs its sequences; books that cannot be trusted end the rank."""

import asyncio
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import pytest

from engine.paged.core_rank import Prefill, Rank
from engine.pair import FAKE, Pair, core_of, has_crashed
from services.decode.prefill_leg import PrefillLeg
from services.engine.fake import FakeRunner, continuation
from services.engine.paged.model_runner import RunnerFailed, Sampled
from services.engine.paged.sequence import Phase
from services.transfer.local import LocalTransport
from services.transfer.receiving.transfer_watch import TransferWatch
from services.transfer.sending import receivers as failures_module
from services.transfer.transport import Unsettled
from services.values.errors import IsthmusError, NoCapacity, PeerFailed, Unavailable
from services.values.rank import Plan

PROMPT = range(100, 130)


class FailingRunner(FakeRunner):
    """Fails once, at the first batch of so many chunks."""

    fails_with = 0

    def run(self, chunks):
        if self.fails_with and len(chunks) >= self.fails_with:
            self.fails_with = 0
            raise RuntimeError("out of memory")
        return super().run(chunks)


@pytest.fixture
async def pair():
    async with Pair(replace(FAKE, fake_step_s=0.001)) as pair:
        yield pair


def fail(runner, num_chunks):
    runner.__class__ = FailingRunner
    runner.fails_with = num_chunks


async def test_a_step_that_fails_costs_its_sequences_and_the_rank_goes_on(pair):
    fail(core_of(pair.decode).runner, num_chunks=2)
    prompts = [PROMPT, range(200, 240)]
    failed = await asyncio.gather(
        *(pair.generate(prompt, 80, Plan.LOCAL) for prompt in prompts), return_exceptions=True
    )
    for error in failed:
        assert isinstance(error, Unavailable) and str(error) == "the engine failed: RuntimeError"
    await pair.assert_nothing_held()
    for prompt in prompts:
        assert (await pair.generate(prompt, 5, Plan.LOCAL)).tokens == continuation(prompt, 5)
    assert not await has_crashed(pair.decode)


class SlowToFail:
    """A prefill leg that is told of its failure `after` something."""

    def __init__(self, pair, after):
        self._leg, self._after = PrefillLeg(pair.channels, pair.peer, None, ""), after

    @property
    def peer(self):
        return self._leg.peer

    async def __call__(self, request, rendezvous):
        try:
            return await self._leg(request, rendezvous)
        except IsthmusError:
            await self._after()
            raise


async def at_once():
    pass


async def never():
    await asyncio.get_running_loop().create_future()


async def consume(pair, prompt, leg):
    async with aclosing(pair.decode.generate(pair.request(prompt), leg)) as outputs:
        async for _ in outputs:
            pass


@pytest.fixture
def last_word(monkeypatch):
    """Set when the decode rank has heard from the handshake that a transfer failed."""
    heard, on_last_word = asyncio.Event(), TransferWatch.on_last_word

    def note(watch, reason):
        on_last_word(watch, reason)
        heard.set()

    monkeypatch.setattr(TransferWatch, "on_last_word", note)
    return heard


async def tell_why(pair, prompt, after):
    fail(core_of(pair.prefill).runner, num_chunks=1)
    with pytest.raises(PeerFailed, match="the engine failed: RuntimeError"):
        await consume(pair, prompt, SlowToFail(pair, after))
    await pair.assert_nothing_held()
    assert (await pair.generate(prompt, 5)).tokens == continuation(prompt, 5)
    assert not await has_crashed(pair.prefill)


async def test_why_a_prefill_step_failed_is_told_and_both_ranks_go_on(pair, last_word, subtests):
    answers = {"after the last word": last_word.wait, "at once": at_once, "never": never}
    for seed, (answer, after) in enumerate(answers.items()):
        with subtests.test(answer):
            await tell_why(pair, range(100 * seed, 100 * seed + 30), after)


async def test_a_prompt_that_prefill_cannot_hold_is_no_failure_of_prefills(last_word):
    """Its rank is not to be left alone for it, whichever is heard first."""
    async with Pair(FAKE, replace(FAKE, kv_pages=4)) as pair:
        with pytest.raises(NoCapacity):
            await consume(pair, PROMPT, SlowToFail(pair, last_word.wait))
        await pair.assert_nothing_held()


def test_those_that_receive_outlive_a_step_that_fails():
    rank = Rank()
    receiving, computing = rank.submit(PROMPT, 5, receives=True), rank.submit([1, 2, 3], 5)
    fail(rank.runner, num_chunks=1)
    with pytest.raises(RunnerFailed, match="RuntimeError"):
        rank.step()
    assert rank.core.fail_active() == [computing]
    rank.take()
    assert receiving.phase is Phase.RECEIVING
    first = Prefill(rank.runner).run(receiving.ids, rank.reserved[receiving].delta_pages, 0)
    rank.core.landed(receiving, Sampled(first))
    rank.run([receiving])
    assert rank.tokens[receiving] == continuation(PROMPT, 5)


async def test_a_runner_that_does_not_recover_ends_the_rank(pair):
    """One that computes a step in between goes on."""
    runner, compute = core_of(pair.decode).runner, FakeRunner.run

    async def ask():
        await pair.generate(PROMPT, 2, Plan.LOCAL)

    def broken(chunks):
        raise RuntimeError("an illegal memory access was encountered")

    for failures in (4, 4):
        runner.run = broken
        for _ in range(failures):
            with pytest.raises(Unavailable, match="the engine failed"):
                await ask()
        runner.run = partial(compute, runner)
        await ask()
    runner.run = broken
    for _ in range(5):
        with pytest.raises(Unavailable):
            await ask()
    await asyncio.wait_for(pair.decode.crashed(), 20)


async def test_books_that_are_broken_end_the_rank(pair, monkeypatch):
    """What the gate found to fit does not."""
    monkeypatch.setattr(core_of(pair.decode).cache, "extend", lambda pages, num_pages: False)
    with pytest.raises(Unavailable, match="the engine crashed: AssertionError"):
        await pair.generate(PROMPT, 5, Plan.LOCAL)
    await asyncio.wait_for(pair.decode.crashed(), 20)
    with pytest.raises(Unavailable):
        await pair.generate(PROMPT, 5, Plan.LOCAL)


async def test_a_step_that_cannot_be_told_of_ends_the_rank(pair):
    """Else whoever comes behind in the same step would wait for ever."""

    def broken(token_id):
        raise TypeError("not a token")

    async def ask(tell):
        async with pair.outputs(pair.request(PROMPT, 500, Plan.LOCAL), tell=tell) as outputs:
            async for _ in outputs:
                pass

    for told in await asyncio.wait_for(asyncio.gather(ask(broken), ask(None), return_exceptions=True), 20):
        assert isinstance(told, Unavailable) and "the engine crashed: TypeError" in str(told)
    await asyncio.wait_for(pair.decode.crashed(), 20)


async def test_a_sender_on_which_no_write_lands_ends_its_rank(monkeypatch):
    """All transfers would fail, and the rank go on saying that it is ready."""

    def broken(transport, peer, moves):
        raise Unsettled("local protection error")

    monkeypatch.setattr(LocalTransport, "write", broken)
    monkeypatch.setattr(failures_module, "MIN_SPAN_S", 0.0)
    async with Pair(replace(FAKE, write_lease_s=0.3, fence_margin_s=0.1)) as pair:
        for _ in range(failures_module.MAX_FAILURES):
            with pytest.raises((PeerFailed, Unavailable)):
                await pair.generate(PROMPT)
        await asyncio.wait_for(pair.prefill.crashed(), 20)

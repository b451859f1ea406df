"""Decode and prefill engines together, on the fake runner: exact tokens, only the delta moves, no leaks."""

import asyncio
import time
from dataclasses import replace
from functools import partial
from itertools import product

import grpc
import pytest
from prometheus_client import CollectorRegistry

from engine.pair import FAKE, Pair, settled
from services.decode.prefill_leg import PrefillLeg
from services.engine.fake import VOCAB_SIZE as FAKE_VOCABULARY
from services.engine.fake import FakeRunner, continuation
from services.net import servers
from services.prefill.prefill_service import PrefillService
from services.rank.rank_metrics import PrefillMetrics
from services.router.ranks.learned import Speeds
from services.transfer.local import LocalTransport
from services.transfer.sending.transfers import TransferTable
from services.values.errors import Aborted, InvalidRequest, NoCapacity, PeerFailed, Unavailable
from services.values.rank import Plan, RankAddress, RankId, RankKey
from services.values.request import FinishReason
from services.wire import convert_request
from services.wire.isthmus.v1 import prefill_pb2, prefill_pb2_grpc

PAGE_BYTES = FAKE.page_size * 8


async def test_a_conversation_moves_only_its_delta(subtests):
    with subtests.test("a conversation moves only its delta"):
        async with Pair() as pair:
            history = list(range(10, 23))
            previous_len = 0
            for turn in range(5):
                answer = await pair.generate(history, 6)
                assert answer.tokens == continuation(history, 6)
                admitted = answer.admitted
                pages = -(-len(history) // 4) - admitted.decode_prefix_len // 4
                assert admitted.kv_bytes_moved == pages * PAGE_BYTES
                assert admitted.prompt_tokens == admitted.prefill_prefix_len + admitted.computed_tokens
                if turn:
                    assert admitted.decode_prefix_len >= previous_len - 1 - 4
                history += answer.tokens
                previous_len = len(history)
                history += [400 + turn, 3, 5]
            await pair.assert_nothing_held()

    with subtests.test("full hit moves nothing"):
        async with Pair() as pair:
            prompt = list(range(16))
            await pair.generate(prompt, 6)
            answer = await pair.generate(prompt, 6)
            assert answer.admitted.decode_prefix_len == 16
            assert answer.admitted.kv_bytes_moved == 0
            assert answer.tokens == continuation(prompt, 6)

    with subtests.test("a batch is exact"):
        async with Pair() as pair:
            prompts = [[5] * 9 + [i] * (i + 1) for i in range(8)]
            answers = await asyncio.gather(
                *(pair.generate(p, 12, list(Plan)[i % 2]) for i, p in enumerate(prompts))
            )
            assert [a.tokens for a in answers] == [continuation(p, 12) for p in prompts]
            await pair.assert_nothing_held()

    with subtests.test("eos and stop tokens end it"):
        async with Pair() as pair:
            prompt = [1, 2, 3]
            expected = continuation(prompt, 8)
            answer = await pair.generate(prompt, 8, eos_token_ids=(expected[3],))
            assert answer.tokens == expected[: expected.index(expected[3]) + 1]
            assert answer.finished is FinishReason.STOP
            first_is_eos = await pair.generate(prompt, 8, eos_token_ids=(expected[0],))
            assert first_is_eos.tokens == expected[:1]
            await pair.assert_nothing_held()


PAGES, PROMPTS, CACHES, PLANS = [1, 4, 16], [1, 15, 16, 17, 40], ["on", "off"], list(Plan)
# Every two values of every two factors meet in one of these.
SHAPES = [
    (page_size, prompt_len, CACHES[i % 2], PLANS[i // 2 % 2])
    for i, (page_size, prompt_len) in enumerate(product(PAGES, PROMPTS))
]


async def check_shape(page_size, prompt_len, cache, plan):
    settings = replace(
        FAKE,
        page_size=page_size,
        index_block=16,
        kv_pages=256 // page_size,
        decode_cache=cache,
        prefill_cache=cache,
    )
    async with Pair(settings) as pair:
        prompt = [(i * 11) % 500 for i in range(prompt_len)]
        for _ in range(2):  # the second time everything is cached
            answer = await pair.generate(prompt, 9, plan)
            assert answer.tokens == continuation(prompt, 9)
            assert answer.finished is FinishReason.LENGTH
        if cache == "on" and plan is Plan.REMOTE:
            assert answer.admitted.decode_prefix_len == prompt_len // page_size * page_size
        await pair.assert_nothing_held()


async def test_shapes_are_exact(subtests):
    for shape in SHAPES:
        with subtests.test(shape=shape):
            await check_shape(*shape)


@pytest.mark.exact
@pytest.mark.parametrize("shape", list(product(PAGES, PROMPTS, CACHES, PLANS)), ids=str)
async def test_every_shape_is_exact(shape):
    await check_shape(*shape)


async def test_bad_requests_hold_nothing(subtests):
    for plan in list(Plan):
        with subtests.test(plan=plan):
            async with Pair() as pair:
                with pytest.raises(InvalidRequest):
                    await pair.generate([], plan=plan)
                with pytest.raises(InvalidRequest):
                    await pair.generate([1, 512], plan=plan)
                with pytest.raises(NoCapacity):
                    await pair.generate([1] * 300, plan=plan)
                await pair.assert_nothing_held()


async def test_cancelling_in_any_phase_gives_everything_back(subtests):
    for after_s in [0.0, 0.02, 0.1, 0.3, 0.6]:
        with subtests.test(after_s=after_s):
            slow = replace(FAKE, fake_step_s=0.03)
            async with Pair(slow) as pair:
                task = asyncio.create_task(pair.generate(range(40), 20))
                await asyncio.wait([task], timeout=after_s)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
                await pair.assert_nothing_held()
                answer = await pair.generate(range(40), 5)
                assert answer.tokens == continuation(range(40), 5)


async def test_a_stale_generation_is_refused():
    async with Pair() as pair:
        good = pair.peer
        pair.peer = RankAddress(RankId("prefill", 0, 1), good.endpoint)
        with pytest.raises(PeerFailed, match="life"):
            await pair.generate([1, 2, 3])
        pair.peer = good
        assert (await pair.generate([1, 2, 3], 4)).tokens == continuation([1, 2, 3], 4)
        await pair.assert_nothing_held()


async def test_layouts_that_differ_are_refused():
    async with Pair(FAKE, replace(FAKE, page_size=2)) as pair:
        with pytest.raises(PeerFailed, match="page_size"):
            await pair.generate([1, 2, 3])
        await pair.assert_nothing_held()


async def test_no_moment_until_the_first_token_is_told_twice(subtests):
    for plan in Plan:
        with subtests.test(plan=plan):
            async with Pair(replace(FAKE, fake_step_s=0.05)) as pair:
                began = time.monotonic()
                admitted = (await pair.generate(range(20), 1, plan)).admitted
                took_s = time.monotonic() - began
                assert admitted.prefill_compute_s >= 0.05
                assert admitted.rank_s <= took_s

    for plan in Plan:
        with subtests.test("who waits for others' prompts has not begun to compute", plan=plan):
            async with Pair(replace(FAKE, fake_step_s=0.05, shorter_first=0.0)) as pair:
                rank = pair.prefill if plan is Plan.REMOTE else pair.decode
                of_ten_chunks = asyncio.create_task(pair.generate(range(80), 1, plan))
                while not rank.load().pending_tokens:
                    await asyncio.sleep(0.001)
                short = (await pair.generate(range(100, 108), 1, plan)).admitted
                long = (await of_ten_chunks).admitted
                assert short.prefill_queue_s >= 0.05
                assert short.prefill_compute_s < long.prefill_compute_s


async def test_prompts_that_come_at_once_tell_how_fast_their_rank_is(subtests):
    settings = replace(FAKE, kv_pages=512, fake_prompt_token_s=5e-4, chunk_size=32)
    for plan in Plan:
        with subtests.test(plan=plan):
            async with Pair(settings) as pair:
                prompts = [[number, *range(63)] for number in range(8)]
                answers = await asyncio.gather(*(pair.generate(prompt, 1, plan) for prompt in prompts))
                speeds, rank = Speeds(10_000.0, 1e9, settings.chunk_size), RankKey("rank", 0)
                for answer in answers:
                    speeds.learn_rate(rank, answer.admitted, now=0.0)
                computing = pair.prefill if plan is Plan.REMOTE else pair.decode
                # With what a prompt waited for the seven others it was less than half of that.
                assert speeds.rate(rank, now=0.0) > 0.7 * computing.load().prefill_tokens_per_s


@pytest.mark.long
async def test_prefill_legs_that_are_cut_off(subtests):
    with subtests.test("prefill lost in the middle is a failed peer"):
        slow = replace(FAKE, fake_step_s=0.05, write_lease_s=1.0, fence_margin_s=0.2)
        async with Pair(slow) as pair:
            task = asyncio.create_task(pair.generate(range(60), 5))
            await asyncio.wait([task], timeout=0.15)
            await pair.server.stop()
            with pytest.raises(PeerFailed):
                await task
            # The writer may still live: the pages wait in quarantine for the fence, then come back.
            await pair.assert_nothing_held()
            local = await pair.generate(range(60), 5, Plan.LOCAL)
            assert local.tokens == continuation(range(60), 5)

    with subtests.test("an abort that overtakes the cancellation is no failure"):
        async with Pair(replace(FAKE, fake_step_s=0.05)) as pair:
            leg = UncancelledPrefill(pair)
            task = asyncio.create_task(anext(pair.decode.generate(pair.request(range(60)), leg)))
            await leg.began.wait()
            task.cancel()
            with pytest.raises(Aborted, match="the decode rank aborted"):
                await leg.call
            await pair.assert_nothing_held()


async def test_pages_go_out_while_the_loop_stands_still():
    """They go from the engine's thread to the sender's; the loop has no part in it."""
    async with Pair(replace(FAKE, fake_step_s=0.02)) as pair:
        sender, posted = pair.prefill.sender, []
        open_transfer, submit = sender.open_transfer, pair.prefill.submit
        sender.open_transfer = lambda *args, **kwargs: posted.append("open") or open_transfer(*args, **kwargs)
        pair.prefill.submit = lambda seq: posted.append("submit") or submit(seq)
        task = asyncio.create_task(pair.generate(range(60), 4))
        async with asyncio.timeout(20):
            while not any(
                transfer_id.delta is not None for transfer_id in sender._transfers._transfers.values()
            ):
                await asyncio.sleep(0.001)
        assert posted == ["open", "submit"]  # or the first pages would find no room
        deadline_s = time.monotonic() + 20
        while sender.bytes_moved_total < 15 * PAGE_BYTES and time.monotonic() < deadline_s:
            time.sleep(0.001)
        assert sender.bytes_moved_total == 15 * PAGE_BYTES
        assert (await task).tokens == continuation(range(60), 4)
        await pair.assert_nothing_held()


class StuckPrefill:
    """A prefill rank that takes the call and never answers."""

    def __init__(self, peer):
        self.peer = peer

    async def __call__(self, request, rendezvous):
        await asyncio.get_running_loop().create_future()


class UncancelledPrefill:
    """A call that goes on when its caller is cancelled, as if the cancellation were still on its way."""

    def __init__(self, pair):
        self.peer = pair.peer
        self._engine = pair.prefill
        self.began = asyncio.Event()

    async def __call__(self, request, rendezvous):
        self.call = asyncio.create_task(self._engine.prefill(request, rendezvous))
        self.began.set()
        return await asyncio.shield(self.call)


async def test_a_prefill_that_never_answers(subtests):
    with subtests.test("waiting for pages costs nothing"):
        async with Pair(replace(FAKE, kv_pages=16)) as pair:
            turns = 0
            deliver = pair.decode._deliver

            def count(report):
                nonlocal turns
                turns += 1
                deliver(report)

            pair.decode._thread._deliver = count

            async def consume():
                async for _ in pair.decode.generate(pair.request(range(40)), StuckPrefill(pair.peer)):
                    pass

            tasks = [asyncio.create_task(consume()) for _ in range(2)]
            while pair.decode.load().running != 1 or pair.decode.load().waiting != 1:
                await asyncio.sleep(0.001)
            before = turns
            for _ in range(100):  # enough for a thread that spins to take thousands
                await asyncio.sleep(0.001)
            assert turns - before <= 2
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await pair.assert_nothing_held()

    with subtests.test("stopping ends those whose prefill never answers"):
        async with Pair() as pair:

            async def consume():
                async for _ in pair.decode.generate(pair.request(range(9)), StuckPrefill(pair.peer)):
                    pass

            task = asyncio.create_task(consume())
            while pair.decode.load().running == 0:
                await asyncio.sleep(0.001)
            async with asyncio.timeout(10):
                await pair.decode.stop()
            with pytest.raises(Unavailable, match="stopping"):
                await task


async def test_the_pool_is_freed_after_the_transports_are_closed(monkeypatch):
    """A posted write reads the pool until it has ended."""
    closed = []
    for cls in (FakeRunner, LocalTransport):
        close = cls.close
        monkeypatch.setattr(cls, "close", lambda self, close=close: (closed.append(type(self)), close(self)))
    async with Pair() as pair:
        await pair.generate(range(9))
    assert closed == [LocalTransport, LocalTransport, FakeRunner] * 2


async def test_a_sender_that_dies_takes_its_rank_along(monkeypatch):
    """Else the rank would go on being chosen, and fail every request."""
    async with Pair(replace(FAKE, write_lease_s=1.0, fence_margin_s=0.2)) as pair:
        turn = TransferTable.turn

        def broken(self):  # while it writes, and again when the thread winds up
            if any(transfer_id.delta is not None for transfer_id in self._transfers.values()):
                raise ZeroDivisionError
            return turn(self)

        monkeypatch.setattr(TransferTable, "turn", broken)
        with pytest.raises(PeerFailed):
            await pair.generate(range(9))
        async with asyncio.timeout(5):
            await pair.prefill.crashed()
        await pair.server.stop(0)  # as its process would end; while the stream stands it may be writing
        assert (await settled(pair.decode)).quarantined == 0


async def test_answers_that_cannot_be_are_a_failed_peer(subtests):
    with subtests.test("a first token that cannot be is a failed peer"):
        # Next to others in a batch it would cost them their step.
        async with Pair() as pair:
            leg = PrefillLeg(pair.channels, pair.peer, None, "")

            class Lying:
                peer = pair.peer

                async def __call__(self, request, rendezvous):
                    return replace(await leg(request, rendezvous), first_token_id=FAKE_VOCABULARY)

            with pytest.raises(PeerFailed, match="outside the vocabulary"):
                await anext(pair.decode.generate(pair.request(range(9)), Lying()))
            await pair.assert_nothing_held()

    with (
        subtests.test("an answer that makes no sense is a failed peer"),
        pytest.MonkeyPatch.context() as monkeypatch,
    ):
        to_proto = convert_request.prefill_result_to_proto
        monkeypatch.setattr(
            convert_request,
            "prefill_result_to_proto",
            lambda result: to_proto(replace(result, queue_s=float("nan"))),
        )
        async with Pair() as pair:
            with pytest.raises(PeerFailed, match="queue_s"):
                await pair.generate(range(9))
            await pair.assert_nothing_held()


async def test_the_channels_of_ranks_that_come_and_go(subtests):
    with subtests.test("ranks that came and went leave no channel"):
        # Pods get a new address with each life.
        async with Pair() as gone, Pair() as here:
            channels = here.channels
            async with channels.lend(gone.peer.endpoint) as channel:
                await channel.channel_ready()
                await gone.server.stop()
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
                async with channels.lend(here.peer.endpoint) as other:
                    await other.channel_ready()
                    assert len(channels) == 2  # a call holds it
            async with channels.lend("127.0.0.1:1"):
                assert len(channels) == 2  # here, and the new one

    with subtests.test("a rank that is there again is called again at once"):
        # gRPC would go on failing calls until the backoff of the last attempt to connect is over.
        async def call(channels, life, endpoint):
            request = prefill_pb2.WatchLoadRequest(generation=life.generation)
            async with channels.lend(endpoint) as channel:
                watching = prefill_pb2_grpc.PrefillStub(channel).WatchLoad(request)
                await watching.read()
                watching.cancel()

        async with Pair() as here, Pair() as back:
            endpoint = here.peer.endpoint
            await call(here.channels, here.peer.id, endpoint)
            await here.server.stop()
            for _ in range(3):
                with pytest.raises(grpc.aio.AioRpcError):
                    await call(here.channels, here.peer.id, endpoint)
            service = PrefillService(
                back.prefill, back.peer.id, PrefillMetrics(CollectorRegistry(), back.prefill)
            )
            register = partial(prefill_pb2_grpc.add_PrefillServicer_to_server, service)
            server = await servers.open_server(endpoint, register, [])
            await call(here.channels, back.peer.id, endpoint)
            assert len(here.channels) == 1
            await server.stop()

"""A thread that hangs ends the rank: what runs there fails, so that it goes on elsewhere."""

import asyncio
import errno
import os
import threading
from dataclasses import replace
from unittest.mock import Mock

import pytest

from engine.pair import FAKE, Pair, core_of, has_crashed, settled
from services.engine.fake import FakeRunner, continuation
from services.engine.paged.shell import tiers
from services.process.iteration_watch import IterationWatch
from services.tier.slab import FileCalls
from services.transfer.local import LocalTransport
from services.transfer.sending import sender
from services.values.errors import PeerFailed, Unavailable
from services.values.rank import Plan

pytestmark = pytest.mark.long

PROMPT = range(100, 130)
SHORT_LEASE = {"write_lease_s": 1.0, "fence_margin_s": 0.2}
WITHIN_S = 60.0  # a deadline for conditions, never waited out


def test_a_turn_is_counted_for_as_long_as_it_is_the_same():
    watch, counted = IterationWatch(), []
    for happens in ("rests", "", "begins", "", "", "begins", "", "rests", "", "begins", "", ""):
        if happens:
            getattr(watch, happens)()
        watch.look()
        counted.append(watch.looks)
    assert counted == [0, 0, 0, 1, 2, 0, 1, 0, 0, 0, 1, 2]


class HangingRunner(FakeRunner):
    """As a kernel that does not end, until the test is over."""

    def run(self, chunks):
        self.ends.wait()
        return super().run(chunks)


@pytest.fixture
def hang():
    ends = threading.Event()

    def hang(engine):
        core_of(engine).runner.ends = ends
        core_of(engine).runner.__class__ = HangingRunner

    yield hang
    ends.set()


def limited(step_limit_s, **changes):
    return replace(FAKE, step_limit_s=step_limit_s, **changes)


async def test_a_decode_rank_that_hangs_fails_what_runs_and_ends(hang, caplog):
    async with asyncio.timeout(WITHIN_S), Pair(limited(1.0)) as pair:
        hang(pair.decode)
        failed = await asyncio.gather(
            *(pair.generate(range(i, 30 + i), 9, Plan.LOCAL) for i in range(3)), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["the engine crashed: EngineHangs"] * 3
        assert {type(error) for error in failed} == {Unavailable}
        assert pair.decode.load().stalled and not pair.prefill.load().stalled
        await pair.decode.crashed()
        with pytest.raises(Unavailable):
            await pair.generate(PROMPT, 5, Plan.LOCAL)
        assert not await has_crashed(pair.prefill)  # it rests
    # Nobody has waited for the thread, which hangs still; the log says where.
    assert "engine_hangs limit_s=1" in caplog.text and "in run" in caplog.text


async def test_a_prefill_rank_that_hangs_costs_its_peer_one_leg(hang):
    async with asyncio.timeout(WITHIN_S), Pair(limited(0.0), limited(1.0)) as pair:
        hang(pair.prefill)
        with pytest.raises(PeerFailed):
            await pair.generate(PROMPT, 5)
        await pair.prefill.crashed()
        answer = await pair.generate(PROMPT, 5, Plan.LOCAL)
        assert answer.tokens == continuation(PROMPT, 5)
        assert not await has_crashed(pair.decode)


@pytest.fixture
def block(monkeypatch):
    """Writes that never come back, until the test is over; and how many there are."""
    ends, blocked, blocks = threading.Event(), [], []

    def write_or_block(transport, peer, moves):
        if not blocks:
            return write(transport, peer, moves)
        blocked.append(peer)
        ends.wait()
        raise PeerFailed("the test is over, and with it the pools")

    write = LocalTransport.write
    monkeypatch.setattr(LocalTransport, "write", write_or_block)

    def block():
        blocks.append(True)
        return blocked

    yield block
    ends.set()


async def until(condition):
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await asyncio.sleep(0.005)


async def test_a_prefill_rank_whose_sender_hangs_fails_what_it_has_and_ends(block, caplog):
    async with asyncio.timeout(WITHIN_S), Pair(limited(0.0), limited(1.0)) as pair:
        await pair.generate(PROMPT, 5)
        blocked = block()
        remote = [asyncio.create_task(pair.generate(range(i, 30 + i), 9)) for i in range(3)]
        await until(lambda: blocked)  # before or after it has heard of all three
        await until(lambda: pair.prefill.load().running > 0)  # routers see that it is not idle,
        await until(lambda: pair.prefill.load().stalled)  # and then send it nothing more
        failed = await asyncio.gather(*remote, return_exceptions=True)
        assert {type(error) for error in failed} == {PeerFailed}, failed
        assert all("the engine crashed: SenderHangs" in str(error) for error in failed)
        assert await pair.prefill.crashed()
        with pytest.raises(PeerFailed, match=r"sends no KV any more|the rank is stopping"):
            await pair.generate(PROMPT, 5)
        answer = await pair.generate(PROMPT, 5, Plan.LOCAL)
        assert answer.tokens == continuation(PROMPT, 5)
        assert (await settled(pair.decode)).quarantined == 0  # by fence time: its streams have ended
        assert not await has_crashed(pair.decode)
    assert len(blocked) == 1
    # Nobody has waited for the thread, which hangs still; the log says where.
    assert "sender_hangs limit_s=1" in caplog.text and "in write_or_block" in caplog.text


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
async def test_nobody_waits_at_the_end_for_a_sender_that_hangs(limit_s, block, monkeypatch, caplog):
    """Nor is the pool freed, which it may read for as long as the process lives."""
    monkeypatch.setattr(sender, "_END_LIMIT_S", 0.1)
    async with asyncio.timeout(WITHIN_S), Pair(limited(limit_s, **SHORT_LEASE)) as pair:
        blocked = block()
        remote = asyncio.create_task(pair.generate(PROMPT, 5))
        await until(lambda: blocked)
        await pair.prefill.stop()
        with pytest.raises(PeerFailed, match="the rank is stopping"):
            await remote
        assert core_of(pair.prefill).runner.slots.size > 0
        await pair.server.stop()
    assert "sender_hangs limit_s=0.1" in caplog.text


async def test_who_only_receives_keeps_nobody_from_running(block):
    async with asyncio.timeout(WITHIN_S), Pair(limited(0.0, **SHORT_LEASE)) as pair:
        blocked = block()
        count = FAKE.max_running_requests
        remote = [asyncio.create_task(pair.generate(range(i, 8 + i), 4)) for i in range(count + 1)]
        await until(lambda: blocked and pair.decode.load().running == count)
        answers = await asyncio.gather(
            *(pair.generate(range(100 + i, 130), 9, Plan.LOCAL) for i in range(count + 1))
        )
        assert [len(answer.tokens) for answer in answers] == [9] * (count + 1)
        assert not any(task.done() for task in remote)
        for task in remote:
            task.cancel()
        await asyncio.gather(*remote, return_exceptions=True)
        pair.prefill.sender.abandon()  # its end is not what is tested here
        await pair.server.stop()


async def test_who_computes_slowly_does_not_hang_and_without_a_limit_nobody_looks(subtests):
    with subtests.test("who computes slowly does not hang"):
        # A step takes twice its limit here, as the warm-up has shown.
        async with Pair(limited(0.1, fake_step_s=0.2)) as pair:
            assert (await pair.generate(PROMPT[:8], 3, Plan.LOCAL)).tokens == continuation(PROMPT[:8], 3)

    with subtests.test("without a limit nobody looks"):
        async with Pair(limited(0.0, pull="off")) as pair:
            assert pair.decode._watching == []


async def test_a_disk_that_never_answers_holds_up_no_start(tmp_path, monkeypatch, caplog):
    answers, opened, open_file = threading.Event(), [], tiers.open_file

    def hanging(*args):
        answers.wait()
        opened.append(open_file(*args))
        return opened[-1]

    monkeypatch.setattr(tiers, "open_file", hanging)
    settings = limited(1.0, kv_tier=(f"{tmp_path}:1MiB", "memory:1MiB"))
    async with asyncio.timeout(WITHIN_S), Pair(settings, limited(1.0)) as pair:
        assert (await pair.generate(PROMPT, 4)).tokens == continuation(PROMPT, 4)
        assert core_of(pair.decode).tiers.figures().slots  # It is the memory's.
        (hangs,) = [r.getMessage() for r in caplog.records if r.getMessage().startswith("tier_hangs")]
        assert f"where={tmp_path} limit_s=1" in hangs and "in hanging" in hangs
        answers.set()
        while not opened:
            await asyncio.sleep(0.01)
    with pytest.raises(OSError):  # Nobody has it open.
        while True:
            os.fstat(opened[0]._fd)
            await asyncio.sleep(0.01)


async def test_a_tier_whose_disk_fails_at_the_start_is_left_out_until_it_answers(
    tmp_path, monkeypatch, caplog
):
    open_file, is_well = tiers.open_file, False

    def fails(*_):
        raise OSError(errno.EIO, "Input/output error")

    def failing(directory, rank, shape, calls):
        works = is_well and directory.name != "broken"
        return open_file(directory, rank, shape, calls if works else replace(calls, allocate=fails))

    def left_out(rank):
        [metric] = [m for m in rank.metrics() if m.name == "isthmus_tier_left_out"]
        return metric.samples[0].value

    monkeypatch.setattr(tiers, "open_file", failing)
    monkeypatch.setattr(tiers, "_RETRY_S", 0.02)
    broken = f"{tmp_path}/broken:1MiB"
    for others, num_open, num_broken in (((), 0, 0), (("memory:1MiB",), 1, 0), ((broken,), 0, 1)):
        is_well, place = False, f"{tmp_path}/{num_open}{num_broken}:1MiB"
        settings = replace(FAKE, kv_tier=(*others, place), kv_pages=40, index_block=8)
        async with asyncio.timeout(30), Pair(settings) as pair:
            assert (await pair.generate(PROMPT, 4)).tokens == continuation(PROMPT, 4)
            slots = core_of(pair.decode).tiers.figures().slots
            assert (left_out(pair.decode), bool(slots)) == (1 + num_broken, bool(num_open))
            is_well, figures = True, core_of(pair.decode).tiers.figures
            while left_out(pair.decode) > num_broken or figures().slots == slots:
                await asyncio.sleep(0.01)
            for seed in range(12):
                prompt = [(seed * 37 + i) % 500 for i in range(64)]
                answer = await pair.generate(prompt, 4, Plan.LOCAL)
                assert answer.tokens == continuation(prompt, 4)
            while not core_of(pair.decode).tiers.figures().bytes_down:
                await asyncio.sleep(0.01)
            await pair.assert_nothing_held()
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("kv_tier_left_out")]
    # Both ranks of the pairs say so.
    assert len(said) >= 2 and all(f"{tmp_path}" in each and "Input/output error" in each for each in said)


async def test_ranks_say_by_one_name_that_they_share_files(tmp_path, monkeypatch, caplog):
    settings = replace(FAKE, kv_tier=(f"{tmp_path}:1MiB",), kv_tier_shared="on")
    async with Pair(settings) as pair, Pair(replace(settings, kv_tier_shared="off")) as alone:
        assert pair.decode.shared_files == pair.prefill.shared_files != ""
        assert alone.decode.shared_files == ""
    monkeypatch.setattr(tiers, "name_of", Mock(side_effect=OSError(errno.EPERM, "not permitted")))
    async with Pair(settings) as pair:  # They read each other's files all the same, and routers do not know.
        assert pair.decode.has_tiers and pair.decode.shared_files == ""
        await pair.generate(PROMPT, 2)
        assert pair.decode.shared_files != ""  # A look has learnt it since.
    assert "kv_tier_shared_without_name" in caplog.text


async def test_a_rank_whose_disk_fails_at_the_start_reads_others_files_later(tmp_path, monkeypatch):
    is_well, open_file = False, tiers.open_file

    def failing(directory, rank, shape, calls):
        if rank == "decode.1" and not is_well:
            raise tiers.SlabFails("it is not mounted")
        return open_file(directory, rank, shape, calls)

    monkeypatch.setattr(tiers, "open_file", failing)
    monkeypatch.setattr(tiers, "_RETRY_S", 0.02)
    slow = dict(kv_pages=40, index_block=8, fake_prompt_token_s=2e-4)
    settings = replace(FAKE, kv_tier=(f"{tmp_path}:1MiB",), kv_tier_shared="on", **slow)
    async with asyncio.timeout(WITHIN_S), Pair(settings, dp_size=2) as pair:
        owner, other = pair.decodes
        counts = core_of(other).tiers.figures
        prompts = [[(seed * 37 + i) % 500 for i in range(64)] for seed in range(12)]

        async def generate_all(decode):
            for prompt in prompts:
                answer = await pair.generate(prompt, 4, Plan.LOCAL, decode=decode)
                assert answer.tokens == continuation(prompt, 4)

        await generate_all(0)
        await until(lambda: core_of(owner).tiers.figures().held)
        await generate_all(1)
        assert (counts().slots, counts().tokens_shared, other.shared_files) == (0, 0, "")
        is_well = True
        await until(lambda: counts().slots)
        while not counts().tokens_shared:
            await generate_all(1)
        assert other.shared_files == owner.shared_files != ""
        await pair.assert_nothing_held()


async def test_a_tier_whose_disk_answers_again_is_used_again(caplog):
    answers, writes = threading.Event(), []

    def pwrite(fd, buffers, at):
        writes.append(at)
        answers.wait()
        return os.pwritev(fd, buffers, at)

    settings = limited(1.0, kv_tier=("memory:1MiB",), kv_pages=32, index_block=8)
    async with asyncio.timeout(WITHIN_S), Pair(settings, limited(1.0)) as pair:
        rank = core_of(pair.decode).tiers
        rank.thread._slabs[0]._calls = FileCalls(pwrite=pwrite)
        prompts = [range(start, start + 60) for start in (100, 200, 300)]

        async def ask():
            for prompt in prompts:
                answer = await pair.generate(prompt, 4, Plan.LOCAL)
                assert answer.tokens == continuation(prompt, 4)

        while not rank.is_lost:
            await ask()
        assert writes and pair.decode.load().tiers_off and rank.figures().tokens_down == 0
        answers.set()
        while rank.is_lost or not rank.figures().tokens_up:
            await ask()
        said = [record.getMessage().split()[0] for record in caplog.records]
        assert said.count("tier_hangs") == said.count("tier_answers") == 1
        await pair.assert_nothing_held()

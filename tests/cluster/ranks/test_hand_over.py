"""A rank that is drained or stopped hands over what it has cached: the next turns find it elsewhere."""

import asyncio

import pytest

from cluster.harness import FakeCluster, ids_request, prompt_of
from cluster.metrics_page import moves, samples, value
from cluster.ranks.test_drain import command, hold, placed_on, until_excluded
from engine.paged.test_pulls import Held
from exactness.checkpoints import tiny_checkpoint
from services.engine.fake import continuation

__all__ = ["hold"]

TURNS = 6


async def first_turns(cluster, length=61):
    """Conversations by id, each with the prompt of its second turn, and where its first was."""
    turns = {}
    for number in range(TURNS):
        prompt, name = prompt_of(number, length), f"c{number}"
        tokens, finish = await cluster.generate(prompt, conversation_id=name)
        turns[name] = [*prompt, *tokens, 1, 2], placed_on(finish, "decode")
    return turns


def on(turns, rank):
    return {name: prompt for name, (prompt, where) in turns.items() if where == rank}


async def find_its_prefix(etcd_endpoint, model_dir, cluster_name, capsys, how):
    shape = dict(prefill=(1,), decode=(1, 1), plans=("local",))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        turns = await first_turns(cluster)
        leaver = max((where for _, where in turns.values()), key=lambda rank: len(on(turns, rank)))
        (successor,) = {"decode-0/0", "decode-1/0"} - {leaver}
        mine = on(turns, leaver)
        assert mine
        if how == "drained":
            assert await command(cluster, leaver) == 0
            cached = sum(len(prompt) - 3 for prompt in mine.values()) // 4 * 4
            said = capsys.readouterr().out
            assert f"{leaver}: handed over " in said and " cached tokens to 1 rank, left 0" in said
            assert f"{leaver}: drained" in said
            handed = cluster.ranks[leaver].leaving.told()
            assert handed.over and cached - 4 * len(mine) <= handed.handed_tokens <= cached + 4 * len(mine)
        else:
            await cluster.ranks[leaver].drain(1.0)
            await cluster.stop_rank(leaver)
        rank = cluster.ranks[successor]
        for name, prompt in mine.items():
            await cluster.until_indexed(rank.address.id, prompt[: (len(prompt) - 3) // 4 * 4])
            tokens, finish = await cluster.generate(prompt, conversation_id=name)
            assert tokens == continuation(prompt, 8)
            assert placed_on(finish, "decode") == successor
            assert finish.usage.computed_tokens <= 7
        await cluster.assert_nothing_held()


async def test_the_next_turn_finds_its_prefix_on_a_successor(
    etcd_endpoint, model_dir, cluster_name, capsys, subtests
):
    for how in ("drained", "stopped"):
        with subtests.test(how):
            await find_its_prefix(etcd_endpoint, model_dir, f"{cluster_name}-{how}", capsys, how)


async def test_what_runs_is_handed_over_when_it_has_ended(etcd_endpoint, model_dir, cluster_name, hold):
    shape = dict(prefill=(1,), decode=(1, 1), plans=("local",))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        prompt = prompt_of(0, 61)
        hold.end = len(prompt) + 4
        stream = asyncio.create_task(cluster.generate(prompt, 8, conversation_id="c", timeout=100))
        await hold.reached()
        (leaver,) = (name for name, rank in cluster.ranks.items() if rank.intake.num_running)
        draining = asyncio.create_task(command(cluster, leaver))
        await until_excluded(cluster, leaver, "draining")
        assert not draining.done()
        hold.release()
        tokens, finish = await stream
        assert placed_on(finish, "decode") == leaver and await draining == 0
        told = cluster.ranks[leaver].leaving.told()
        assert (told.handed_tokens, told.left_tokens, told.successors) == (68, 0, 1)
        again = [*prompt, *tokens, 1, 2]
        _, finish = await cluster.generate(again, conversation_id="c")
        assert placed_on(finish, "decode") != leaver and finish.usage.computed_tokens == len(again) - 68
        await cluster.assert_nothing_held()


async def check_move(cluster, request, expected):
    """The request's rank is drained after its first tokens. Return the rank that went on."""
    tokens, draining, leaver = [], None, ""
    async for response in cluster.stubs[0].Generate(request, timeout=60):
        tokens.extend(response.token_ids)
        if draining is None and len(tokens) > 3:
            (leaver,) = (name for name, rank in cluster.ranks.items() if rank.intake.num_running)
            draining = asyncio.create_task(command(cluster, leaver))
    assert tokens == expected and await draining == 0
    assert await moves(cluster, "drained") == 1 and await moves(cluster, "retry", "migration") == 0
    (other,) = {"decode-0/0", "decode-1/0"} - {leaver}
    return cluster.ranks[other]


async def test_what_runs_goes_on_elsewhere(etcd_endpoint, model_dir, cluster_name, monkeypatch):
    async def soon():
        pass

    monkeypatch.setattr("services.rank.intake._be_noticed", soon)
    shape = dict(prefill=(1,), decode=(1, 1), plans=("local",), move_running=True, fake_step_s=0.02)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        prompt = prompt_of(0, 61)
        rank = await check_move(cluster, ids_request(prompt, 40), continuation(prompt, 40))
        page = await samples(rank, cluster)
        assert value(page, "isthmus_pulled_tokens_total") >= 60
        await cluster.assert_nothing_held()


@pytest.mark.long
async def test_nobody_takes_over(etcd_endpoint, model_dir, cluster_name, capsys, subtests):
    shape = dict(prefill=(1,), decode=(1, 1), plans=("local",))
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        turns = await first_turns(cluster)
        leaver = turns["c0"][1]
        (other,) = {"decode-0/0", "decode-1/0"} - {leaver}
        with subtests.test("it is not wanted"):
            assert await command(cluster, leaver, "--hand-over-s=0") == 0
            assert "cached tokens" not in capsys.readouterr().out
            assert cluster.ranks[leaver].leaving.told() is None
            assert await command(cluster, leaver, "--undo") == 0
        with subtests.test("the others drain, too"):
            assert await command(cluster, other, "--hand-over-s=0") == 0
            capsys.readouterr()
            assert await command(cluster, leaver) == 0
            assert "cached tokens are left, for no rank of its kind" in capsys.readouterr().out
        with subtests.test("it is put back and drained again"):
            assert await command(cluster, leaver, other, "--undo") == 0
            assert cluster.ranks[leaver].leaving.told() is None
            assert await command(cluster, leaver) == 0
            assert "to 1 rank, left 0" in capsys.readouterr().out
        await cluster.assert_nothing_held()


@pytest.mark.parametrize("carried", ["", pytest.param("window:6,state", marks=pytest.mark.long)])
async def test_what_comes_between_costs_nothing(
    etcd_endpoint, model_dir, cluster_name, capsys, monkeypatch, subtests, carried
):
    """Writes to a successor do not land until something else has happened; no page is lost for that."""
    held = Held(monkeypatch)
    shape = dict(prefill=(1,), decode=(1, 1), plans=("local",), fake_carried=carried)
    async with FakeCluster(etcd_endpoint, model_dir, cluster_name, **shape) as cluster:
        turns = await first_turns(cluster)
        leaver = turns["c0"][1]
        (successor,) = {"decode-0/0", "decode-1/0"} - {leaver}

        async def drained_in_the_middle():
            held.closed = True
            draining = asyncio.create_task(command(cluster, leaver))
            async with asyncio.timeout(20):
                while not cluster.ranks[leaver].engine.sender.writes_in_flight:
                    await asyncio.sleep(0.005)
            return draining

        with subtests.test("it is put back"):
            draining = await drained_in_the_middle()
            assert await command(cluster, leaver, "--undo") == 0
            assert await draining == 1 and "was put back into service" in capsys.readouterr().err
            assert cluster.ranks[leaver].leaving.told() is None
            held.closed = False
            await cluster.assert_nothing_held()
        with subtests.test("the time is over"):
            held.closed = True
            assert await command(cluster, leaver, "--hand-over-s=0.3") == 0
            told = cluster.ranks[leaver].leaving.told()
            assert told.over and told.left_tokens > 0
            held.closed = False
            await cluster.assert_nothing_held()
            assert await command(cluster, leaver, "--undo") == 0
        with subtests.test("the successor is gone"):
            draining = await drained_in_the_middle()
            stopping = asyncio.create_task(cluster.stop_rank(successor))
            assert await draining == 0
            told = cluster.ranks[leaver].leaving.told()
            assert (told.over, told.successors) == (True, 1) and told.left_tokens > 0
            held.closed = False
            await stopping
            await cluster.assert_nothing_held()


@pytest.mark.exact
async def test_a_drawn_answer_is_the_same_whether_it_moves_or_not(etcd_endpoint, cluster_name, monkeypatch):
    async def soon():
        pass

    monkeypatch.setattr("services.rank.intake._be_noticed", soon)
    directory = tiny_checkpoint("llama")
    settings = dict(engine="torch", self_check="off", model=str(directory), num_threads=1)
    shape = dict(prefill=(1,), decode=(1, 1), plans=("local",), move_running=True)
    async with FakeCluster(etcd_endpoint, directory, cluster_name, **shape, **settings) as cluster:
        request = ids_request(prompt_of(0, 61), 400)
        request.sampling.temperature, request.sampling.seed = 1.0, 7
        expected = [
            token async for response in cluster.stubs[0].Generate(request) for token in response.token_ids
        ]
        assert len(set(expected)) > 20
        await check_move(cluster, request, expected)
        await cluster.assert_nothing_held()

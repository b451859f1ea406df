"""Which ranks `isthmus drain` means, and what it says of those that it cannot reach."""

import pytest

from services.cli import drain
from services.cli.drain import DrainConfig, ListedRank, ranks_named, roles_without
from services.settings.flags import load
from services.values.errors import NotFound
from services.values.rank import Generation, RankAddress, RankId, Role


def listed(role, worker, rank, draining=False, model="m", endpoint="127.0.0.1:1"):
    return ListedRank(role, model, RankAddress(RankId(worker, rank, Generation(1)), endpoint), draining)


D00, D01, D1 = (listed(Role.DECODE, worker, rank) for worker, rank in (("d0", 0), ("d0", 1), ("d1", 0)))
P0 = listed(Role.PREFILL, "p0", 0)
ALL = [D1, D01, P0, D00]


@pytest.mark.parametrize(
    "targets,ranks",
    [
        (["d0"], [D00, D01]),
        (["d0/1"], [D01]),
        (["p0/0", "d0/0"], [D00, P0]),
        (["d0/1", "d0"], [D00, D01]),
    ],
)
def test_a_worker_stands_for_its_ranks_and_each_is_asked_once(targets, ranks):
    assert ranks_named(targets, ALL) == ranks


@pytest.mark.parametrize("target", ["d2", "d0/2", "d", "d0/", "", "/0", "d0/00"])
def test_who_is_not_there_is_named_beside_those_that_are(target):
    with pytest.raises(NotFound) as error:
        ranks_named(["d0", target], ALL)
    assert str(error.value) == (f"there is no rank or worker {target!r}; there are d0/0, d0/1, d1/0, p0/0")


def test_where_there_are_many_not_all_are_listed():
    many = [listed(Role.DECODE, f"d{number:02}", 0) for number in range(30)]
    with pytest.raises(NotFound, match=r"d00/0, .* and 10 more$"):
        ranks_named(["x"], many)
    with pytest.raises(NotFound, match=r"no rank is registered$"):
        ranks_named(["x"], [])


def test_a_role_that_nobody_is_left_of_is_told():
    drained = listed(Role.DECODE, "d1", 0, draining=True)
    assert roles_without([D00], ALL) == []
    assert roles_without([P0], ALL) == [("m", Role.PREFILL)]
    assert roles_without([D00, D01], [D00, D01, drained, P0]) == [("m", Role.DECODE)]
    assert roles_without([drained], [drained, D00]) == []


def test_a_rank_of_another_model_stands_in_for_nobody():
    of_n = [listed(role, "n", number, model="n") for number, role in enumerate((Role.DECODE, Role.PREFILL))]
    assert roles_without([D00, D01, D1, P0], [*ALL, *of_n]) == [("m", Role.DECODE), ("m", Role.PREFILL)]
    assert roles_without([D00, *of_n], [*ALL, *of_n]) == [("n", Role.DECODE), ("n", Role.PREFILL)]


async def test_a_rank_that_cannot_be_asked_fails_alone(capsys):
    assert not await drain._answered(drain._drain, DrainConfig(targets=("d0",)), D00)
    said = capsys.readouterr()
    assert said.err.startswith("isthmus drain: d0/0: ") and said.err.count("\n") == 1
    assert not said.out


async def test_a_rank_is_asked_to_drain_once_and_then_only_how_many_run(monkeypatch, capsys):
    asked, running = [], iter([2, 2, 1, 0])

    async def ask(channel, rank, wait_s, only_wait):
        asked.append(only_wait)
        return next(running)

    monkeypatch.setattr(drain, "_ask_to_drain", ask)
    assert await drain._drain(None, D00, 100.0)
    assert asked == [False, True, True, True]
    assert capsys.readouterr().out.splitlines() == [
        "d0/0: draining, 2 running",
        "d0/0: draining, 1 running",
        "d0/0: drained",
    ]


def test_the_flags_stand_on_either_side():
    for argv in (["--undo", "d0", "d1/0"], ["d0", "d1/0", "--undo"]):
        config = load(DrainConfig, argv)
        assert (config.targets, config.undo) == (("d0", "d1/0"), True)
    with pytest.raises(SystemExit):
        load(DrainConfig, ["d0", "--timeout-s=-1"])
    with pytest.raises(SystemExit):
        load(DrainConfig, ["--undo"])

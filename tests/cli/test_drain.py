"""These tests show which ranks `isthmus drain` means, and what it says of those that it cannot reach."""

import pytest

from services.cli import drain
from services.cli.drain import DrainConfig, ListedRank, ranks_named, roles_without
from services.settings.flags import load
from services.values.errors import NotFound
from services.values.rank import Generation, RankAddress, RankId, Role
from services.wire.isthmus.v1 import rank_pb2


def listed(role, worker, rank, draining=False, model="m", endpoint="127.0.0.1:1", generation=1):
    own_id = RankId(worker, int(rank), Generation(generation))
    return ListedRank(role, model, RankAddress(own_id, endpoint), draining)


D00, D01, D1 = (listed(Role.DECODE, worker, rank) for worker, rank in (("d0", 0), ("d0", 1), ("d1", 0)))
P0 = listed(Role.PREFILL, "p0", 0)
ALL = [D1, D01, P0, D00]


async def test_a_rank_is_asked(subtests, capsys, monkeypatch):
    with subtests.test("a rank that cannot be asked fails alone"):
        assert not await drain.answered(drain._drain, DrainConfig(targets=("d0",)), D00, "isthmus drain")
        said = capsys.readouterr()
        assert said.err.startswith("isthmus drain: d0/0: ") and said.err.count("\n") == 1
        assert not said.out
    with (
        subtests.test("a rank is asked to drain once and then only how many run"),
        monkeypatch.context() as patch,
    ):
        asked, running = [], iter([2, 2, 1, 0])

        async def ask(channel, rank, config, wait_s, only_wait):
            asked.append(only_wait)
            return rank_pb2.DrainResponse(running=next(running))

        patch.setattr(drain, "_ask_to_drain", ask)
        assert await drain._drain(None, D00, DrainConfig(targets=("d0",), timeout_s=100.0))
        assert asked == [False, True, True, True]
        assert capsys.readouterr().out.splitlines() == [
            "d0/0: draining, 2 running",
            "d0/0: draining, 1 running",
            "d0/0: drained",
        ]


def test_which_ranks_are_meant(subtests):
    for targets, ranks in [
        (["d0"], [D00, D01]),
        (["d0/1"], [D01]),
        (["p0/0", "d0/0"], [D00, P0]),
        (["d0/1", "d0"], [D00, D01]),
    ]:
        with subtests.test(
            "a worker stands for its ranks and each is asked once", targets=targets, ranks=ranks
        ):
            assert ranks_named(targets, ALL) == ranks
    for target in ["d2", "d0/2", "d", "d0/", "", "/0", "d0/00"]:
        with subtests.test("who is not there is named beside those that are", target=target):
            with pytest.raises(NotFound) as error:
                ranks_named(["d0", target], ALL)
            assert str(error.value) == (
                f"there is no rank or worker {target!r}; there are d0/0, d0/1, d1/0, p0/0"
            )
    with subtests.test("where there are many not all are listed"):
        many = [listed(Role.DECODE, f"d{number:02}", 0) for number in range(30)]
        with pytest.raises(NotFound, match=r"d00/0, .* and 10 more$"):
            ranks_named(["x"], many)
        with pytest.raises(NotFound, match=r"no rank is registered$"):
            ranks_named(["x"], [])
    with subtests.test("the flags stand on either side"):
        for argv in (["--undo", "d0", "d1/0"], ["d0", "d1/0", "--undo"]):
            config = load(DrainConfig, argv)
            assert (config.targets, config.undo) == (("d0", "d1/0"), True)
        with pytest.raises(SystemExit):
            load(DrainConfig, ["d0", "--timeout-s=-1"])
        with pytest.raises(SystemExit):
            load(DrainConfig, ["--undo"])
    with subtests.test("a role that nobody is left of is told"):
        drained = listed(Role.DECODE, "d1", 0, draining=True)
        assert roles_without([D00], ALL) == []
        assert roles_without([P0], ALL) == [("m", Role.PREFILL)]
        assert roles_without([D00, D01], [D00, D01, drained, P0]) == [("m", Role.DECODE)]
        assert roles_without([drained], [drained, D00]) == []
    with subtests.test("a rank of another model stands in for nobody"):
        of_n = [
            listed(role, "n", number, model="n") for number, role in enumerate((Role.DECODE, Role.PREFILL))
        ]
        assert roles_without([D00, D01, D1, P0], [*ALL, *of_n]) == [("m", Role.DECODE), ("m", Role.PREFILL)]
        assert roles_without([D00, *of_n], [*ALL, *of_n]) == [("n", Role.DECODE), ("n", Role.PREFILL)]

"""Ranks change one after the other, and `isthmus role` returns when they are known in their new role."""

import grpc
import pytest

from cli.test_drain import listed
from services.cli import role
from services.cli.role import RoleConfig
from services.settings.flags import load
from services.values.rank import Role


class Cluster:
    """`refused` says no; of those that change, `lost` never register again, and `ended` do in their first."""

    def __init__(self, refused=(), lost=(), ended=()):
        self.asked, self.looks = [], 0
        self._refused, self._lost, self._ended = refused, lost, ended

    async def listed_ranks(self, _config):
        self.looks += 1
        ranks = {str(rank): rank for rank in (listed(Role.DECODE, "d", n) for n in range(3))}
        for name in self.asked if self.looks % 2 else self.asked[:-1]:  # The last one is late.
            if name in ranks and name not in self._refused:
                changed = Role.DECODE if name in self._ended else Role.PREFILL
                rank = listed(changed, *name.split("/"), generation=2)
                ranks |= {name: rank} if name not in self._lost else {name: listed(Role.PREFILL, "d", 0)}
        return list(ranks.values())

    async def change(self, _config, rank):
        self.asked.append(str(rank))
        if str(rank) in self._refused:
            status = grpc.StatusCode.FAILED_PRECONDITION
            raise grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), "it is the last")


def test_ranks_change_one_after_the_other(subtests, capsys, monkeypatch):
    for name, cluster, code, out, err in [
        ("all", Cluster(), 0, ["d/0: prefill", "d/1: prefill", "d/2: prefill"], ""),
        ("but one", Cluster(refused=["d/1"]), 1, ["d/0: prefill", "d/2: prefill"], "d/1: it is the last"),
        ("lost", Cluster(lost=["d/0"]), 1, ["d/1: prefill", "d/2: prefill"], "d/0: it has left as decode"),
        (
            "ended",
            Cluster(ended=["d/1"]),
            1,
            ["d/0: prefill", "d/2: prefill"],
            "another one serves as decode",
        ),
    ]:
        with subtests.test(name), monkeypatch.context() as patch:
            patch.setattr(role, "listed_ranks", cluster.listed_ranks)
            patch.setattr(role, "_change", cluster.change)
            patch.setattr(role, "_POLL_S", 0)
            patch.setattr(role, "_BACK_S", 0.05)
            assert role.run(["d", "prefill"]) == code
            said = capsys.readouterr()
            assert said.out.splitlines() == out
            assert err in said.err and cluster.asked == ["d/0", "d/1", "d/2"]


def test_the_role_comes_last(subtests):
    config = load(RoleConfig, ["d/0", "d/1", "prefill", "--force"])
    assert (config.targets, config.role, config.force) == (("d/0", "d/1"), "prefill", True)
    for argv in (["prefill"], ["d/0"], ["d/0", "both"], ["d/0", "prefill", "--timeout-s=-1"]):
        with subtests.test(argv=argv), pytest.raises(SystemExit):
            load(RoleConfig, argv)

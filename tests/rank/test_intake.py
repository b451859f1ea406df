"""These tests show whether a rank takes new requests: who is told, who is refused, and what undoes it."""

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.engine.paged.shell.adapting import Adapting
from services.rank import intake as intake_module
from services.rank.intake import Intake, RankAdapters
from services.rank.role_change import RoleChange
from services.values.adapter import Adapter
from services.values.errors import ConfigError, StaleGeneration, Unavailable
from services.values.rank import Generation, RankId, Role

RANK = RankId("d", 0, Generation(7))


class Routers:
    """Told by the rank; `reachable` is whether etcd is."""

    def __init__(self):
        self.reachable, self.told = True, []

    async def tell(self, draining):
        self.told.append(draining)
        return self.reachable


@pytest.fixture
def routers():
    return Routers()


@pytest.fixture
def noticed(monkeypatch):
    """Set when the routers have had their time to hear."""
    event = asyncio.Event()
    event.set()
    monkeypatch.setattr(intake_module, "_be_noticed", event.wait)
    return event


@pytest.fixture
def intake(routers, noticed):
    intake = Intake(RANK)
    intake.tell = routers.tell
    return intake


def refuses(intake):
    try:
        intake.check()
    except Unavailable:
        return True
    return False


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0)


async def test_it_refuses_once_the_routers_have_heard_and_waits_for_what_runs(intake, routers, noticed):
    noticed.clear()
    intake.took()
    draining = asyncio.create_task(intake.drain())
    await until(lambda: routers.told == [True])
    assert intake.draining and not refuses(intake)
    intake.took()  # what a router sent before it heard
    noticed.set()
    await until(lambda: refuses(intake))
    intake.left()
    assert not draining.done()
    intake.left()
    assert await draining == 0


async def test_whoever_does_not_wait_is_told_how_many_run(intake):
    intake.took()
    intake.took()
    assert await intake.drain(0.0) == 2
    assert refuses(intake)
    intake.left()
    assert await intake.drain(0.0) == 1
    intake.left()
    assert await intake.drain(0.0) == 0


async def test_in_service_it_has_nothing_to_undo_and_asked_again_it_tells_nobody_twice(intake, routers):
    await intake.undrain()
    assert routers.told == [] and not refuses(intake)
    for _ in range(3):
        assert await intake.drain(0.0) == 0
    assert routers.told == [True]


async def test_undone_it_takes_requests_again(intake, routers):
    intake.took()
    await intake.drain(0.0)
    await intake.undrain()
    assert not refuses(intake) and not intake.draining
    intake.took()
    assert intake.num_running == 2
    assert routers.told == [True, False]


async def test_without_etcd_it_drains_all_the_same_and_tells_when_asked_again(intake, routers):
    routers.reachable = False
    assert await intake.drain() == 0
    assert refuses(intake) and intake.draining  # with its load the routers hear of it
    routers.reachable = True
    await intake.drain(only_wait=True)
    await intake.drain(only_wait=True)
    assert routers.told == [True, True]


async def test_who_undoes_hears_that_the_routers_do_not_know_yet(intake, routers):
    await intake.drain()
    routers.reachable = False
    with pytest.raises(Unavailable, match="etcd could not be told"):
        await intake.undrain()
    assert not refuses(intake)
    routers.reachable = True
    await intake.undrain()
    assert routers.told == [True, False, False]


async def test_whether_a_lost_answer_got_through_is_not_known(intake, routers):
    """Draining was told, and that it got through was not heard: undone, it has to be told."""
    routers.reachable = False
    await intake.drain()
    routers.reachable = True
    await intake.undrain()
    assert routers.told == [True, False]


async def test_who_stops_waiting_changes_nothing(intake, routers, noticed):
    noticed.clear()
    draining = asyncio.create_task(intake.drain())
    await until(lambda: routers.told == [True])
    draining.cancel()
    await asyncio.wait([draining])
    noticed.set()
    await until(lambda: refuses(intake))


async def test_a_rank_that_stops_is_not_put_back(intake, routers):
    intake.took()
    stopping = asyncio.create_task(intake.stop(at_once=False))
    await until(lambda: refuses(intake))
    with pytest.raises(Unavailable, match="is being stopped"):
        await intake.undrain()
    assert refuses(intake) and intake.draining
    intake.left()
    await stopping
    assert routers.told == [True]


async def test_a_rank_that_failed_refuses_before_anybody_has_heard(intake, noticed):
    noticed.clear()
    async with asyncio.timeout(20):
        await intake.stop(at_once=True)
    assert refuses(intake)


def test_another_life_is_not_meant(intake):
    intake.check_life(7)
    with pytest.raises(StaleGeneration):
        intake.check_life(8)


async def test_who_waits_hears_that_it_was_put_back(intake, routers):
    intake.took()
    asked = asyncio.create_task(intake.drain())
    await until(lambda: refuses(intake))
    waiting = [asked, asyncio.create_task(intake.drain(only_wait=True))]
    await asyncio.sleep(0)
    await intake.undrain()
    for wait in waiting:
        with pytest.raises(Unavailable, match="was put back into service"):
            await wait
    assert not refuses(intake)
    assert routers.told == [True, False]


@pytest.mark.parametrize("running", [0, 1])
async def test_who_only_waits_does_not_drain_what_was_put_back_since(intake, routers, running):
    for _ in range(running):
        intake.took()
    await intake.drain(0.0)
    await intake.undrain()
    with pytest.raises(Unavailable, match="was put back into service"):
        await intake.drain(1.0, only_wait=True)
    assert not refuses(intake) and not intake.draining
    assert routers.told == [True, False]


async def test_who_only_waits_learns_what_runs_until_nothing_does(intake):
    intake.took()
    assert await intake.drain(0.0) == 1
    assert await intake.drain(0.0, only_wait=True) == 1
    waiting = asyncio.create_task(intake.drain(only_wait=True))
    await asyncio.sleep(0)
    intake.left()
    assert await waiting == 0


async def test_who_only_waits_waits_for_whoever_drained_it_last(intake):
    intake.took()
    await intake.drain(0.0)
    await intake.undrain()
    await intake.drain(0.0)
    assert await intake.drain(0.0, only_wait=True) == 1


class SlowLoader:
    """It computes with an adapter, or gives it up, when the test says so."""

    def __init__(self):
        self.held, self.may_go_on = set(), asyncio.Event()

    def read(self, name, directory):
        return SimpleNamespace(adapter=Adapter(name, "0" * 32))

    async def put(self, read):
        self.held.add(read.adapter)
        await self.may_go_on.wait()

    async def drop(self, adapter):
        await self.may_go_on.wait()
        self.held.remove(adapter)


async def test_adapters_of_a_caller_that_gives_up_are_loaded_and_unloaded_all_the_same(routers, noticed):
    loader = SlowLoader()
    adapters = RankAdapters(Adapting(loader), Path("/"))
    adapters.tell = routers.tell

    async def given_up(call, begun):
        caller = asyncio.create_task(call)
        while not begun():
            await asyncio.sleep(0)
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        assert caller.cancelled()
        loader.may_go_on.set()

    await given_up(adapters.load("a", "a"), lambda: loader.held)
    again = await adapters.load("a", "a")
    assert adapters.loaded == (again,) and routers.told[0] == (again,)
    loader.may_go_on.clear()
    await given_up(adapters.unload("a"), lambda: not adapters.loaded)
    while loader.held:
        await asyncio.sleep(0)
    assert routers.told[-1] == ()


async def nothing():
    pass


class Change:
    """A rank's change, with others of its role or without, and a next life that may be refused."""

    def __init__(self, intake):
        self.others, self.refusal = ["another"], None
        self.undone, self.meanwhile = 0, nothing
        self.leaving = SimpleNamespace(undo=self.undo)
        self.loader = SlowLoader()
        self.adapting = RankAdapters(Adapting(self.loader), Path("/"))
        self.adapting.tell = intake.tell
        self.under_test = self.of(intake)
        self.under_test.others = self.list_others

    def of(self, intake):
        return RoleChange(Role.DECODE, intake, self.leaving, self.adapting, self.turn)

    def turn(self):
        if self.refusal is not None:
            raise ConfigError(self.refusal)
        return RANK, None

    def undo(self):
        self.undone += 1

    async def list_others(self):
        await self.meanwhile()
        return self.others


@pytest.fixture
def change(intake):
    return Change(intake)


async def test_a_rank_changes_its_role_when_nothing_runs(intake, change):
    intake.took()
    changing = asyncio.create_task(change.under_test.change(Role.PREFILL, None, force=False))
    await until(lambda: refuses(intake))
    assert not change.under_test.decided.is_set()
    intake.left()
    await changing
    assert change.under_test.decided.is_set() and change.under_test.next_life == (RANK, None)
    with pytest.raises(Unavailable, match="changes its role already"):
        await change.under_test.change(Role.PREFILL, None, force=False)


async def test_a_change_that_is_refused_leaves_the_rank_in_service(intake, change, subtests):
    async def check(why, role=Role.PREFILL, wait_s=0.0, error=ConfigError):
        with subtests.test(why):
            with pytest.raises(error, match=why):
                await change.under_test.change(role, wait_s, force=False)
            assert not (refuses(intake) or intake.draining or change.under_test.decided.is_set())

    await check("it is a decode rank already", Role.DECODE)
    change.refusal = "it keeps its role"
    await check("it keeps its role")
    change.refusal, change.others = None, []
    await check("the last decode rank of its model")
    change.others = ["another"]
    intake.took()
    await check("1 requests run there", error=Unavailable)
    await check("1 requests still run there", wait_s=0.01, error=Unavailable)
    with subtests.test("who asked has left"):
        changing = asyncio.create_task(change.under_test.change(Role.PREFILL, None, force=False))
        await until(lambda: refuses(intake))
        changing.cancel()
        await until(lambda: not refuses(intake))
    with subtests.test("one that was drained before stays so"):
        await intake.drain(0.0)
        with pytest.raises(Unavailable, match="still run"):
            await change.under_test.change(Role.PREFILL, 0.01, force=False)
        assert refuses(intake)
    with subtests.test("the last one changes with force"):
        change.others = []
        intake.left()
        await change.under_test.change(Role.PREFILL, 0.0, force=True)
        assert change.under_test.decided.is_set()
    with subtests.test("one that is being stopped"), pytest.raises(Unavailable, match="is being stopped"):
        await intake.stop(at_once=True)
        await change.of(intake).change(Role.PREFILL, 0, force=True)


async def test_a_change_gives_way_to_what_happens_while_requests_end(intake, change, subtests):
    async def changing(meanwhile, error, why):
        intake.took()
        asked = asyncio.create_task(change.under_test.change(Role.PREFILL, None, force=False))
        await until(lambda: refuses(intake))
        await meanwhile()
        intake.left()
        with pytest.raises(error, match=why):
            await asked
        assert not (change.under_test.decided.is_set() or change.undone)

    async def the_other_one_changes():
        if intake.draining:
            change.others = []

    async def the_other_one_drains():
        change.others = []

    async def undrained_at_the_end():
        if intake.draining and not intake.num_running:
            await intake.undrain()

    async def an_operator_drains():
        assert await intake.drain(0.0) == 1

    async def sigterm():
        stopping.append(asyncio.create_task(intake.stop(at_once=False)))
        await until(lambda: intake.is_stopping)

    stopping = []
    with subtests.test("of two that change at once one at most does, and neither waits for its requests"):
        intake.took()
        change.meanwhile = the_other_one_changes
        with pytest.raises(ConfigError, match="the last decode rank"):
            await change.under_test.change(Role.PREFILL, 0.05, force=False)
        assert not refuses(intake)
        intake.left()
    change.others, change.meanwhile = ["another"], nothing
    with subtests.test("the other one is drained"):
        await changing(the_other_one_drains, ConfigError, "the last decode rank")
        assert not refuses(intake)
    change.others = ["another"]
    with subtests.test("an operator drains it: it stays drained"):
        await changing(an_operator_drains, Unavailable, "drained, instead")
        assert refuses(intake)
    await intake.undrain()
    with subtests.test("it is put back just before"):
        change.meanwhile = undrained_at_the_end
        await changing(nothing, Unavailable, "put back into service")
        assert not refuses(intake)
    change.meanwhile = nothing
    with subtests.test("its process ends: what it hands over goes on"):
        await changing(sigterm, Unavailable, "being stopped")
        await stopping[0]


async def test_adapters_neither_come_nor_go_while_a_rank_changes_its_role(intake, change):
    """Otherwise its next life would announce one that is dropped, and compute without it."""
    loading = asyncio.create_task(change.adapting.load("a", "a"))
    await until(lambda: change.loader.held)
    with pytest.raises(Unavailable, match="an adapter is being loaded"):
        await change.under_test.change(Role.PREFILL, None, force=False)
    change.loader.may_go_on.set()
    adapter = await loading
    intake.took()
    with pytest.raises(Unavailable, match="still run"):
        await change.under_test.change(Role.PREFILL, 0.01, force=False)
    await change.adapting.unload("a")
    intake.left()
    await change.under_test.change(Role.PREFILL, None, force=False)
    with pytest.raises(Unavailable, match="changes its role"):
        await change.adapting.load("a", "a")
    assert not change.loader.held and adapter not in change.adapting.loaded

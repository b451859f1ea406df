"""An intake says whether a rank accepts new requests, and how many run on it; operators close and open it.

    open --drain--> routers are notified, what they send is still accepted --they know--> closed
     ^                                       |                                              |
     +-----------------undrain---------------+----------------------------------------------+
    stop (SIGTERM): as drain, but it cannot be undone

A closed intake refuses new requests, and running ones go on. An operator drains, repeats that until nothing
runs, and may undrain, which ends every wait. This state ends with the process, or with the rank's role.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import grpc

from services.engine.base import Adapters, HandsOver
from services.rank.leaving import Leaving
from services.values.adapter import Adapter
from services.values.errors import ConfigError, InvalidRequest, NotFound, StaleGeneration, Unavailable
from services.values.rank import RankId, Role
from services.wire import convert
from services.wire.fields import finite
from services.wire.isthmus.v1 import rank_pb2, rank_pb2_grpc

T = TypeVar("T")

# Routers learn within this time that a rank drains, and until then it accepts what they send.
_NOTICE_S = 0.5

# It notifies all routers whether the rank drains, and returns False if it could not.
Tell = Callable[[bool], Awaitable[bool]]
OPERATIONS = rank_pb2.DESCRIPTOR.services_by_name["Rank"].full_name


class Intake:
    """Each rank has one. `draining` is also sent to the routers with the load, which needs no etcd."""

    def __init__(self, own_id: RankId) -> None:
        self.draining = False
        self.num_running = self.num_ended = 0
        self.num_drains = 0  # So often a drain was asked for, or the end.
        self.tell: Tell = _nobody_is_there
        self.move_all: Callable[[], None] = lambda: None  # It has the routers go on elsewhere with what runs.
        self._own_id = own_id
        self._closed = self._stopping = False
        self._told: bool | None = False  # the last value that the routers know; None: it is not known
        self._settled = asyncio.Event()  # It is set when nothing runs or the rank is in service.
        self._settled.set()
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Intake draining={self.draining} closed={self._closed} running={self.num_running}>"

    def check(self) -> None:
        if self._closed:
            raise Unavailable(f"rank {self._own_id} is draining")

    def took(self) -> None:
        self.num_running += 1
        self._note()

    def left(self) -> None:
        self.num_running -= 1
        self.num_ended += 1
        self._note()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    def check_life(self, generation: int) -> None:
        if generation != self._own_id.generation:
            raise StaleGeneration(f"rank {self._own_id} has been restarted since it was listed")

    async def drain(self, wait_s: float | None = None, only_wait: bool = False) -> int:
        """Accept no new requests; return how many run, which is none unless `wait_s` was too short.

        With `only_wait` it waits for an earlier drain. Raises Unavailable if the drain has been undone, or is
        undone during the wait.
        """
        self.num_drains += not only_wait
        await self._through(self._close(again=only_wait))
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self.settled()
        return self.running_of_drained()

    def running_of_drained(self) -> int:
        """Return how many requests run. Raises Unavailable if the drain has been undone."""
        if not self.draining:
            raise Unavailable(f"rank {self._own_id} was put back into service")
        return self.num_running

    async def settled(self) -> None:
        """Return when nothing runs, or requests are accepted again."""
        while self.draining and self.num_running:
            await self._settled.wait()

    async def undrain(self) -> None:
        """Accept requests again. Raises Unavailable if the rank stops or cannot notify the routers."""
        await self._through(self._open())
        if self._stopping:
            raise Unavailable(f"rank {self._own_id} is being stopped")
        if self._told is not False:
            raise Unavailable(f"rank {self._own_id} takes requests again, but etcd could not be told")

    async def stop(self, at_once: bool) -> None:
        """Drain for good and return when nothing runs. `at_once` does not wait for the routers."""
        self._stopping = True
        self._closed = self._closed or at_once
        await self.drain()

    async def _close(self, again: bool) -> None:
        """Close; `again` notifies the routers again if that failed before, unless the drain is undone."""
        async with self._changing:
            if again and not self.draining:
                return
            self.draining = True
            self._note()
            if await self._say(True) and not self._closed:
                await _be_noticed()
            self._closed = True

    async def _open(self) -> None:
        async with self._changing:
            if not self._stopping:
                self.draining = self._closed = False
                self._note()
                await self._say(False)

    def _note(self) -> None:
        if self.draining and self.num_running:
            self._settled.clear()
        else:
            self._settled.set()

    async def _say(self, draining: bool) -> bool:
        """Return whether the routers are notified, which does not mean that all of them have read it."""
        if self._told is not draining:
            self._told = None  # The write may succeed and its answer be lost.
            if await self.tell(draining):
                self._told = draining
        return self._told is draining

    async def _through(self, change: Coroutine[Any, Any, None]) -> None:
        await _through(change, self._changes)


async def _through(change: Coroutine[Any, Any, T], changes: set[asyncio.Task[T]]) -> T:
    """Complete the change even if the caller is cancelled before that; `changes` has those that run."""
    task = asyncio.create_task(change)
    changes.add(task)
    task.add_done_callback(changes.discard)
    return await asyncio.shield(task)


async def _nobody_is_there(draining: bool) -> bool:
    return False


async def _be_noticed() -> None:
    await asyncio.sleep(_NOTICE_S)


class RankAdapters:
    """An operator loads and unloads a rank's adapters; routers know of those that it registers. A caller that
    gives up stops neither."""

    def __init__(self, adapters: Adapters | None, root: Path | None) -> None:
        """`root` has all that may be loaded; None means that nothing may."""
        self.tell: Callable[[tuple[Adapter, ...]], Awaitable[bool]] | None = None
        self._adapters = adapters
        self._root = root
        self._frozen = False
        self._changing = asyncio.Lock()
        self._loading = set[asyncio.Task[Adapter]]()
        self._unloading = set[asyncio.Task[None]]()

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return () if self._adapters is None else self._adapters.loaded

    async def load(self, name: str, directory: str) -> Adapter:
        """Raise ConfigError, InvalidRequest and Unavailable as the engine does."""
        if self._adapters is None or self._root is None:
            raise ConfigError("this rank loads no adapters while it runs: --lora-dir allows that")
        path = (self._root / directory).resolve()
        if not path.is_relative_to(self._root.resolve()):
            raise InvalidRequest(f"{directory} is not below --lora-dir")
        return await _through(self._load(self._adapters, name, path), self._loading)

    async def unload(self, name: str) -> None:
        """Raise NotFound, and Unavailable where etcd could not be told."""
        await _through(self._unload(name), self._unloading)

    def freeze(self) -> None:
        """Have none loaded or unloaded until `thaw`. Raises Unavailable where one is just now."""
        if self._changing.locked():
            raise Unavailable("an adapter is being loaded or unloaded")
        self._frozen = True

    def thaw(self) -> None:
        self._frozen = False

    def _check(self) -> None:
        if self._frozen:
            raise Unavailable("the rank changes its role")

    async def _load(self, adapters: Adapters, name: str, path: Path) -> Adapter:
        async with self._changing:
            self._check()
            adapter = await adapters.load(name, path)
            await self._told(self.loaded)
        return adapter

    async def _unload(self, name: str) -> None:
        async with self._changing:
            self._check()
            left = tuple(adapter for adapter in self.loaded if adapter.name != name)
            if self._adapters is None or len(left) == len(self.loaded):
                raise NotFound(f"adapter {name!r} is not loaded on this rank")
            await self._told(left)
            await _be_noticed()
            await self._adapters.unload(name)

    async def _told(self, adapters: tuple[Adapter, ...]) -> None:
        if self.tell is None or not await self.tell(adapters):
            raise Unavailable("etcd could not be told of the adapters; call it again")


class Operations(rank_pb2_grpc.RankServicer):
    def __init__(
        self,
        intake: Intake,
        hands_over: HandsOver | None,
        leaving: Leaving,
        adapting: "RankAdapters",
        change_role: Callable[[Role, float | None, bool], Awaitable[None]],
    ) -> None:
        self._intake = intake
        self._adapting = adapting
        self._change_role = change_role
        self._hands_over = hands_over
        self._leaving = leaving

    async def Drain(
        self, request: rank_pb2.DrainRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.DrainResponse:
        self._intake.check_life(request.generation)
        wait_s = finite("drain.wait_s", request.wait_s) if request.HasField("wait_s") else None
        if not request.only_wait:
            asked_s = request.hand_over_s if request.HasField("hand_over_s") else None
            self._leaving.begin(None if asked_s is None else finite("drain.hand_over_s", asked_s))
        clock = asyncio.get_running_loop().time
        began = clock()
        await self._intake.drain(wait_s, request.only_wait)
        left_s = None if wait_s is None else max(0.0, wait_s - (clock() - began))
        with suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._leaving.ended()
        running = self._intake.running_of_drained()
        return rank_pb2.DrainResponse(running=running, hand_over=self._leaving.told())

    async def Undrain(
        self, request: rank_pb2.UndrainRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.UndrainResponse:
        self._intake.check_life(request.generation)
        if not self._intake.is_stopping:  # Otherwise it leaves anyway.
            self._leaving.undo()
        await self._intake.undrain()
        return rank_pb2.UndrainResponse()

    async def TakeOver(
        self, request: rank_pb2.TakeOverRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.TakeOverResponse:
        self._intake.check_life(request.generation)
        asked = convert.take_over_from_proto(request)
        if self._intake.draining or self._hands_over is None:
            raise Unavailable("this rank takes nothing over: it drains, or does not pull")
        taken = await self._hands_over.take_over(asked)
        self._leaving.metrics.took(taken)
        return convert.taken_over_to_proto(taken)

    async def LoadAdapter(
        self, request: rank_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.LoadAdapterResponse:
        self._intake.check_life(request.generation)
        adapter = await self._adapting.load(request.name, request.directory)
        return rank_pb2.LoadAdapterResponse(adapter=convert.adapter_to_proto(adapter))

    async def UnloadAdapter(
        self, request: rank_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.UnloadAdapterResponse:
        self._intake.check_life(request.generation)
        await self._adapting.unload(request.name)
        return rank_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: rank_pb2.ListAdaptersRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.ListAdaptersResponse:
        self._intake.check_life(request.generation)
        adapters = map(convert.adapter_to_proto, self._adapting.loaded)
        return rank_pb2.ListAdaptersResponse(adapters=adapters)

    async def SetRole(
        self, request: rank_pb2.SetRoleRequest, context: grpc.aio.ServicerContext
    ) -> rank_pb2.SetRoleResponse:
        self._intake.check_life(request.generation)
        wait_s = finite("set_role.wait_s", request.wait_s) if request.HasField("wait_s") else None
        if request.role not in [role.value for role in Role]:
            raise InvalidRequest("set_role.role", f"must be prefill or decode; got {request.role!r}")
        await self._change_role(Role(request.role), wait_s, request.force)
        return rank_pb2.SetRoleResponse()

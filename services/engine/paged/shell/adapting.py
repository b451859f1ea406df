"""Adapters come and go while an engine serves.

    load   --> read beside the loop --> the engine computes with it --> requests may name it
    unload --> no request may name it --> those that run have ended --> the engine gives it up

The two wait for each other. What a rank has cached with an adapter stays: its name and digest are part of
what separates KV.
"""

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from services.values.adapter import Adapter
from services.values.errors import InvalidRequest, NotFound, Unavailable
from services.values.request import GenerationRequest

if TYPE_CHECKING:
    from services.engine.paged.shell.paged_engine import PagedEngine


class Loader(Protocol):
    """It reads adapters, has an engine compute with them, and has it give them up."""

    def read(self, name: str, directory: Path) -> Any:
        """Read it, on any thread, as RunnerAdapters does."""

    async def put(self, read: Any) -> None: ...

    async def drop(self, adapter: Adapter) -> None: ...


class ThreadLoader:
    """The engine's thread computes with what its runner reads."""

    def __init__(self, engine: "PagedEngine") -> None:
        self._engine = engine

    def read(self, name: str, directory: Path) -> Any:
        return self._engine.runner.adapters.read(name, directory)

    async def put(self, read: Any) -> None:
        await self._engine.ask(lambda core: core.runner.adapters.put(read))

    async def drop(self, adapter: Adapter) -> None:
        await self._engine.ask(lambda core: core.runner.adapters.drop(adapter))


class Adapting:
    """It implements services.engine.base.Adapters."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._named: dict[str, Adapter] = {}
        self._changing = asyncio.Lock()
        self._running: dict[Adapter, int] = {}
        self._one_ended = asyncio.Event()

    def begin(self, loaded: Iterable[Adapter]) -> None:
        self._named = {adapter.name: adapter for adapter in loaded}

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        return tuple(sorted(self._named.values()))

    def entered(self, request: GenerationRequest) -> None:
        """Raise Unavailable where the rank has not loaded what the request names."""
        if (adapter := request.adapter) is not None:
            if self._named.get(adapter.name) != adapter:
                raise Unavailable(f"adapter {adapter} is not loaded on this rank")
            self._running[adapter] = self._running.get(adapter, 0) + 1

    def left(self, request: GenerationRequest) -> None:
        if (adapter := request.adapter) is not None:
            self._running[adapter] -= 1
            self._one_ended.set()

    async def load(self, name: str, directory: Path) -> Adapter:
        async with self._changing:
            read = await asyncio.to_thread(self._loader.read, name, directory)
            adapter: Adapter = read.adapter
            before = self._named.get(name)
            if before not in (None, adapter):
                raise InvalidRequest(f"adapter {before} is loaded, with other weights; unload it first")
            if before is None:
                await self._loader.put(read)
                self._named[name] = adapter
            return adapter

    async def unload(self, name: str) -> None:
        adapter = self._named.pop(name, None)
        if adapter is None:
            raise NotFound(f"adapter {name!r} is not loaded on this rank")
        async with self._changing:
            while self._running.get(adapter):
                self._one_ended.clear()
                await self._one_ended.wait()
            self._running.pop(adapter, None)
            await self._loader.drop(adapter)

"""Transport over NIXL (UCX underneath): RDMA, TCP, or shared memory, whatever the two hosts have.

The only import of nixl, and imported by choose.py only. Seen with nixl 1.5.1, and relied upon here:

- Releasing a handle whose write is under way returns without an error, and the bytes go on landing
  (TCP). So a write is never released before it has ended. What ends it is the end of its agent, which lives
  as long as a write of it that somebody holds.
- A failed handle says nothing of all its descriptors: NIXL asks about one after the other and tells the
  first failure, and where a post fails it lets go of what is on the wire already, without waiting for it.
  So the end of a failed write is not known (base.Unsettled).
- Between processes of one host UCX copies inside `transfer` itself, in the caller's thread.
- The agent's Python constructor fixes the progress thread's pause at 0, where it polls without end: a
  whole core for every idle agent. With any other pause it sleeps until UCX has an event for it. (On two
  cores that also takes a write between two processes from 5 to 13 GB/s.)
- Without that thread nothing answers a peer's first connection, so it cannot be done without.
- Descriptors prepared once for all pages (prep_xfer_dlist) save nothing that can be measured beside
  a list built per write from a numpy array: 0.1 ms per thousand descriptors either way.
"""

import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_xfer_handle

from services.kv.transfer_plan import PageMove
from services.transfer.base import PeerName, Unsettled
from services.transfer.extents import Extents, extents_of
from services.transfer.nixl_settings import UCX, NixlSettings
from services.transfer.ucx_log import ucx_log
from services.values.errors import ConfigError, PeerFailed
from services.values.kv import PoolMemory
from services.values.kv_path import KvPath, KvPathKind

log = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_POLL_S = 0.001
_PROGRESS_PAUSE_US = 1000  # UCX's events end it early
_DEFAULTS = NixlSettings()

# The bindings have no common base for their errors.
_NIXL_ERRORS: tuple[type[Exception], ...] = tuple(
    value for value in vars(_bindings).values() if isinstance(value, type) and issubclass(value, Exception)
)


@contextmanager
def _renaming(what: str, error_class: type[Exception] = PeerFailed) -> Iterator[None]:
    try:
        yield
    except _NIXL_ERRORS as error:
        raise error_class(f"{what}: {error}") from error


class NixlWrite:
    """Implements services.transfer.base.Write."""

    def __init__(
        self,
        agent: nixl_agent,
        handle: nixl_xfer_handle,
        size_bytes: int,
        on_landed: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_landed = on_landed
        self._agent = agent
        self._handle = handle
        self._size_bytes = size_bytes
        self._state = "PROC"  # NIXL's word for under way; DONE and ERR are final

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def post(self) -> None:
        self._ask(self._agent.transfer)

    def poll(self) -> bool:
        if self._state == "PROC":
            self._ask(self._agent.check_xfer_state)
        if self._state == "ERR":
            raise Unsettled("the write failed")
        return self._state == "DONE"

    def release(self) -> None:
        deadline_s = time.monotonic() + _RELEASE_TIMEOUT_S
        while not self._ended():
            if time.monotonic() >= deadline_s:
                raise Unsettled(f"a write of {self._size_bytes} bytes is still under way")
            time.sleep(_POLL_S)
        with _renaming("NIXL does not give up an ended write", Unsettled):
            self._handle.release()

    def _ask(self, verb: Callable[[nixl_xfer_handle], str]) -> None:
        try:
            with _renaming("the write failed", Unsettled):
                self._state = verb(self._handle)
        except Unsettled:
            self._state = "ERR"
            raise
        if self._state == "DONE":
            self._on_landed()

    def _ended(self) -> bool:
        try:
            return self.poll()
        except Unsettled:
            return True


class NixlTransport:
    """Implements services.transfer.base.Transport. Making one takes about half a second."""

    def __init__(self, name_prefix: str = "isthmus", settings: NixlSettings = _DEFAULTS) -> None:
        """Raises ConfigError, where NIXL has no such backend, for one."""
        self._settings = settings
        self._agent = open_agent(f"{name_prefix}-{secrets.token_hex(8)}", settings)
        self._paths: tuple[KvPath, ...] = ()
        self._memory: PoolMemory | None = None
        self._page_bytes = 0
        self._registered: _bindings.nixlRegDList | None = None
        self._peers: dict[PeerName, PoolMemory] = {}
        self._names: dict[bytes, PeerName] = {}

    @property
    def name(self) -> str:
        return "nixl"

    @property
    def paths(self) -> tuple[KvPath, ...]:
        return self._paths

    def register(self, memory: PoolMemory, page_bytes: int) -> None:
        region = (memory.base_address, memory.num_pages * page_bytes, memory.device_id, "")
        with _renaming(f"NIXL cannot register {region[1]} bytes of {memory.kind}", ConfigError):
            self._registered = self._agent.register_memory([region], memory.kind)
        self._memory, self._page_bytes = memory, page_bytes

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes, memory: PoolMemory) -> PeerName:
        if metadata not in self._names:
            with _renaming("NIXL does not accept the peer's metadata"):
                name = self._agent.add_remote_agent(metadata)
            self._names[metadata] = PeerName(name.decode() if isinstance(name, bytes) else name)
        peer = self._names[metadata]
        self._peers[peer] = memory
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        if self._peers.pop(peer, None) is None:
            return
        self._names = {metadata: name for metadata, name in self._names.items() if name != peer}
        with _renaming("NIXL does not forget the peer"):
            self._agent.remove_remote_agent(peer)

    def write(self, peer: PeerName, moves: Sequence[PageMove]) -> NixlWrite:
        assert self._memory is not None, "register comes first"
        if peer not in self._peers:
            raise PeerFailed(f"no peer {peer} is known")
        memory = self._peers[peer]
        source, target = extents_of(moves, self._memory, memory, self._page_bytes)
        with _renaming("the write was refused"):
            handle = self._agent.initialize_xfer(
                "WRITE", self._descriptors(source, self._memory), self._descriptors(target, memory), peer
            )
        write = NixlWrite(self._agent, handle, int(source[:, 1].sum()), self._look_at_paths)
        try:
            write.post()
        except Unsettled:
            write.release()
            raise
        return write

    def _look_at_paths(self) -> None:
        known, self._paths = self._paths, known_paths(self._agent.name, self._page_bytes, self._settings)
        for path in self._paths:
            if path not in known:
                self._settings.tell(path)

    def close(self) -> None:
        try:
            for peer in list(self._peers):
                self.remove_peer(peer)
            if self._registered is not None:
                with _renaming("NIXL does not deregister the pool"):
                    self._agent.deregister_memory(self._registered)
        finally:
            del self._agent  # ends its threads, once there is no write of it any more

    def _descriptors(self, extents: Extents, memory: PoolMemory) -> _bindings.nixlXferDList:
        """(n, 3), as NIXL wants them: address, bytes, device."""
        device = np.full((len(extents), 1), memory.device_id, dtype=np.uint64)
        return self._agent.get_xfer_descs(np.hstack((extents, device)), memory.kind)


def known_paths(agent: str, piece_bytes: int, settings: NixlSettings) -> tuple[KvPath, ...]:
    """By what pieces of that size have been written by an agent that `settings` made."""
    if settings.backend != UCX:
        return (KvPath(KvPathKind.UNKNOWN, "", settings.backend),)
    return ucx_log().paths(agent, piece_bytes) if settings.tells_paths else ()


def open_agent(name: str, settings: NixlSettings = _DEFAULTS) -> nixl_agent:
    """An agent with a backend and a progress thread that sleeps when there is nothing to do.

    Raises:
        ConfigError: it cannot be started.
    """
    _quieten()
    with _renaming("cannot start a NIXL agent", ConfigError), telling_paths(settings):
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        _check_backend(agent, settings.backend)
        let_sleep(agent, one_thread=True)
        agent.create_backend(settings.backend, settings.parameters)
    return agent


def telling_paths(settings: NixlSettings) -> AbstractContextManager[None]:
    """Around the making of a process's first agent, for `known_paths`."""
    return ucx_log().told_to_ucx() if settings.tells_paths else nullcontext()


def _check_backend(agent: nixl_agent, backend: str) -> None:
    plugins = agent.get_plugin_list()
    if backend not in plugins:
        raise ConfigError(f"--nixl-backend={backend}: NIXL has no such plugin here, but {', '.join(plugins)}")


def let_sleep(agent: nixl_agent, *, one_thread: bool) -> None:
    """Have the progress thread of an agent that has no backend yet sleep when there is nothing to do.

    `one_thread`: only one thread will use the agent; else NIXL takes care.
    """
    config = _bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_PAUSE_US  # nixl_agent_config has no word for it
    config.syncMode = _bindings.NIXL_THREAD_SYNC_NONE if one_thread else _bindings.NIXL_THREAD_SYNC_STRICT
    agent.agent = _bindings.nixlAgent(agent.name, config)


def _quieten() -> None:
    """Before the first agent is made: UCX reads its environment when it is loaded, which is then."""
    os.environ.setdefault("UCX_LOG_LEVEL", "error")
    logger = logging.getLogger("nixl")
    logger.handlers.clear()  # NIXL's own prints to stdout
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)

"""This transport uses NIXL (with UCX underneath) over RDMA, TCP, or shared memory, as the two hosts allow.

This module alone imports nixl, and only open_transport.py imports this module. We rely on this behaviour of
nixl 1.5.1:

- Releasing a handle whose write is under way returns without an error, and the bytes go on landing
  (TCP). So a write is never released before it has ended. Only the end of its agent ends it, and an agent
  lives as long as anybody holds a write of it.
- A failed handle does not give the state of all its descriptors: NIXL checks one after the other and reports
  the first failure, and when a post fails it releases what is on the wire already, without waiting.
  So the end of a failed write is unknown (transport.Unsettled).
- Between processes of one host UCX copies inside `transfer` itself, in the caller's thread.
- The agent's Python constructor fixes the progress thread's pause at 0, with which it polls without end and
  takes a whole core for every idle agent. With any other pause it sleeps until UCX has an event for it. (On
  two cores that also raises a write between two processes from 5 to 13 GB/s.)
- The progress thread is necessary: without it nothing answers a peer's first connection.
- Preparing descriptors once for all pages (prep_xfer_dlist) saves nothing that can be measured, compared to
  a list built for each write from a numpy array: 0.1 ms per thousand descriptors either way.
"""

import ctypes
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import numpy as np
from nixl import _bindings
from nixl._api import nixl_agent, nixl_agent_config, nixl_xfer_handle

from services.kv.transfer_plan import PageMove
from services.transfer.nixl_settings import UCX, NixlSettings, check_parameters
from services.transfer.transport import CopiedPieces, Extents, PeerName, RankPools, Unsettled, pieces_of
from services.transfer.ucx_log import quieten, ucx_log
from services.values.errors import ConfigError, PeerFailed
from services.values.kv import KvPath, KvPathKind, PoolMemory

log = logging.getLogger(__name__)

_RELEASE_TIMEOUT_S = 2.0
_POLL_S = 0.001
# LIBFABRIC's thread always sleeps for this long, and nothing else notices the end of a write. UCX's events
# end the pause early, but over TCP a rank that only listens was seen to answer late with a longer pause.
_PAUSE_US = 1000
# UCX's thread pauses so long on a rank that writes, which is longer than most posts take. After the pause the
# thread polls, and joins in a copy that the caller's thread makes, segment by segment: each then waits,
# busily, for the other's lock. (With 100 ms instead, first writes to a peer took 60 ms longer.)
_WRITERS_PAUSE_US = 30_000
_DEFAULTS = NixlSettings()

# The bindings' errors have no common base class. Errors of the telemetry, in C++, come as RuntimeError.
_NIXL_ERRORS: tuple[type[Exception], ...] = (
    RuntimeError,
    *(
        value
        for value in vars(_bindings).values()
        if isinstance(value, type) and issubclass(value, Exception)
    ),
)
# Importing nixl sets this to False for the whole process, which would hide errors in log handlers.
logging.raiseExceptions = True


@contextmanager
def _renaming(what: str, error_class: type[Exception] = PeerFailed) -> Iterator[None]:
    try:
        yield
    except _NIXL_ERRORS as error:
        raise error_class(f"{what}: {error}") from error


class NixlWrite:
    """It implements services.transfer.transport.Write."""

    def __init__(
        self,
        agent: nixl_agent,
        handle: nixl_xfer_handle,
        group_bytes: tuple[int, ...],
        on_landed: Callable[[], object] = lambda: None,
    ) -> None:
        self._on_landed = on_landed
        self._agent = agent
        self._handle = handle
        self.group_bytes = group_bytes
        self._state = "PROC"  # PROC is NIXL's name for under way; DONE and ERR are final.

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
                raise Unsettled(f"a write of {sum(self.group_bytes)} bytes is still under way")
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
    """It implements services.transfer.transport.Transport. Making one takes about half a second."""

    name = "nixl"

    def __init__(self, name_prefix: str = "isthmus", settings: NixlSettings = _DEFAULTS) -> None:
        """Make the agent and its backend.

        Raises:
            ConfigError: they cannot be made, for example because NIXL does not have this backend.
        """
        self._settings = settings
        self._agent = open_agent(f"{name_prefix}-{secrets.token_hex(8)}", settings)
        self.paths: tuple[KvPath, ...] = ()
        self._pools: RankPools | None = None
        self._registered: _bindings.nixlRegDList | None = None
        self._peers: dict[PeerName, RankPools] = {}
        self._names: dict[bytes, PeerName] = {}

    def register(self, memories: Sequence[PoolMemory], unit_bytes: Sequence[int]) -> None:
        pools = RankPools(tuple(memories), tuple(unit_bytes))
        if len(pools.kinds) > 1:  # All descriptors of a list must be of one kind.
            raise ConfigError(f"the pools must lie in memory of one kind, not {', '.join(pools.kinds)}")
        regions = [
            (memory.base_address, memory.num_pages * size, memory.device_id, "")
            for memory, size in zip(memories, unit_bytes, strict=True)
        ]
        size_bytes, kind = sum(region[1] for region in regions), pools.kinds[0]
        with _renaming(f"NIXL cannot register {size_bytes} bytes of {kind}", ConfigError):
            self._registered = self._agent.register_memory(regions, kind)
        self._pools = pools

    def metadata(self) -> bytes:
        return bytes(self._agent.get_agent_metadata())

    def add_peer(self, metadata: bytes, memories: Sequence[PoolMemory]) -> PeerName:
        assert self._pools is not None, "register comes first"
        pools = self._pools.of_peer(memories)
        if len(pools.kinds) > 1:
            raise PeerFailed(f"the peer's pools must lie in memory of one kind, not {', '.join(pools.kinds)}")
        if metadata not in self._names:
            with _renaming("NIXL does not accept the peer's metadata"):
                name = self._agent.add_remote_agent(metadata)
            self._names[metadata] = PeerName(name.decode() if isinstance(name, bytes) else name)
        peer = self._names[metadata]
        self._peers[peer] = pools
        return peer

    def remove_peer(self, peer: PeerName) -> None:
        if self._peers.pop(peer, None) is None:
            return
        self._names = {metadata: name for metadata, name in self._names.items() if name != peer}
        with _renaming("NIXL does not forget the peer"):
            self._agent.remove_remote_agent(peer)

    def write(self, peer: PeerName, moves: Sequence[PageMove]) -> NixlWrite:
        assert self._pools is not None, "register comes first"
        if peer not in self._peers:
            raise PeerFailed(f"no peer {peer} is known")
        own, theirs = self._pools, self._peers[peer]
        pieces = pieces_of(moves, own, theirs)
        source = self._descriptors(pieces, pieces.source, own)
        target = self._descriptors(pieces, pieces.target, theirs)
        with _renaming("the write was refused"):
            handle = self._agent.initialize_xfer("WRITE", source, target, peer)
        group_bytes = pieces.group_bytes(len(theirs.memories))
        write = NixlWrite(self._agent, handle, group_bytes, self._look_at_paths)
        try:
            write.post()
        except Unsettled:
            write.release()
            raise
        return write

    def _look_at_paths(self) -> None:
        assert self._pools is not None
        known, self.paths = self.paths, self._known_paths(self._pools.unit_bytes)
        for path in self.paths:
            if path not in known:
                self._settings.tell(path)

    def _known_paths(self, piece_bytes: Iterable[int]) -> tuple[KvPath, ...]:
        paths = (known_paths(self._agent.name, size, self._settings) for size in dict.fromkeys(piece_bytes))
        return tuple(dict.fromkeys(path for of_size in paths for path in of_size))

    def close(self) -> None:
        try:
            for peer in list(self._peers):
                self.remove_peer(peer)
            if self._registered is not None:
                with _renaming("NIXL does not deregister the pools"):
                    self._agent.deregister_memory(self._registered)
        finally:
            del self._agent  # Its threads end once nobody holds a write of it.

    def _descriptors(
        self, pieces: CopiedPieces, extents: Extents, pools: RankPools
    ) -> _bindings.nixlXferDList:
        """Return one side of the pieces in NIXL's form, (n, 3): address, bytes, device."""
        devices = np.array([memory.device_id for memory in pools.memories], dtype=np.uint64)
        return self._agent.get_xfer_descs(np.column_stack((extents, devices[pieces.groups])), pools.kinds[0])


def known_paths(agent: str, piece_bytes: int, settings: NixlSettings) -> tuple[KvPath, ...]:
    if settings.backend != UCX:
        return (KvPath(KvPathKind.UNKNOWN, "", settings.backend),)
    return ucx_log().paths(agent, piece_bytes) if settings.writes else ()


def open_agent(name: str, settings: NixlSettings = _DEFAULTS) -> nixl_agent:
    """Return an agent with a backend, and with a progress thread that sleeps when there is nothing to do.

    Raises:
        ConfigError: it cannot be started.
    """
    quieten()
    with _renaming("cannot start a NIXL agent", ConfigError), telling_paths(settings):
        agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
        _check_backend(agent, settings)
        let_sleep(agent, settings, one_thread=True)
        _create_backend(agent, settings)
    return agent


def telling_paths(settings: NixlSettings) -> AbstractContextManager[None]:
    """Return a context manager for making a process's first agent, after which `known_paths` works."""
    return ucx_log().set_for_ucx() if settings.writes else nullcontext()


def _check_backend(agent: nixl_agent, settings: NixlSettings) -> None:
    """Raise ConfigError if the plugin is missing or cannot be loaded: NIXL's list only has their files."""
    backend, plugins = settings.backend, agent.get_plugin_list()
    if backend not in plugins:
        raise ConfigError(f"--nixl-backend={backend}: NIXL has no such plugin here, but {', '.join(plugins)}")
    try:
        known, _ = agent.agent.getPluginParams(backend)
    except _bindings.nixlNotFoundError as error:
        problem = _why_not_loaded(backend)
        raise ConfigError(
            f"--nixl-backend={backend}: NIXL brings this plugin, but it cannot be loaded here: {problem}"
        ) from error
    if backend != UCX:
        check_parameters(backend, settings.parameters, known)


def _why_not_loaded(plugin: str) -> str:
    """Return the loader's error about what is missing, because NIXL only logs it."""
    bindings = Path(_bindings.__file__ or "").parent
    beside = bindings.parent / f".{bindings.name}.mesonpy.libs" / "plugins"
    for folder in (Path(os.environ.get("NIXL_PLUGIN_DIR") or beside), beside):
        if (file := folder / f"libplugin_{plugin}.so").exists():
            try:
                ctypes.CDLL(str(file))
            except OSError as error:
                return str(error)
    return "with NIXL_LOG_LEVEL=INFO its log says why"


def _create_backend(agent: nixl_agent, settings: NixlSettings) -> None:
    given = " ".join(f"{name}={value}" for name, value in settings.parameters.items())
    what = f"--nixl-backend={settings.backend} cannot start" + f" with --nixl-parameter {given}" * bool(given)
    with _renaming(f"{what} (what NIXL has written to stderr says why)", ConfigError):
        agent.create_backend(settings.backend, settings.parameters)


def let_sleep(agent: nixl_agent, settings: NixlSettings, *, one_thread: bool) -> None:
    """Make an agent's progress thread sleep when there is nothing to do. The agent has no backend yet.

    With `one_thread` only one thread will use the agent; otherwise NIXL locks it.
    """
    config = _bindings.nixlAgentConfig()
    config.useProgThread = True
    # nixl_agent_config has no parameter for it.
    config.pthrDelay = _WRITERS_PAUSE_US if settings.writes and settings.backend == UCX else _PAUSE_US
    config.syncMode = _bindings.NIXL_THREAD_SYNC_NONE if one_thread else _bindings.NIXL_THREAD_SYNC_STRICT
    # The first agent ends here: telemetry exporters accept no second agent of the same name beside it.
    agent.agent = None
    agent.agent = _bindings.nixlAgent(agent.name, config)


def _own_its_log() -> None:
    logger = logging.getLogger("nixl")
    logger.handlers.clear()  # NIXL's own handler prints to stdout.
    logger.propagate = True
    if "NIXL_LOG_LEVEL" not in os.environ:
        logger.setLevel(logging.WARNING)


_own_its_log()

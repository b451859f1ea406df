"""The cluster of a chaos run: who is killed and stopped here is started again, and goes on, as on Kubernetes.

fault --> the process, by its pid --> killed, ended: started again after a while (a rank: by its supervisor)
                                  --> stopped: SIGCONT after a while
                                  --> drained, by isthmus drain: put back into service after a while
      --> the file of a rank's tier, by its path --> spoilt: whoever has it open notices, or its next life
"""

import asyncio
import contextlib
import logging
import os
import random
import re
import secrets
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import run
from typing import Any, Self

from bench.chaos.answers import Span
from bench.chaos.left_behind import marked_processes, signal_all
from bench.chaos.schedule import TIER_OF, Fault, Kind, Layout, Target
from bench.chaos.verdict import Played
from bench.etcd_nodes import EtcdNodes
from bench.soak.ranks import NUM_PAGES, PAGE_SIZE, Ranks
from services.cli.local.local_cluster import Child, LocalCluster, Shape
from services.etcd.embedded import EmbeddedEtcd, etcd_binary
from services.tier.slab import slab_files
from services.values.errors import ConfigError

log = logging.getLogger(__name__)

MARK = "ISTHMUS_CHAOS_MARK"
LEASE_TTL_S = 10
_LOOK_S = 0.2
_COMMON_FLAGS = (f"--index-block={PAGE_SIZE}", "--model-name=chaos", "--grace-s=20")
_ENDS_WITHIN_S = 60.0  # of SIGTERM: its grace, its hand-over, and its ranks' engines
_DRAINED_WITHIN_S = 20.0
_MOST_FLIPPED = 200
_RANK_FLAGS = (
    f"--page-size={PAGE_SIZE}",
    f"--kv-pages={NUM_PAGES}",
    "--chunk-size=64",
    "--max-running-requests=16",
    f"--lease-ttl-s={LEASE_TTL_S}",
    "--kv-digest-share=1",
)
_ENGINE_FLAGS = {
    "torch": ("--engine=torch",),
    "fake": ("--engine=fake", "--fake-step-s=0.005", "--fake-prompt-token-s=0.0003"),
}
# A tier has fewer tokens than the pool, so that much goes on to the next one, and much is dropped.
_TIER_SIZES = {"torch": ("memory:640KiB", "1MiB"), "fake": ("memory:24KiB", "40KiB")}
_ROUTER_FLAGS = ("--chunk-size=64",)


@dataclass(frozen=True, slots=True)
class Router:
    """One life of a router that has said that it is ready."""

    name: str
    life: int
    endpoint: str
    http: str


@dataclass
class Processes:
    """`async with processes:` they run. Times are seconds of `clock`, since this was made."""

    layout: Layout
    shape: Shape
    nodes: EtcdNodes
    mark: str
    log_file: Path
    tiers: Path  # They have their files below it.
    ranks: Ranks = field(default_factory=Ranks)
    played: list[Played] = field(default_factory=list)
    digest_mismatches: int = 0
    handed_tokens: int = 0  # to other ranks, by those that were drained or told to end
    found_tokens: int = 0  # in tiers, by ranks that were started again
    _ready: dict[str, Router] = field(default_factory=dict)
    _down: set[str] = field(default_factory=set)
    _lives: dict[str, int] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.log_file.write_text("")
        self.cluster = _EagerCluster(self.shape, self.note)

    async def __aenter__(self) -> Self:
        await self.cluster.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        signal_all(marked_processes(MARK, self.mark), signal.SIGCONT)
        await self.cluster.__aexit__(*error)

    def clock(self) -> float:
        return time.monotonic() - self._began

    def exit_codes(self) -> dict[str, int]:
        codes = {name: child.process.returncode for name, child in self.cluster.children.items()}
        return {name: code for name, code in codes.items() if code}

    def note(self, name: str, line: str) -> None:
        """A line of a service's log."""
        self._log(f"{name:<10}| {line}")
        self.ranks.note(name, line)
        self.digest_mismatches += " kv_digest_mismatch " in line
        if handed := re.search(r" handed_over handed_tokens=(\d+)", line):
            self.handed_tokens += int(handed[1])
        if found := re.search(r" kv_tiers_found blocks=\d+ tokens=(\d+)", line):
            self.found_tokens += int(found[1])
        if ready := re.search(r" router_ready endpoint=(\S+) http=(\S+)", line):
            self._ready[name] = Router(name, self._lives.get(name, 0), ready[1], ready[2])

    def _log(self, text: str) -> None:
        with self.log_file.open("a") as file:
            file.write(f"{self.clock():8.3f} {text}\n")

    # -- routers, as a balancer sees them ---------------------------------------------------------

    @property
    def ready_routers(self) -> list[Router]:
        return [self._ready[name] for name in sorted(self._ready)]

    def died(self, router: Router) -> bool:
        """This life of the router was ended by us."""
        return self._lives.get(router.name, 0) > router.life

    # -- faults -----------------------------------------------------------------------------------

    async def play(self, fault: Fault) -> None:
        """Returns when the stopped process goes on, or the killed one was started again."""
        began = self.clock()
        if fault.target is Target.TIER:
            if self._spoil(fault):
                self.played.append(Played(fault, Span(began, self.clock())))
            return
        pid = self._pid(fault)
        self._log(f"=== {fault.kind} {fault.name} pid={pid} for {fault.lasts_s:.2f} s")
        if pid is None:  # killed a moment ago, and not there again yet
            return
        try:
            match fault.kind:
                case Kind.KILL:
                    await self._kill(fault)
                case Kind.STOP:
                    await self._stop(pid, fault.lasts_s)
                case Kind.DRAIN:
                    await self._drain(fault, pid)
                case Kind.TERMINATE:
                    await self._terminate(fault)
        except ProcessLookupError:  # likewise
            return
        self.played.append(Played(fault, Span(began, self.clock())))

    def _pid(self, fault: Fault) -> int | None:
        """None: it does not run at present, or has been killed and is to be started again."""
        if fault.name in self._down:
            return None
        if fault.target is Target.ETCD:
            return self._member(fault.name).pid
        if fault.target in (Target.PREFILL_RANK, Target.DECODE_RANK):
            pid = self.ranks.pids.get(fault.name)
            return pid if pid is not None and _is_ours(pid, self.mark) else None
        process = self.cluster.children[fault.name].process
        return process.pid if process.returncode is None else None

    async def _stop(self, pid: int, seconds: float) -> None:
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):  # another fault has killed it
                os.kill(pid, signal.SIGCONT)

    async def _kill(self, fault: Fault) -> None:
        if fault.target in (Target.PREFILL_RANK, Target.DECODE_RANK):
            os.kill(self.ranks.pids[fault.name], signal.SIGKILL)
            return
        self._down.add(fault.name)
        try:
            await (self._kill_member if fault.target is Target.ETCD else self._kill_service)(fault)
        finally:
            self._down.discard(fault.name)

    async def _drain(self, fault: Fault, pid: int) -> None:
        """Drain the rank, and put it back into service, unless it is another life by then."""
        began_s = time.monotonic()
        await self._isthmus("drain", fault.name, f"--timeout-s={_DRAINED_WITHIN_S}", within_s=fault.lasts_s)
        await asyncio.sleep(max(0.0, fault.lasts_s - (time.monotonic() - began_s)))
        while self.ranks.pids.get(fault.name) == pid and _is_ours(pid, self.mark):
            if await self._isthmus("drain", "--undo", fault.name, within_s=_DRAINED_WITHIN_S):
                return
            await asyncio.sleep(_LOOK_S)  # etcd has no majority, or the rank is stopped

    async def _isthmus(self, *words: str, within_s: float) -> bool:
        """Return whether the command did it, in that time."""
        command = [sys.executable, "-m", "services.cli", *words, f"--etcd={','.join(self.nodes.endpoints)}"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                said = await process.stdout.read()
                self._log(f"{' '.join(words)}: {said.decode()}")
                return await process.wait() == 0
        except TimeoutError:
            return False
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()

    async def _terminate(self, fault: Fault) -> None:
        child = self.cluster.children[fault.name]
        self._down.add(fault.name)
        try:
            child.process.terminate()
            async with asyncio.timeout(_ENDS_WITHIN_S):
                await child.process.wait()
        except TimeoutError:  # One of its ranks is stopped, as a rule.
            child.process.kill()
            await child.process.wait()
        finally:
            self._down.discard(fault.name)
        await asyncio.sleep(fault.lasts_s)
        await self.cluster.start_child(child.name, child.command[2], child.command[3:])

    def _spoil(self, fault: Fault) -> bool:
        """Return False where the rank has no file at present."""
        chance, rank = random.Random(fault.at_s), fault.name.removeprefix(TIER_OF).replace("/", ".")
        for path in slab_files(self.tiers):
            if path.parent.name == rank:
                self._log(f"=== {fault.kind} {path}")
                spoil(path, fault.kind, chance)
                return True
        return False

    async def _kill_service(self, fault: Fault) -> None:
        child = self.cluster.children[fault.name]
        self._lives[fault.name] = self._lives.get(fault.name, 0) + 1
        self._ready.pop(fault.name, None)
        child.process.kill()
        await child.process.wait()
        await asyncio.sleep(fault.lasts_s)
        await self.cluster.start_child(child.name, child.command[2], child.command[3:])

    async def _kill_member(self, fault: Fault) -> None:
        node = self._member(fault.name)
        await node.kill()
        await asyncio.sleep(fault.lasts_s)
        while True:
            try:
                return await node.start()
            except ConfigError as error:  # no leader in time, for the others stand still
                log.warning("etcd_starts_again name=%s error=%s", fault.name, error)

    def _member(self, name: str) -> EmbeddedEtcd:
        return self.nodes.nodes[int(name.removeprefix("etcd-"))]

    # -- the whole --------------------------------------------------------------------------------

    async def until_whole(self, timeout_s: float) -> list[str]:
        """Wait until every router sees every rank and could choose it; in words what is missing when the time
        is over."""
        end = time.monotonic() + timeout_s
        while missing := await self._missing():
            if time.monotonic() > end:
                return missing
            await asyncio.sleep(_LOOK_S)
        return []

    async def _missing(self) -> list[str]:
        missing = [
            f"{name} has ended with exit code {child.process.returncode}"
            for name, child in self.cluster.children.items()
            if child.process.returncode is not None
        ]
        routers = [f"router-{number}" for number in range(self.layout.routers)]
        missing += [f"{name} is not ready" for name in routers if name not in self._ready]
        for number in range(self.layout.routers):
            if not missing and not await self.cluster.is_whole(number):
                missing.append(f"router-{number} does not see every rank")
        return missing

    async def until_forgotten(self) -> list[str]:
        """Wait for as long as leases of ranks last that nobody renews; then, what etcd still has of ranks."""
        end = time.monotonic() + 2 * LEASE_TTL_S + 10.0
        while left := await asyncio.to_thread(self._of_ranks_in_etcd):
            if time.monotonic() > end:
                return left
            await asyncio.sleep(_LOOK_S)
        return []

    def _of_ranks_in_etcd(self) -> list[str]:
        """Return keys and leases. Those of routers, for pins and probes, are meant to last longer."""
        keys = self._etcdctl("get", "/isthmus/", "--prefix", "--keys-only")
        leases = [
            self._etcdctl("lease", "timetolive", line)[0]
            for line in self._etcdctl("lease", "list")
            if re.fullmatch(r"[0-9a-f]{6,}", line)
        ]
        granted = f"granted with TTL({LEASE_TTL_S}s)"
        return [
            *(key for key in keys if re.match(r"/isthmus/[^/]+/(ranks|prefix|below)/", key)),
            *(lease for lease in leases if granted in lease),
        ]

    def _etcdctl(self, *arguments: str) -> list[str]:
        """Return the lines of its output."""
        etcdctl = str(etcd_binary().with_name("etcdctl"))
        command = [etcdctl, "--endpoints", ",".join(self.nodes.endpoints), *arguments]
        return run(command, check=True, capture_output=True, text=True, timeout=30).stdout.splitlines()


class _EagerCluster(LocalCluster):
    async def start_child(self, name: str, module: str, flags: list[str]) -> Child:
        eager = "bench.chaos.eager_router" if module == "services.router" else module
        return await LocalCluster.start_child(self, name, eager, flags)


def spoil(path: Path, kind: Kind, chance: random.Random) -> None:
    size = path.stat().st_size
    match kind:
        case Kind.FLIP:
            with path.open("r+b") as file:
                for _ in range(chance.randint(1, _MOST_FLIPPED)):
                    file.seek(chance.randrange(size))
                    file.write(chance.randbytes(1))
        case Kind.CUT:
            os.truncate(path, chance.randrange(size))
        case _:
            path.unlink()


def _is_ours(pid: int, mark: str) -> bool:
    """The process may have ended, and its number be somebody else's by now."""
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" and f"{MARK}={mark}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def rank_flags(engine: str, transport: str, tiers: Path) -> tuple[str, ...]:
    in_memory, in_files = _TIER_SIZES[engine]
    return (
        *(*_RANK_FLAGS, *_ENGINE_FLAGS[engine], f"--transport={transport}"),
        *(f"--kv-tier={in_memory}", f"--kv-tier={tiers}:{in_files}", "--kv-tier-shared=on"),
    )


def shape_of(
    layout: Layout, checkpoint: Path, folder: Path, etcd: tuple[str, ...], flags: tuple[str, ...]
) -> Shape:
    return Shape(
        model=checkpoint,
        data_dir=folder,
        routers=layout.routers,
        prefill_workers=layout.prefill_workers,
        prefill_dp_size=layout.prefill_dp_size,
        decode_workers=layout.decode_workers,
        decode_dp_size=layout.decode_dp_size,
        etcd=etcd,
        common_flags=_COMMON_FLAGS,
        rank_flags=flags,
        router_flags=_ROUTER_FLAGS,
        ready_timeout_s=300.0,
    )


@contextlib.contextmanager
def marked() -> Iterator[str]:
    """Everything that is started within carries the mark, and nothing of it is left afterwards, however this
    ends."""
    mark = secrets.token_hex(8)
    os.environ[MARK], os.environ["OMP_NUM_THREADS"] = mark, "1"
    try:
        yield mark
    finally:
        os.environ.pop(MARK, None)
        signal_all(marked_processes(MARK, mark), signal.SIGKILL)

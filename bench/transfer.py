"""This benchmark measures what a delta's way costs beside a raw NIXL write of as many bytes, between two
processes.

    python -m bench.transfer --json FILE [--device cuda]

Ours: page lists -> runs -> merged moves -> Transport.write -> poll until landed, as the sender does it
(services/transfer/sending/delta_write.py), in posts of at most 64 MiB. Raw: one descriptor over contiguous
memory, straight through nixl's own API. The two alternate within a run, over the same memory.
A fresh pool gives contiguous runs; an aged one has seen turns come and go on both sides; scattered is
the worst case, every page by itself. Digests: what each side of a checked transfer spends beside
(services/kv/page_digest.py).
Between processes of one host UCX copies with process_vm_writev, one system call a descriptor. With
`--device cuda` both pools lie in that GPU's memory.
"""

import argparse
import json
import logging
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch

from bench.device import CPU, device_named
from bench.interrupts import end_as_by_ctrl_c
from bench.report import Row, parser_of, spread, table, write_json
from services.engine.torch.pools import PageReader, page_reader
from services.kv.page_allocator import PageAllocator
from services.kv.page_digest import digest_of
from services.kv.transfer_plan import runs_of
from services.transfer.nixl import NixlTransport, open_agent
from services.transfer.nixl_settings import NixlSettings
from services.transfer.open_transport import open_transport
from services.transfer.sending.delta_write import DeltaWrite, Sources
from services.transfer.transport import PeerName, map_memory
from services.values.kv import KvLayout, KvTicket, PageId, PoolMemory
from services.values.rank import Generation, TransferId

KIB, MIB = 1 << 10, 1 << 20
PAGE_BYTES = (16 * KIB, 64 * KIB, 256 * KIB, 1 * MIB, 2 * MIB)
MAX_POST_BYTES = 64 * MIB
PAGE_SIZE = 64  # tokens; only the page count matters here
KINDS = ("fresh", "aged", "scattered")
_WRITES = NixlSettings(writes=True)

Action = Callable[[], object]


class Pool:
    """`size_bytes` of touched memory; on the CPU page-aligned."""

    def __init__(self, size_bytes: int, fill: int, device: torch.device) -> None:
        if device.type == "cpu":
            self.bytes = torch.frombuffer(map_memory(size_bytes), dtype=torch.uint8)
        else:
            self.bytes = torch.empty(size_bytes, dtype=torch.uint8, device=device)
        self.bytes.fill_(fill)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.address = self.bytes.data_ptr()
        self.size_bytes = size_bytes
        self.kind = "VRAM" if device.type == "cuda" else "DRAM"
        self.device_id: int = device.index or 0

    def memory(self, page_bytes: int, address: int | None = None) -> PoolMemory:
        """Return the memory of this pool, or of one like it elsewhere that begins at `address`."""
        start = self.address if address is None else address
        return PoolMemory(start, self.size_bytes // page_bytes, self.kind, self.device_id)


@dataclass(frozen=True)
class Remote:
    """The pool of the other process."""

    metadata: bytes
    address: int


def serve_passively(pool_bytes: int, device: torch.device) -> None:
    """The other process: register a pool, say where it is, wait for the end of stdin."""
    pool = Pool(pool_bytes, 0, device)
    transport = open_transport("nixl")
    transport.register([pool.memory(4096)], [4096])
    print(json.dumps({"metadata": transport.metadata().hex(), "address": pool.address}), flush=True)
    sys.stdin.read()
    transport.close()


@contextmanager
def other_process(pool_bytes: int, device: torch.device) -> Iterator[Remote]:
    command = [sys.executable, "-m", "bench.transfer", f"--passive={pool_bytes}", f"--device={device}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            facts = json.loads(process.stdout.readline())
            yield Remote(bytes.fromhex(facts["metadata"]), facts["address"])
        finally:
            process.stdin.close()


class RawNixl:
    """It posts one descriptor over contiguous memory."""

    def __init__(self, pool: Pool, remote: Remote, size_bytes: int) -> None:
        self._agent = open_agent("bench-raw", _WRITES)
        self._agent.register_memory([(pool.address, pool.size_bytes, pool.device_id, "")], pool.kind)
        name = self._agent.add_remote_agent(remote.metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name
        self._source, self._target, self._size_bytes = pool.address, remote.address, size_bytes
        self._kind, self._device_id = pool.kind, pool.device_id

    def write(self) -> None:
        source, target = (
            self._agent.get_xfer_descs(
                np.array([[address, self._size_bytes, self._device_id]], dtype=np.uint64), self._kind
            )
            for address in (self._source, self._target)
        )
        handle = self._agent.initialize_xfer("WRITE", source, target, self._peer)
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        if state != "DONE":
            raise RuntimeError(f"the raw write ended with {state}")
        handle.release()


@dataclass(frozen=True)
class Delta:
    sources: list[PageId]
    targets: list[PageId]

    def write(self, transport: NixlTransport, peer: PeerName, page_bytes: int) -> int:
        """Return the number of descriptors."""
        prompt_len = len(self.sources) * PAGE_SIZE
        ticket = KvTicket(
            TransferId(1), Generation(1), prompt_len, 0, runs_of(self.targets), write_until_s=0.0
        )
        layout = KvLayout(PAGE_SIZE, page_bytes, model_fingerprint=1)
        delta = DeltaWrite(ticket, layout, Sources(self.sources))
        while not delta.landed:
            if delta.can_post:
                delta.post(transport, peer, MAX_POST_BYTES, time.monotonic())
            delta.poll()
        return delta.descriptors


def aged(allocator: PageAllocator, free_pages: int, rng: random.Random) -> PageAllocator:
    """Turns of 1 to 16 pages come and go at random, the pool nearly full, till it has turned over ten times.

    `free_pages` are free in the end.
    """
    held: list[list[PageId]] = []
    for _ in range(10 * allocator.num_pages // 8):
        wanted = rng.randint(1, 16)
        while allocator.free_pages < wanted + allocator.num_pages // 20:
            allocator.free(_take_any(held, rng))
        held.append(allocator.allocate(wanted))
    while allocator.free_pages < free_pages:
        allocator.free(_take_any(held, rng))
    return allocator


def _take_any(held: list[list[PageId]], rng: random.Random) -> list[PageId]:
    i = rng.randrange(len(held))
    held[i], held[-1] = held[-1], held[i]
    return held.pop()


def delta_of(kind: str, num_pages: int, pool_pages: int, rng: random.Random) -> Delta:
    if kind == "scattered":
        return Delta(*(list(map(PageId, rng.sample(range(pool_pages), num_pages))) for _ in range(2)))
    sides = [PageAllocator(pool_pages), PageAllocator(pool_pages)]
    if kind == "aged":
        sides = [aged(side, num_pages, rng) for side in sides]
    return Delta(*(side.allocate(num_pages) for side in sides))


def seconds(action: Action) -> float:
    began_s = time.perf_counter()
    action()
    return time.perf_counter() - began_s


def measure(ours: Action, raw: Action, rounds: int) -> list[tuple[float, float]]:
    """Ours and raw, in pairs, one after the other; who goes first alternates."""
    pairs = []
    for round_ in range(rounds):
        if round_ % 2:
            pairs.append((seconds(ours), seconds(raw)))
        else:
            of_raw = seconds(raw)
            pairs.append((seconds(ours), of_raw))
    return pairs


def run(total_bytes: int, pool_bytes: int, rounds: int, seed: int, device: torch.device = CPU) -> list[Row]:
    pool = Pool(pool_bytes, 1, device)
    rows: list[Row] = []
    with other_process(pool_bytes, device) as remote:
        raw = RawNixl(pool, remote, total_bytes)
        for _ in range(5):  # the first ones are slow: page tables, caches, the connection
            raw.write()
        for page_bytes in PAGE_BYTES:
            transport = NixlTransport("bench", _WRITES)
            transport.register([pool.memory(page_bytes)], [page_bytes])
            peer = transport.add_peer(remote.metadata, [pool.memory(page_bytes, remote.address)])
            read_pages = page_reader(pool.bytes.view(-1, page_bytes))
            for kind in KINDS:
                rng = random.Random(f"{seed} {page_bytes}")
                delta = delta_of(kind, total_bytes // page_bytes, pool_bytes // page_bytes, rng)
                ours = partial(delta.write, transport, peer, page_bytes)
                row = {"page_bytes": page_bytes, "pool": kind, "descriptors": ours()}
                seconds(ours), seconds(raw.write)  # not counted, nor was the one above
                rates = _rates(total_bytes, measure(ours, raw.write, rounds))
                digests_s = [seconds(partial(digest, read_pages, delta)) for _ in range(rounds)]
                rows.append(row | rates | {"digest_gb_s": total_bytes / median(digests_s) / 1e9})
            transport.close()
    return rows


def digest(read_pages: PageReader, delta: Delta) -> None:
    for content in read_pages(delta.sources):
        digest_of(content)


def _rates(total_bytes: int, pairs: list[tuple[float, float]]) -> Row:
    """The ratios are taken within each pair: on a shared machine the rates change from second to second."""
    ours_s, raw_s = [ours for ours, _ in pairs], [raw for _, raw in pairs]
    ratios = [raw / ours for ours, raw in zip(ours_s, raw_s, strict=True)]
    return {
        "ours_gb_s": total_bytes / median(ours_s) / 1e9,
        "raw_gb_s": total_bytes / median(raw_s) / 1e9,
        "ratio": median(ratios),
        "ours_spread": spread(ours_s),
        "raw_spread": spread(raw_s),
        "ratio_spread": spread(ratios),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--total-mib", type=int, default=256, help="bytes moved in one measurement")
    parser.add_argument("--pool-mib", type=int, default=768, help="bytes of the pool in each process")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", type=device_named, default=CPU, help="cpu (default), cuda or cuda:N")
    parser.add_argument("--passive", type=int, metavar="POOL_BYTES", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    logging.getLogger("nixl").setLevel(logging.WARNING)
    if arguments.passive is not None:
        serve_passively(arguments.passive, arguments.device)
        return
    sizes = arguments.total_mib * MIB, arguments.pool_mib * MIB
    rows = run(*sizes, arguments.rounds, arguments.seed, arguments.device)
    print(table(rows))
    if arguments.json is not None:
        settings = {
            "total_mib": arguments.total_mib,
            "pool_mib": arguments.pool_mib,
            "rounds": arguments.rounds,
            "device": str(arguments.device),
        }
        write_json(arguments.json, "transfer", settings, rows)


if __name__ == "__main__":
    end_as_by_ctrl_c()
    main()

"""NIXL between two processes, all pools on the device: each byte lands where it should, or nowhere."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from gpu.passive_rank import pool_memory
from services.kv.transfer_plan import PageMove
from services.transfer.open_transport import open_transport
from services.values.errors import PeerFailed
from services.values.kv import PoolMemory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_PAGES, PAGE_BYTES = 3000, 64 << 10
SHAPES = ((NUM_PAGES, PAGE_BYTES), (200, 48 << 10), (9, 5 << 20))  # pages, pages of a window, slots
UNIT_BYTES = [unit_bytes for _, unit_bytes in SHAPES]


class OtherProcess:
    def __init__(self, device):
        command = [sys.executable, str(Path(__file__).with_name("passive_rank.py")), device]
        command += [f"{num_units}x{unit_bytes}" for num_units, unit_bytes in SHAPES]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.facts = json.loads(self.process.stdout.readline())

    def snapshot(self):
        self.process.stdin.write(b"snapshot\n")
        self.process.stdin.flush()
        return [self._read(*shape) for shape in SHAPES]

    def _read(self, num_units, unit_bytes):
        content = bytearray(self.process.stdout.read(num_units * unit_bytes))
        return torch.frombuffer(content, dtype=torch.uint8).view(num_units, unit_bytes)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pools(device):
    generator = torch.Generator(device).manual_seed(1)
    kind = {"dtype": torch.uint8, "device": device, "generator": generator}
    return [torch.randint(0, 256, shape, **kind) for shape in SHAPES]


@pytest.fixture
def transport(pools):
    transport = open_transport("nixl")
    transport.register([pool_memory(pool) for pool in pools], UNIT_BYTES)
    yield transport
    transport.close()


@pytest.fixture
def other(device):
    other = OtherProcess(device)
    yield other
    other.kill()


@pytest.fixture
def peer(transport, other, pools):
    own = pool_memory(pools[0])
    places = zip(other.facts["addresses"], SHAPES, strict=True)
    memories = [PoolMemory(address, units, own.kind, own.device_id) for address, (units, _) in places]
    return transport.add_peer(bytes.fromhex(other.facts["metadata"]), memories)


def finish(write):
    deadline_s = time.monotonic() + 30
    while not write.poll():
        assert time.monotonic() < deadline_s, "the write never landed"
    write.release()


def test_bytes_arrive_where_they_should_and_nowhere_else(pools, transport, other, peer):
    if pools[0].is_cuda:
        torch.cuda.synchronize()
    chance = random.Random(5)
    runs = [PageMove(3, 7, 5), PageMove(NUM_PAGES - 1, 0, 1), PageMove(40, NUM_PAGES - 2, 2)]
    alone = zip(chance.sample(range(NUM_PAGES), 1000), chance.sample(range(100, 2900), 1000), strict=True)
    carried = [PageMove(190, 0, 10, group=1), PageMove(8, 2, 1, group=2), PageMove(3, 60, 2, group=1)]
    moves = [*runs, *carried, *(PageMove(source, target, 1) for source, target in alone)]
    expected = [torch.zeros(*shape, dtype=torch.uint8) for shape in SHAPES]
    for move in moves:
        source = pools[move.group][move.source_page : move.source_page + move.num_pages]
        expected[move.group][move.target_page : move.target_page + move.num_pages] = source.cpu()
    for part in (moves[:6], moves[6:]):
        finish(transport.write(peer, part))
    assert all(map(torch.equal, other.snapshot(), expected))


def test_a_killed_peer_fails_the_write(transport, other, peer):
    finish(transport.write(peer, [PageMove(0, 0, 1)]))
    other.kill()
    with pytest.raises(PeerFailed):
        finish(transport.write(peer, [PageMove(0, 0, 2000)]))

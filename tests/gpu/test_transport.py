"""NIXL between two processes, both pools on the device: each byte lands where it should, or nowhere."""

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
from services.transfer.choose import open_transport
from services.values.errors import PeerFailed
from services.values.kv import PoolMemory

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

NUM_PAGES, PAGE_BYTES = 3000, 64 << 10


class OtherProcess:
    def __init__(self, device):
        command = [sys.executable, str(Path(__file__).with_name("passive_rank.py")), device]
        self.process = subprocess.Popen(
            [*command, str(NUM_PAGES), str(PAGE_BYTES)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.facts = json.loads(self.process.stdout.readline())

    def snapshot(self):
        self.process.stdin.write(b"snapshot\n")
        self.process.stdin.flush()
        content = bytearray(self.process.stdout.read(NUM_PAGES * PAGE_BYTES))
        return torch.frombuffer(content, dtype=torch.uint8).view(NUM_PAGES, PAGE_BYTES)

    def kill(self):
        self.process.kill()
        self.process.wait()


@pytest.fixture
def pages(device):
    generator = torch.Generator(device).manual_seed(1)
    shape = (NUM_PAGES, PAGE_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


@pytest.fixture
def transport(pages):
    transport = open_transport("nixl")
    transport.register([pool_memory(pages)], [PAGE_BYTES])
    yield transport
    transport.close()


@pytest.fixture
def other(device):
    other = OtherProcess(device)
    yield other
    other.kill()


@pytest.fixture
def peer(transport, other, pages):
    own = pool_memory(pages)
    memory = PoolMemory(other.facts["address"], NUM_PAGES, own.kind, own.device_id)
    return transport.add_peer(bytes.fromhex(other.facts["metadata"]), [memory])


def finish(write):
    deadline_s = time.monotonic() + 30
    while not write.poll():
        assert time.monotonic() < deadline_s, "the write never landed"
    write.release()


def test_bytes_arrive_where_they_should_and_nowhere_else(pages, transport, other, peer):
    if pages.is_cuda:
        torch.cuda.synchronize()
    chance = random.Random(5)
    runs = [PageMove(3, 7, 5), PageMove(NUM_PAGES - 1, 0, 1), PageMove(40, NUM_PAGES - 2, 2)]
    alone = zip(chance.sample(range(NUM_PAGES), 1000), chance.sample(range(100, 2900), 1000), strict=True)
    moves = [*runs, *(PageMove(source, target, 1) for source, target in alone)]
    expected = torch.zeros(NUM_PAGES, PAGE_BYTES, dtype=torch.uint8)
    for move in moves:
        source = slice(move.source_page, move.source_page + move.num_pages)
        expected[move.target_page : move.target_page + move.num_pages] = pages[source].cpu()
    for part in (moves[:3], moves[3:]):
        finish(transport.write(peer, part))
    assert torch.equal(other.snapshot(), expected)


def test_a_killed_peer_fails_the_write(transport, other, peer):
    finish(transport.write(peer, [PageMove(0, 0, 1)]))
    other.kill()
    with pytest.raises(PeerFailed):
        finish(transport.write(peer, [PageMove(0, 0, 2000)]))

"""A stand-in for a GPU's stream: copies are pending until they are waited for."""

import random
import threading

from services.engine.torch.pinned_staging import PinnedStaging


class Shuffled:
    """The copies run in any order, and when they are waited for, at the latest possible moment."""

    def __init__(self):
        self.pending = []
        self.chance = random.Random(1)

    def begin(self, target, source):
        self.pending.append((target, source))

    def wait(self):
        begun, self.pending = self.pending, []
        self.chance.shuffle(begun)
        for target, source in begun:
            target.copy_(source)


class Held(Shuffled):
    """The copies are pending until `go` is set, and `asked` once somebody waits for them."""

    def __init__(self):
        super().__init__()
        self.asked, self.go = threading.Event(), threading.Event()

    def wait(self):
        self.asked.set()
        assert self.go.wait(30), "the copy was never let go"
        super().wait()


def staged_on_a_cpu(runner, slot_bytes):
    """Stand in for TorchRunner.staging, as if the runner's pools lay on a device."""
    return PinnedStaging(slot_bytes, runner.units, Shuffled(), pinned=False)

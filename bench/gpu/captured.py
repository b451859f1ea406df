"""A step that needs nothing of the host is captured in one CUDA graph; on a CPU it is just called."""

import gc
from collections.abc import Callable

import torch

_WARM_UPS = 3


class Captured:
    def __init__(self, step: Callable[[], object], device: torch.device) -> None:
        """Run the step some times, then capture it.

        Raises whatever capture raises where the step waits for the device or allocates elsewhere.
        """
        self.replay: Callable[[], object] = step
        if device.type != "cuda":
            return
        current, own = torch.cuda.current_stream(device), torch.cuda.Stream(device)
        own.wait_stream(current)
        with torch.cuda.stream(own):
            for _ in range(_WARM_UPS):
                step()
        current.wait_stream(own)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        gc.freeze()  # capture collects garbage first, which takes a while with all that is imported
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                step()
        finally:
            gc.unfreeze()
        self.replay = graph.replay


def finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

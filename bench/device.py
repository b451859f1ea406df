"""The device that a benchmark's pools and models lie on."""

import argparse

import torch


def device_named(name: str) -> torch.device:
    """cpu, cuda or cuda:N, for argparse's `type`: what is not there is refused with a sentence."""
    try:
        found = torch.device(name)
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{name!r} is none of cpu, cuda and cuda:N") from None
    if found.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"{name!r} is none of cpu, cuda and cuda:N")
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise argparse.ArgumentTypeError(
            f"{name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


CPU = torch.device("cpu")

"""Runners of tiny checkpoints, and the bits of what they compute."""

from functools import cache

import torch

from exactness.checkpoints import tiny_checkpoint
from services.engine.torch import runner as torch_runner
from services.engine.torch.runner import TorchRunner
from services.kv.tails import PoolSizes


@cache
def runner_of(family, dtype="float32", num_threads=1):
    sizes = PoolSizes(max_running_requests=8, chunk_size=160)
    return TorchRunner(
        tiny_checkpoint(family),
        num_pages=160,
        page_size=16,
        num_threads=num_threads,
        dtype=dtype,
        sizes=sizes,
        self_check=False,
    )


def recorded_logits(monkeypatch):
    """Record the logits of every token that is sampled from now on, by all ids before it."""
    seen = {}
    sample = torch_runner.sample

    def recording(rows, tokens, allowed=None, most_probable=None):
        for row, token in zip(rows, tokens, strict=True):
            seen.setdefault(tuple(token.history), []).append(row.clone())
        return sample(rows, tokens, allowed, most_probable)

    monkeypatch.setattr(torch_runner, "sample", recording)
    return seen


def num_parted(logits, ids, prompt_len, num_times):
    """Count the output tokens whose logits were not the same bits each time."""
    times = [logits[tuple(ids[:end])] for end in range(prompt_len, len(ids))]
    assert [len(rows) for rows in times] == [num_times] * len(times)
    return sum(any(not torch.equal(row, rows[0]) for row in rows[1:]) for rows in times)

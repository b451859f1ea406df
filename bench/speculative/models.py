"""Checkpoints whose text can be guessed, by whom and how often being known beforehand.

A random model's next token cannot be guessed, so here each id has a successor: the head of an id is the
embedding of the id before it. So after id i its successor has the logit `gain`, and all others noise of
gain / sqrt(hidden). What the layers compute is kept small beside the embedding, and costs what it always
costs. At temperature 1 the successor follows with a probability that the gain sets. Ids follow
each other in circles:

    5 > 17 > 203 > ... > 5     a circle of CIRCLE ids; an unlikely token leads to another circle

So text repeats itself once a circle was seen; other answers have seen the circles before; a small model with
the same circles agrees with a large one, and one with other circles never does.
"""

import math
import random
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from services.cli.model.make_model import make_model

VOCAB_SIZE = 512
FIRST_ID = 5  # those before it are special, or stand for what is unknown
CIRCLE = 13  # ids; 39 circles
_QUIET = 0.01  # of what a layer adds
_PROJECTIONS = ("o_proj.weight", "down_proj.weight")


@dataclass(frozen=True, slots=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int


TARGET, DRAFT = Shape(8, 512, 8, 4), Shape(1, 64, 4, 2)


def circles(seed: int) -> list[list[int]]:
    """Return all ids but the special ones, each once."""
    ids = list(range(FIRST_ID, VOCAB_SIZE))
    random.Random(seed).shuffle(ids)
    return [ids[start : start + CIRCLE] for start in range(0, len(ids), CIRCLE)]


def successors(seed: int) -> dict[int, int]:
    return {a: b for circle in circles(seed) for a, b in zip(circle, circle[1:] + circle[:1], strict=True)}


def gain_for(share: float, hidden: int) -> float:
    """Return the gain at which the successor is chosen with that probability, at temperature 1."""
    low, high = 0.0, 100.0
    for _ in range(50):
        middle = (low + high) / 2
        others = (VOCAB_SIZE - FIRST_ID) * math.exp(middle**2 / (2 * hidden))
        is_more = math.exp(middle) / (math.exp(middle) + others) > share
        low, high = (low, middle) if is_more else (middle, high)
    return low


def write(directory: Path, shape: Shape, *, share: float, seed: int, max_context_tokens: int = 8192) -> None:
    """A checkpoint that follows the circles of `seed` in that share of its tokens."""
    make_model(
        directory,
        "llama",
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        vocab_size=VOCAB_SIZE,
        max_context_tokens=max_context_tokens,
        changes={"rope_theta": 10_000.0},
    )
    path = directory / "model.safetensors"
    weights = load_file(path)
    embedding = torch.randn(VOCAB_SIZE, shape.hidden, generator=torch.Generator().manual_seed(seed))
    embedding /= embedding.square().mean(1, keepdim=True).sqrt()
    head = torch.zeros_like(embedding)
    follows = successors(seed)
    head[list(follows.values())] = embedding[list(follows)] * gain_for(share, shape.hidden) / shape.hidden
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = embedding, head
    weights["model.norm.weight"] = torch.ones(shape.hidden)
    for name, weight in weights.items():
        if name.endswith(_PROJECTIONS):
            weights[name] = _QUIET * weight
    save_file(weights, path, metadata={"format": "pt"})

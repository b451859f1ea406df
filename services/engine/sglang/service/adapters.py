"""Adapters are read here, and loaded in a rank's scheduler, which then computes requests that have their id.

SGLang scales every layer of an adapter alike, whatever else its config says, and computes wrong for others
without a word; so they are refused here.
"""

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, deserialize

from services.engine.sglang.reports import LoadAdapter, UnloadAdapter
from services.engine.start_fault import reading
from services.model.lora import CONFIG, WEIGHTS, LoraLayer, config_of, digest_of, lora_layers
from services.values.adapter import Adapter
from services.values.errors import ConfigError, InvalidRequest

if TYPE_CHECKING:
    from services.engine.sglang.service.worker import SglangWorker

# SGLang reserves memory for adapters when it starts: for these layers and ranks, if operators load any later.
USUAL_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
USUAL_RANK = 64


@dataclass(frozen=True, slots=True)
class FoundAdapter:
    adapter: Adapter
    directory: Path
    layers: Mapping[str, LoraLayer]


def read_adapter(name: str, directory: Path) -> FoundAdapter:
    """Raise ConfigError where it is damaged, or of a kind that is not served, Unavailable where it cannot be
    read now."""
    try:
        with reading(f"the adapter {directory}"):
            config, content = config_of((directory / CONFIG).read_bytes()), (directory / WEIGHTS).read_bytes()
        layers = lora_layers(config, _shapes(content))
        _require_one_scale(config, layers.values())
        _require_fused(layers)
        return FoundAdapter(Adapter(name, digest_of(layers, content)), directory.resolve(), layers)
    except (ConfigError, InvalidRequest) as error:
        raise ConfigError(f"adapter {name} of {directory}: {error}") from error


def lora_id(adapter: Adapter) -> str:
    """Return what SGLang's radix keys have of it: what is cached is found again when it is loaded again."""
    return blake2b(f"{adapter.name} {adapter.digest}".encode(), digest_size=16).hexdigest()


def lora_arguments(adapters: Mapping[str, Path], loads_later: bool) -> list[str]:
    """Return SGLang's flags for these adapters. Raises as `read_adapter`."""
    read = [read_adapter(name, directory) for name, directory in adapters.items()]
    layers = [(name, layer) for each in read for name, layer in each.layers.items()]
    names = {name.rsplit(".", 1)[-1] for name, _ in layers}.union(USUAL_LAYERS if loads_later else ())
    ranks = [layer.rank for _, layer in layers] + [USUAL_RANK] * loads_later
    return [
        "--enable-lora",
        "--lora-strict-loading",
        f"--max-lora-rank={max(ranks)}",
        *("--lora-target-modules", *sorted(names)),
    ]


class SchedulerLoader:
    """It implements Loader for one DP rank."""

    def __init__(self, worker: "SglangWorker", dp_rank: int) -> None:
        self._worker = worker
        self._dp_rank = dp_rank

    def read(self, name: str, directory: Path) -> FoundAdapter:
        return read_adapter(name, directory)

    async def put(self, read: FoundAdapter) -> None:
        adapter = read.adapter
        order = LoadAdapter(secrets.token_hex(8), lora_id(adapter), adapter.name, str(read.directory))
        await self._worker.change(self._dp_rank, order)

    async def drop(self, adapter: Adapter) -> None:
        order = UnloadAdapter(secrets.token_hex(8), lora_id(adapter), adapter.name)
        await self._worker.change(self._dp_rank, order)


def _shapes(content: bytes) -> dict[str, tuple[int, ...]]:
    try:
        return {name: tuple(each["shape"]) for name, each in deserialize(content)}
    except SafetensorError as error:
        raise ConfigError(f"{WEIGHTS} is damaged: {error}") from error


def _require_one_scale(config: Mapping[str, Any], layers: Iterable[LoraLayer]) -> None:
    scale = config["lora_alpha"] / config["r"]
    if not all(layer.rank == config["r"] and isclose(layer.scale, scale) for layer in layers):
        raise ConfigError(
            "engine sglang scales all layers by lora_alpha / r: it serves no use_rslora, rank_pattern and "
            "alpha_pattern"
        )


def _require_fused(layers: Iterable[str]) -> None:
    """Raise ConfigError where SGLang, which fuses q_proj, k_proj and v_proj, would miss one of an adapter."""
    by_parent: dict[str, set[str]] = {}
    for layer in layers:
        parent, _, name = layer.rpartition(".")
        by_parent.setdefault(parent, set()).add(name)
    for parent, names in by_parent.items():
        if names & {"q_proj", "k_proj", "v_proj"} and not names >= {"q_proj", "v_proj"}:
            raise ConfigError(f"engine sglang takes no {parent} without both q_proj and v_proj")

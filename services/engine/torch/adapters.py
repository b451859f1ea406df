"""Linear layers also compute LoRA adapters, each for the rows of the sequences that asked for it.

    rows of a step   base base | a a a | base | b | a
    parts            a: rows 2, 3, 4, 7    b: row 6

A layer that an adapter changes gets a class of its own in place, so that all who hold a reference to it call
that. Layers that no adapter changes stay as they are, and without adapters nothing here runs. As in PEFT, an
adapter is computed in float32, whatever the model's dtype is.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor, nn

from services.engine.paged.model_runner import Chunk
from services.engine.start_fault import reading
from services.engine.torch.linear_kernel import packed
from services.model.lora import CONFIG, WEIGHTS, LoraLayer, config_of, digest_of, lora_layers
from services.values.adapter import Adapter
from services.values.errors import ConfigError, InvalidRequest


@dataclass(frozen=True, slots=True)
class Pair:
    down: nn.Module
    up: nn.Module  # Its weights include the scale.

    def __call__(self, rows: Tensor) -> Tensor:
        product: Tensor = self.up(self.down(rows.float()))
        return product


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    adapter: Adapter
    pairs: Mapping[str, Pair]  # They have the names of the model's layers.
    size_bytes: int


@dataclass(frozen=True, slots=True)
class _Part:
    adapter: Adapter
    rows: Tensor | None  # None means all rows of the step.


@dataclass
class _Step:
    parts: Sequence[_Part] = ()


@dataclass(slots=True)
class _Added:
    """These are the pairs of one layer."""

    step: _Step
    pairs: dict[Adapter, Pair] = field(default_factory=dict)

    def add(self, given: Tensor, product: Tensor) -> Tensor:
        for part in self.step.parts:
            pair = self.pairs.get(part.adapter)
            if pair is None:
                continue
            if part.rows is None:
                product = _sum(product, pair(given))
            else:
                own = _sum(product.index_select(-2, part.rows), pair(given.index_select(-2, part.rows)))
                product = product.index_copy(-2, part.rows, own)
        return product


def _sum(product: Tensor, added: Tensor) -> Tensor:
    return product + added if product.dtype == torch.float32 else (product.float() + added).to(product.dtype)


class TorchAdapters:
    def __init__(
        self, model: nn.Module, linears: Mapping[str, tuple[int, int]], device: torch.device
    ) -> None:
        """`linears` has the inputs and outputs of each linear layer that all tokens of a step go through."""
        self._model, self._linears, self._device = model, linears, device
        self._step = _Step()
        self._added: dict[str, _Added] = {}
        self.loaded: dict[Adapter, ReadAdapter] = {}

    def read(self, name: str, directory: Path) -> ReadAdapter:
        """Read an adapter that PEFT has saved, and pack its weights. Any thread may call it.

        Raises ConfigError where it is damaged, does not fit the model, or is of a kind that is not served.
        Raises Unavailable where it cannot be read now.
        """
        try:
            with reading(f"the adapter {directory}"):
                config, content = (directory / CONFIG).read_bytes(), (directory / WEIGHTS).read_bytes()
            tensors = _tensors(content)
            layers = lora_layers(config_of(config), {key: tuple(each.shape) for key, each in tensors.items()})
            self._require_fitting(layers)
            adapter = Adapter(name, digest_of(layers, content))
        except (ConfigError, InvalidRequest) as error:
            raise ConfigError(f"adapter {name} of {directory}: {error}") from error
        keys = {_layer_name(key): key.removesuffix(".lora_A.weight") for key in tensors if ".lora_A." in key}
        pairs = {name: self._pair(tensors, keys[name], layer.scale) for name, layer in layers.items()}
        return ReadAdapter(adapter, pairs, sum(4 * each.parameters for each in layers.values()))

    def put(self, read: ReadAdapter) -> None:
        """Compute it from now on; only the thread that computes steps calls this, and `drop`."""
        self.loaded[read.adapter] = read
        for name, pair in read.pairs.items():
            layer = self._model.get_submodule(name)
            if name not in self._added:
                added = self._added[name] = _Added(self._step)
                layer.lora = added
                layer.__class__ = _with_adapters(cast(Any, type(layer)))
            self._added[name].pairs[read.adapter] = pair

    def drop(self, adapter: Adapter) -> None:
        read = self.loaded.pop(adapter)
        for name in read.pairs:
            del self._added[name].pairs[adapter]
            if not self._added[name].pairs:
                del self._added[name]
                layer = self._model.get_submodule(name)
                layer.__class__ = type(layer).__bases__[0]
                del layer.lora

    @contextmanager
    def computing(self, chunks: Sequence[Chunk]) -> Iterator[None]:
        """Compute the rows of these chunks with their adapters, all of which are loaded."""
        self._step.parts = _parts(chunks, self._device)
        try:
            yield
        finally:
            self._step.parts = ()

    def _require_fitting(self, layers: Mapping[str, LoraLayer]) -> None:
        for name, layer in layers.items():
            sizes = self._linears.get(name)
            if sizes is None:
                raise ConfigError(
                    f"layer {name} of the model cannot have one: served are linear layers that get every "
                    "token, but not those of recurrent mixers and experts, nor embeddings and the head"
                )
            if sizes != (layer.num_inputs, layer.num_outputs):
                of_adapter = (layer.num_inputs, layer.num_outputs)
                raise ConfigError(f"layer {name} has (inputs, outputs) {sizes}, and there {of_adapter}")

    def _pair(self, tensors: Mapping[str, Tensor], key: str, scale: float) -> Pair:
        down = tensors[f"{key}.lora_A.weight"].float()
        up = tensors[f"{key}.lora_B.weight"].float() * scale
        threads = torch.get_num_threads()
        return Pair(*(packed(_linear(weight.to(self._device)), threads) for weight in (down, up)))


def _layer_name(key: str) -> str:
    return key.removesuffix(".lora_A.weight").removeprefix("base_model.model.")


def _tensors(content: bytes) -> dict[str, Tensor]:
    try:
        return load(content)
    except SafetensorError as error:
        raise ConfigError(f"{WEIGHTS} is damaged: {error}") from error


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


@cache
def _with_adapters(plain: type[nn.Module]) -> type[nn.Module]:
    """Return a subclass that adds the layer's pairs to what it computes."""

    def forward(self: Any, given: Tensor) -> Tensor:
        return self.lora.add(given, plain.forward(self, given))

    # Without hooks, as PanelLinear.
    return type(f"{plain.__name__}WithAdapters", (plain,), {"forward": forward, "__call__": forward})


def _parts(chunks: Sequence[Chunk], device: torch.device) -> list[_Part]:
    lengths = [len(chunk.token_ids) for chunk in chunks]
    rows: dict[Adapter, list[int]] = {}
    for end, length, chunk in zip(accumulate(lengths), lengths, chunks, strict=True):
        if chunk.adapter is not None:
            rows.setdefault(chunk.adapter, []).extend(range(end - length, end))
    total = sum(lengths)
    return [
        _Part(adapter, None if len(own) == total else torch.from_numpy(np.array(own, np.int64)).to(device))
        for adapter, own in rows.items()
    ]

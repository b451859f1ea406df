"""One tiny forward pass shows what a model stores for a sequence, which its names do not.

A call of `cache.update(key, value, layer)` shows that a layer stores K and V. The call of
`_attention_to_probe(query, key, ..)` that follows shows what it attends to: these, or tensors computed from
them (then they are a latent), or, if none were stored, another layer's. A call of
`cache.update_conv_state(..)` or `cache.update_recurrent_state(..)` shows that the innermost running module is
a mixer.

Any exception refuses the model: its definition needs something that is missing here.
"""

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from services.engine.start_fault import start_fault
from services.engine.torch.model.kv_groups import (
    AttentionCall,
    AttentionShape,
    Mixer,
    ProbeResult,
    State,
    StateKind,
    StateName,
)
from services.engine.torch.model.step_cache import cache_argument
from services.values.errors import ConfigError
from services.values.kv import GroupKind

_IMPLEMENTATION = "isthmus_probe"
_TOKENS = (1, 2, 3)
_EXPERT = re.compile(r"(^|\.)experts\.")


def probe(model: PreTrainedModel) -> ProbeResult:
    """Run `model` once, and leave it as it was.

    Raises ConfigError where the definition needs something that is missing here, and Unavailable where memory
    is short or the device is lost.
    """
    seen = _Probe(model.config.get_text_config(), model.device)
    try:
        with attending_by(model, _IMPLEMENTATION):
            seen.run(model)
        return seen.result()
    except ConfigError:
        raise
    except Exception as error:  # A model's definition may raise any exception.
        raise start_fault(f"{type(model).__name__} does not run here: {error!r}", error) from error


@contextmanager
def attending_by(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    own = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(own)


@dataclass
class _KeptTensors:
    layer_idx: int
    key: Tensor
    value: Tensor
    shape: AttentionShape | None = None  # This is None until the layer has attended.


@dataclass
class _Probe:
    config: PreTrainedConfig
    device: torch.device
    is_compileable = False
    _running: list[nn.Module] = field(default_factory=list)
    _states: dict[StateName, tuple[State, nn.Module]] = field(default_factory=dict)
    _kept: dict[int, _KeptTensors] = field(default_factory=dict)
    _pending: _KeptTensors | None = None
    _calls: list[AttentionCall] = field(default_factory=list)
    _ran: set[nn.Module] = field(default_factory=set)
    _shapes: dict[nn.Linear, list[torch.Size]] = field(default_factory=dict)  # These are of what each got.
    _logits_dtype: torch.dtype = torch.float32

    def run(self, model: PreTrainedModel) -> None:
        ids = torch.tensor([_TOKENS], device=model.device)
        with ExitStack() as hooks, torch.inference_mode():
            for module in model.modules():
                hooks.callback(module.register_forward_pre_hook(self._enter).remove)
                hooks.callback(module.register_forward_hook(self._leave).remove)
            output = model(
                input_ids=ids,
                position_ids=torch.arange(len(_TOKENS), device=model.device)[None],
                use_cache=False,
                probe=self,
                **{cache_argument(model): self},
            )
        self._logits_dtype = output.logits.dtype
        self._shapes.pop(model.get_output_embeddings(), None)
        for name, module in model.named_modules():
            if _EXPERT.search(name):  # It may get its tokens in another order.
                self._shapes.pop(module, None)

    def result(self) -> ProbeResult:
        if self._pending is not None:
            raise ConfigError(f"layer {self._pending.layer_idx} keeps K and V, and attends by itself")
        states = tuple(state for _, (state, _) in sorted(self._states.items()))
        mixers = self._mixers()
        return ProbeResult(
            tuple(self._calls),
            mixers,
            states,
            self._read_linears(),
            self._whole_linears(mixers),
            self._logits_dtype,
        )

    def _whole_linears(self, mixers: tuple[Mixer, ...]) -> frozenset[nn.Linear]:
        of_mixers = {part for mixer in mixers for part in mixer.module.modules()}
        whole = {linear for linear, shapes in self._shapes.items() if _is_whole(shapes)}
        return frozenset(linear for linear in whole if linear not in of_mixers)

    def _read_linears(self) -> frozenset[nn.Module]:
        linears = {
            child for module in self._ran for child in module.children() if isinstance(child, nn.Linear)
        }
        return frozenset(linears - self._ran)

    def _mixers(self) -> tuple[Mixer, ...]:
        """Return the mixers. A module that runs inside another mixer is a part of it."""
        modules = {module for _, module in self._states.values()}
        inner = {part for module in modules for part in module.modules() if part is not module}
        states_of: dict[nn.Module, list[StateName]] = {module: [] for module in modules - inner}
        for name, (_, module) in sorted(self._states.items()):
            owner = next(outer for outer in states_of if any(part is module for part in outer.modules()))
            states_of[owner].append(name)
        return tuple(Mixer(module, tuple(names)) for module, names in states_of.items())

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._running.append(module)
        self._ran.add(module)
        if type(module) is nn.Linear and len(inputs) == 1:
            self._shapes.setdefault(module, []).append(inputs[0].shape)

    def _leave(self, module: nn.Module, _inputs: Any, _output: Any) -> None:
        self._running.pop()

    # Attention calls these methods of its cache.

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if self._pending is not None:
            raise ConfigError(f"layer {self._pending.layer_idx} keeps K and V, and attends by itself")
        if layer_idx in self._kept:
            raise ConfigError(f"layer {layer_idx} keeps K and V twice")
        self._pending = self._kept[layer_idx] = _KeptTensors(layer_idx, key, value)
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        return torch.zeros(len(_TOKENS), dtype=torch.int64, device=self.device)

    get_query_offset = get_seq_length

    def attends(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        window: int | None,
        is_capped: bool,
    ) -> None:
        is_stored = self._pending is not None
        kept, self._pending = self._pending or self._kept_by_another(key), None
        kind, width = self._reach(getattr(module, "layer_idx", kept.layer_idx), window)
        if not is_stored:
            self._require_alike(kept, kind, width)
        else:
            kept.shape = AttentionShape(kind, width, *_kept_dims(kept, key, value), kept.key.dtype)
        assert kept.shape is not None
        self._calls.append(AttentionCall(kept.layer_idx, is_stored, kept.shape, query.shape[1], is_capped))

    def _kept_by_another(self, key: Tensor) -> _KeptTensors:
        for kept in self._kept.values():
            if kept.key is key:
                return kept
        raise ConfigError("a layer attends to keys that no cache has seen")

    def _require_alike(self, kept: _KeptTensors, kind: GroupKind, window: int) -> None:
        if kept.shape is None or (kept.shape.kind, kept.shape.window) != (kind, window):
            raise ConfigError(f"a layer reads K and V of layer {kept.layer_idx}, and not as that does")

    def _reach(self, layer_idx: int, sliding_window: int | None) -> tuple[GroupKind, int]:
        """Return how far back a layer sees.

        Attention functions get no argument for chunks, which are only in the mask.
        """
        layer_types = getattr(self.config, "layer_types", None) or ()
        named = layer_types[layer_idx] if 0 <= layer_idx < len(layer_types) else None
        if named == "chunked_attention":
            return GroupKind.CHUNKED_WINDOW, int(self.config.attention_chunk_size)
        if sliding_window is None and named == "sliding_attention":
            sliding_window = self.config.sliding_window
        return (GroupKind.SLIDING_WINDOW, sliding_window) if sliding_window else (GroupKind.FULL_ATTENTION, 0)

    # Mixers call these methods of their cache.

    @property
    def layers(self) -> "_NoStates":
        return _NoStates()

    def has_previous_state(self, layer_idx: int | None = None, state_idx: int | None = None) -> bool:
        return False

    def is_recording_past(self, layer_idx: int) -> bool:
        return False

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        return None

    get_recurrent_state = get_conv_state

    def update_conv_state(
        self,
        inputs: Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Record a state of `inputs` [1, channels, tokens], and return them padded to its size."""
        size = conv_kernel_size or inputs.shape[-1]
        self._found("conv", layer_idx, state_idx, (*inputs.shape[1:-1], size), inputs.dtype)
        return pad(inputs, (max(0, size - inputs.shape[-1]), 0))

    def update_recurrent_state(self, state: Tensor, layer_idx: int, state_idx: int = 0, **_: Any) -> Tensor:
        self._found("recurrent", layer_idx, state_idx, tuple(state.shape[1:]), state.dtype)
        return state

    def _found(
        self, kind: StateKind, layer_idx: int, index: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        name = (layer_idx, kind, index)
        self._states[name] = State(name, shape, dtype), self._running[-1]


def _is_whole(shapes: list[torch.Size]) -> bool:
    return len(shapes) == 1 and shapes[0][:-1] in (torch.Size((1, len(_TOKENS))), torch.Size((len(_TOKENS),)))


class _NoStates:
    """This is `cache.layers` of a cache without previous states; mixers only check whether it records."""

    record_past = False

    def __getitem__(self, layer_idx: int) -> "_NoStates":
        return self


def _kept_dims(kept: _KeptTensors, key: Tensor, value: Tensor) -> tuple[int, int, int]:
    heads, head_dim, v_head_dim = kept.key.shape[1], kept.key.shape[3], kept.value.shape[3]
    if key is kept.key and value is kept.value:
        if kept.value.shape[1] != heads:
            raise ConfigError(f"layer {kept.layer_idx} has {heads} heads of K and others of V")
        return heads, head_dim, v_head_dim
    if heads != 1 or kept.value.shape[1] != 1:
        raise ConfigError(f"layer {kept.layer_idx} attends to something else than the K and V that it keeps")
    return 1, head_dim + v_head_dim, 0


def _attention_to_probe(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    probe: _Probe,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    probe.attends(module, query, key, value, sliding_window, softcap is not None)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1]), None


AttentionInterface.register(_IMPLEMENTATION, _attention_to_probe)

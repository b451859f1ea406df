"""A recurrence of single tokens runs on a CPU in place of the function that a definition calls.

A mixer calls a function of its module that takes and returns states. Its parameters are those of the package
that it substitutes (flash-linear-attention, mamba-ssm, causal-conv1d), so these identify it, not the model.
The mixer's `forward` is copied with another function in its place, and passes the places of the states
instead of the states. Inputs that a kernel does not support are computed by the definition's own function on
copies.

On copies alone a decode step of eight sequences takes 53 % longer (qwen3_5 of 4 layers with states of 128 x
128, one thread); one of a single sequence takes no longer.
"""

import inspect
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.activations import ACT2FN

from services.engine.torch.model.activations import even, even_names, with_globals
from services.engine.torch.model.kv_groups import StateKind
from services.engine.torch.model.recurrence_kernel import Floats, delta_rule, mamba2
from services.engine.torch.model.step_cache import ConvStates, RecurrentStates, TokenRuns, by_rounds

_DELTA_RULE = {"query", "key", "value", "g", "beta", "initial_state"}
_CONV = {"hidden_states", "conv_state", "weight", "bias", "activation"}
_MAMBA2 = {"state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"}
_ALL_KINDS: Collection[StateKind] = ("conv", "recurrent")
# Another thread is worth waking only for so much work.
_SHARE_NUMBERS = 1 << 20
_EPSILON = 1e-6  # It is added to a vector's squared length before the vector is normalized.
_silu, _softplus = even(functional.silu), even(functional.softplus)


class Workers:
    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self.executor = ThreadPoolExecutor(num_threads - 1, "recurrence") if num_threads > 1 else None

    def run(
        self,
        kernel: Callable[..., Floats],
        numbers: Floats,
        runs: TokenRuns,
        of_slots: Tensor,
        arrays: Sequence[Floats],
    ) -> Tensor:
        num_items = len(runs.firsts) * of_slots.shape[1]
        item_numbers = of_slots[0, 0].numel() * runs.num_tokens // max(1, len(runs.firsts))
        shares = self.shares(num_items, item_numbers)
        of_numbers = runs.of_numbers(of_slots)
        return torch.from_numpy(kernel(numbers, of_numbers, *arrays, shares=shares, executor=self.executor))

    def shares(self, num_items: int, item_numbers: int) -> tuple[range, ...]:
        count = max(1, min(self._num_threads, num_items * item_numbers // _SHARE_NUMBERS))
        return tuple(
            map(range, *zip(*pairwise(num_items * i // count for i in range(count + 1)), strict=True))
        )

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown()


def forward_in_place(
    module: nn.Module, workers: Workers, kinds: Collection[StateKind] = _ALL_KINDS
) -> Callable[..., Any] | None:
    """Return the module's forward for single tokens, which takes states of `kinds` in place.

    Return None where the function that takes the states of one kind is not known.
    """
    # This is the function inside a decorator that first loads the weights of its convolution.
    plain = inspect.unwrap(type(module).forward)
    replaced = {
        name: known(function, workers)
        for name in plain.__code__.co_names
        if (function := plain.__globals__.get(name)) and (known := _known(function))
    }
    if not {known.kind for known in replaced.values()} >= set(kinds):
        return None
    return MethodType(with_globals(plain, **even_names(plain), **replaced), module)


class _Replacement(Protocol):
    kind: StateKind

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...


_Known = Callable[[Callable[..., Any], Workers], _Replacement]


def _known(function: Any) -> _Known | None:
    if not isinstance(function, FunctionType):
        return None
    names = set(inspect.signature(function).parameters)
    if names >= _DELTA_RULE and "chunk_size" not in names:
        return _DeltaRule
    if names >= _CONV:
        return _Convolution
    return _Mamba2 if names >= _MAMBA2 else None


class _Convolution:
    """This substitutes causal_conv1d_update of causal-conv1d."""

    kind: StateKind = "conv"

    def __init__(self, fallback: Callable[..., Any], _workers: Workers) -> None:
        self._fallback = fallback

    def __call__(
        self,
        hidden_states: Tensor,
        conv_state: Any,
        weight: Tensor,
        bias: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        if isinstance(conv_state, ConvStates):
            conv_state = conv_state.before(hidden_states)
        output: Tensor = self._fallback(hidden_states, conv_state, weight, bias)
        return output if activation is None else even(ACT2FN[activation])(output)


class _DeltaRule:
    """This substitutes fused_recurrent_gated_delta_rule of flash-linear-attention."""

    kind: StateKind = "recurrent"

    def __init__(self, fallback: Callable[..., Any], workers: Workers) -> None:
        self._fallback, self._workers = fallback, workers

    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        g: Tensor,
        beta: Tensor,
        initial_state: Any = None,
        use_qk_l2norm_in_kernel: bool = False,
        **others: Any,
    ) -> tuple[Tensor, Any]:
        """Compute the rule for single tokens.

        `value` is [num_tokens, 1, heads, ..]. `query` and `key` have as many heads or a divisor of them. `g`
        and `beta` are [num_tokens, 1, heads].
        """
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **others}
        if not isinstance(initial_state, RecurrentStates):
            outputs: tuple[Tensor, Any] = self._fallback(
                query, key, value, g=g, beta=beta, initial_state=initial_state, **options
            )
            return outputs
        numbers = initial_state.numbers
        if numbers is None or g.dim() != 3 or query.shape[1] != 1:
            inputs = dict(query=query, key=key, value=value, g=g, beta=beta)
            compute = partial(self._on_copies, initial_state, inputs, options)
            return initial_state.go_on(compute), initial_state
        q, k, v, decay, strength = (part[:, 0].float() for part in (query, key, value, g, beta))
        if (repeats := v.shape[1] // k.shape[1]) > 1:
            # Before transformers 5.24 a definition repeats them itself.
            q, k = (part.repeat_interleave(repeats, dim=1) for part in (q, k))
        if use_qk_l2norm_in_kernel:
            q, k = (part * (part.square().sum(-1, keepdim=True) + _EPSILON).rsqrt() for part in (q, k))
        q = q / q.shape[-1] ** 0.5
        arrays = [part.contiguous().numpy() for part in (q, k, v, decay.exp(), strength)]
        output = initial_state.go_on(
            lambda runs: self._workers.run(delta_rule, numbers, runs, initial_state.of_slots, arrays)
        )
        return output[:, None].to(query.dtype), initial_state

    def _on_copies(
        self, states: RecurrentStates, inputs: dict[str, Tensor], options: dict[str, Any], runs: TokenRuns
    ) -> Tensor:
        def step(own: dict[str, Tensor], tokens: Tensor) -> Tensor:
            of_tokens = {name: part[tokens] for name, part in inputs.items()}
            output: Tensor
            output, own["state"] = self._fallback(**of_tokens, initial_state=own["state"], **options)
            return output

        return by_rounds({"state": states.of_slots}, runs, len(inputs["query"]), step)


class _Mamba2:
    """This substitutes selective_state_update of mamba-ssm.

    There is one decay and one time step per head.
    """

    kind: StateKind = "recurrent"

    def __init__(self, fallback: Callable[..., Any], workers: Workers) -> None:
        self._fallback, self._workers = fallback, workers

    def __call__(
        self,
        state: Any,
        hidden_states: Tensor,
        dt: Tensor,
        A: Tensor,
        B: Tensor,
        C: Tensor,
        D: Tensor | None = None,
        dt_bias: Tensor | None = None,
        dt_softplus: bool = False,
        z: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """The inputs and `dt` are [num_tokens, heads, head_dim]; `B` and `C` are [.., groups, d_state]."""
        rest = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, **others)
        if not isinstance(state, RecurrentStates):
            return self._fallback(state, hidden_states, dt, A, B, C, z=z, **rest)
        numbers = state.numbers
        of_heads = A.dim() == 3 and A.stride()[1:] == (0, 0) and dt.stride(-1) == 0
        if numbers is None or not of_heads or (dt_bias is not None and dt_bias.stride(-1) != 0):
            inputs = dict(hidden_states=hidden_states, dt=dt, B=B, C=C, z=z)
            return state.go_on(partial(self._on_copies, state, inputs, {"A": A, **rest}))
        step = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        step = (_softplus(step) if dt_softplus else step).float()
        scaled = hidden_states.float() * step[..., None]
        parts = (scaled, (step * A[:, 0, 0].float()).exp(), B.float(), C.float())
        arrays = [part.contiguous().numpy() for part in parts]
        output = state.go_on(lambda runs: self._workers.run(mamba2, numbers, runs, state.of_slots, arrays))
        if D is not None:
            output = output + hidden_states * D
        if z is not None:
            output = output * _silu(z)
        return output.to(hidden_states.dtype)

    def _on_copies(
        self, states: RecurrentStates, inputs: dict[str, Any], options: dict[str, Any], runs: TokenRuns
    ) -> Tensor:
        def step(own: dict[str, Tensor], tokens: Tensor) -> Tensor:
            of_tokens = {name: part if part is None else part[tokens] for name, part in inputs.items()}
            output: Tensor = self._fallback(own["state"], **of_tokens, **options)
            return output

        return by_rounds({"state": states.of_slots}, runs, len(inputs["B"]), step)

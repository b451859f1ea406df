"""Single tokens through a recurrence in place of what a definition calls, on a CPU.

A mixer calls a function of its module that takes states and gives them back: by the parameters of the
packages whose place it takes (flash-linear-attention, mamba-ssm), so it is known by these, not by the model.
The mixer's `forward` is made anew, with another function in that one's place, and instead of states it hands
through where they lie. What a kernel does not take, the definition's own function computes on copies.
"""

import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import silu

from services.engine.torch.model.recurrence_kernel import delta_rule, mamba2
from services.engine.torch.model.slots import StatesInPlace

_DELTA_RULE = {"query", "key", "value", "g", "beta", "initial_state"}
_MAMBA2 = {"state", "hidden_states", "dt", "A", "B", "C", "D", "dt_bias", "dt_softplus", "z"}
# What one more thread must find to do, to be worth waking.
_SHARE_NUMBERS = 1 << 20
_LARGE = 20.0  # whose softplus it is itself, to float32
_EPSILON = 1e-6  # of a vector's length, when it is made one


class _RowByRow:
    """torch.nn.functional, but for what gives a number other bits where others stand beside it.

    Its vectors take 32 numbers at a time, and what is left over one by one, by another formula.
    """

    def __getattr__(self, name: str) -> Any:
        return _softplus if name == "softplus" else getattr(functional, name)


def _softplus(numbers: Tensor) -> Tensor:
    return torch.where(numbers > _LARGE, numbers, numbers.exp().log1p())


class Workers:
    """Threads beside the one that computes."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self.executor = ThreadPoolExecutor(num_threads - 1, "recurrence") if num_threads > 1 else None

    def shares(self, num_items: int, item_numbers: int) -> tuple[range, ...]:
        """Cut [0, num_items), each of which is so many numbers of a state."""
        count = max(1, min(self._num_threads, num_items * item_numbers // _SHARE_NUMBERS))
        return tuple(
            map(range, *zip(*pairwise(num_items * i // count for i in range(count + 1)), strict=True))
        )

    def close(self) -> None:
        if self.executor is not None:
            self.executor.shutdown()


def forward_in_place(module: nn.Module, workers: Workers) -> Callable[..., Any] | None:
    """The module's forward for single tokens whose recurrent states are StatesInPlace; None: not known."""
    plain = inspect.unwrap(type(module).forward)  # of what loads the weights of its convolution first
    replaced = {
        name: known(function, workers)
        for name in plain.__code__.co_names
        if (function := plain.__globals__.get(name)) and (known := _known(function))
    }
    if not replaced:
        return None
    own = {**plain.__globals__, **replaced}
    if own.get("F") is functional:
        own["F"] = _RowByRow()
    anew = FunctionType(plain.__code__, own, plain.__name__, plain.__defaults__, plain.__closure__)
    anew.__kwdefaults__ = plain.__kwdefaults__
    return MethodType(anew, module)


class _Known(Protocol):
    def __call__(self, fallback: Callable[..., Any], workers: Workers) -> Callable[..., Any]: ...


def _known(function: Any) -> _Known | None:
    if not isinstance(function, FunctionType):
        return None
    names = set(inspect.signature(function).parameters)
    if names >= _DELTA_RULE and "chunk_size" not in names:
        return _DeltaRule
    return _Mamba2 if names >= _MAMBA2 else None


class _DeltaRule:
    """For fused_recurrent_gated_delta_rule of flash-linear-attention."""

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
        """`query`, `key` and `value` are [m, 1, heads, ..], `g` and `beta` [m, 1, heads]."""
        options = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, **others}
        if not isinstance(initial_state, StatesInPlace):
            outputs: tuple[Tensor, Any] = self._fallback(
                query, key, value, g=g, beta=beta, initial_state=initial_state, **options
            )
            return outputs
        if g.dim() != 3 or query.shape[1] != 1:
            states = initial_state.gathered()
            output, last = self._fallback(query, key, value, g=g, beta=beta, initial_state=states, **options)
            initial_state.scatter(last)
            return output, initial_state
        q, k, v, decay, strength = (part[:, 0].float() for part in (query, key, value, g, beta))
        if use_qk_l2norm_in_kernel:
            q, k = (part * (part.square().sum(-1, keepdim=True) + _EPSILON).rsqrt() for part in (q, k))
        q = q / q.shape[-1] ** 0.5
        inputs = [part.contiguous().numpy() for part in (q, k, v, decay.exp(), strength)]
        shares = self._workers.shares(q.shape[0] * q.shape[1], q.shape[2] * v.shape[2])
        output = delta_rule(
            *(initial_state.numbers, initial_state.starts, *inputs),
            shares=shares,
            executor=self._workers.executor,
        )
        return torch.from_numpy(output)[:, None].to(query.dtype), initial_state


class _Mamba2:
    """For selective_state_update of mamba-ssm, with one decay and one time step a head."""

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
        """`hidden_states` and `dt` are [m, heads, head_dim], `B` and `C` [m, groups, d_state]."""
        rest = dict(D=D, dt_bias=dt_bias, dt_softplus=dt_softplus, z=z, **others)
        if not isinstance(state, StatesInPlace):
            return self._fallback(state, hidden_states, dt, A, B, C, **rest)
        of_heads = A.dim() == 3 and A.stride()[1:] == (0, 0) and dt.stride(-1) == 0
        if not of_heads or (dt_bias is not None and dt_bias.stride(-1) != 0):
            states = state.gathered()
            output = self._fallback(states, hidden_states, dt, A, B, C, **rest)
            state.scatter(states)
            return output
        step = dt[..., 0] if dt_bias is None else dt[..., 0] + dt_bias[..., 0].to(dt.dtype)
        step = (_softplus(step) if dt_softplus else step).float()
        scaled = hidden_states.float() * step[..., None]
        parts = (scaled, (step * A[:, 0, 0].float()).exp(), B.float(), C.float())
        inputs = [part.contiguous().numpy() for part in parts]
        shares = self._workers.shares(scaled.shape[0] * scaled.shape[1], scaled.shape[2] * B.shape[-1])
        computed = mamba2(
            *(state.numbers, state.starts, *inputs), shares=shares, executor=self._workers.executor
        )
        output = torch.from_numpy(computed)
        if D is not None:
            output = output + hidden_states * D
        if z is not None:
            output = output * silu(z)
        return output.to(hidden_states.dtype)

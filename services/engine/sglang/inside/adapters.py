"""A scheduler loads adapters that our service orders, and tries them at once.

SGLang reads an adapter's weights when it is loaded, and compares them with the model when a request first
needs them, where a difference ends the scheduler.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from sglang.srt.managers.io_struct import (
    LoadLoRAAdapterReqInput,
    LoRAUpdateOutput,
    UnloadLoRAAdapterReqInput,
)
from sglang.srt.runtime_context import get_lora
from sglang.srt.utils import is_pin_memory_available

from services.engine.sglang.reports import LoadAdapter, UnloadAdapter


def change_of(order: LoadAdapter | UnloadAdapter) -> LoadLoRAAdapterReqInput | UnloadLoRAAdapterReqInput:
    if isinstance(order, UnloadAdapter):
        return UnloadLoRAAdapterReqInput(rid=order.change, lora_id=order.lora_id, lora_name=order.name)
    return LoadLoRAAdapterReqInput(
        rid=order.change, lora_id=order.lora_id, lora_name=order.name, lora_path=order.directory
    )


def load_wholly(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    """Load an adapter, around Scheduler.load_lora_adapter, as far as into the memory that steps use.

    Another adapter may lose its place there, and gets one again before the next step that needs it. With
    --enable-lora-overlap-loading that is not so, and nothing is tried.
    """
    manager = scheduler.tp_worker.model_runner.lora_manager
    if request.lora_id in manager.loras:  # SGLang asserts that it is not.
        return manager.create_lora_update_result(success=True)
    result = original(scheduler, request)
    if not result.success or get_lora().enable_lora_overlap_loading:
        return result
    try:
        _finish_steps()
        manager.fetch_new_loras({request.lora_id})
        _finish_steps()
    except Exception as error:  # SGLang asserts what an adapter's weights must be.
        given_up = UnloadLoRAAdapterReqInput(lora_id=request.lora_id, lora_name=request.lora_name)
        scheduler.unload_lora_adapter(given_up)
        return LoRAUpdateOutput(success=False, error_message=str(error))
    return result


def _finish_steps() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def allow_unpinned(*_args: Any, **_kwargs: Any) -> None:
    """Let SGLang pin no memory, before LoRAManager.__init__, where torch can pin none: on a CPU."""
    if is_pin_memory_available():
        return
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = _Unpinned("torch")
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


class _Unpinned(ModuleType):
    """It is torch, and ignores `pin_memory`."""

    def __getattr__(self, name: str) -> Any:
        value = getattr(torch, name)
        return _unpinned(value) if name in ("tensor", "zeros") else value


def _unpinned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    return made

"""A plugin for SGLang as it is, but for one thing: it waits where it spins, as our own plugin has it do.

What Isthmus gains by routing, and what by leaving the cores to those who have work, is told apart by it.
"""

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from services.engine.sglang.inside import idle_waits
from services.transfer.nixl import let_sleep
from services.transfer.nixl_settings import NixlSettings

_MANAGER = "sglang.srt.disaggregation.common.conn.CommonKVManager"
_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_CONTROLLER = "sglang.srt.managers.data_parallel_controller.DataParallelController"


def register() -> None:
    HookRegistry.register("nixl._api.nixl_agent.create_backend", _let_sleep, HookType.BEFORE)
    HookRegistry.register(f"{_MANAGER}.update_status", _note_news, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.on_idle", idle_waits.wait_for_news, HookType.AFTER)
    HookRegistry.register(f"{_CONTROLLER}.event_loop", idle_waits.wait_for_requests, HookType.BEFORE)


def _let_sleep(agent: Any, backend: str, *_: Any, **__: Any) -> None:
    let_sleep(agent, NixlSettings(backend), one_thread=False)


def _note_news(_result: None, *_: Any, **__: Any) -> None:
    idle_waits.transfer_news().set()

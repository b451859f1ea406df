"""This is the entry point `sglang.srt.plugins`: SGLang calls `register` in each process it starts.

It opens nothing, since it also runs in processes that hold no KV.
"""

import os
from collections.abc import Callable
from typing import Any

from services.engine.sglang.plugin_settings import VARIABLE

_SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
_COMPONENTS = "sglang.srt.managers.scheduler_components"


def register() -> None:
    """Make SGLang use our KV classes, requests, event publisher and grammar tokenizer."""
    if VARIABLE not in os.environ:
        return  # It is installed beside SGLang, but we did not start this SGLang.
    from sglang.srt.disaggregation.kv_events import EventPublisherFactory
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from services.engine.sglang.inside import adapters, idle_waits, reporter, scheduler_door
    from services.engine.sglang.inside.scheduler_door import TreeEventPublisher, publish_events

    HookRegistry.register("sglang.srt.disaggregation.utils.get_kv_class", _kv_class, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.disaggregation.decode.DecodePreallocQueue._create_receiver_and_enqueue",
        _note_prompt_len,
        HookType.AFTER,
    )
    for queue in ("decode.DecodePreallocQueue", "prefill.PrefillBootstrapQueue"):
        target = f"sglang.srt.disaggregation.{queue}._init_kv_manager"
        HookRegistry.register(target, _note_scheduler, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.constrained.grammar_manager.GrammarManager.__init__",
        _give_tokenizer,
        HookType.AFTER,
    )
    HookRegistry.register(f"{_SCHEDULER}.process_batch_result", publish_events, HookType.AFTER)
    receive = f"{_COMPONENTS}.request_receiver.SchedulerRequestReceiver._broadcast_reqs_across_ranks"
    HookRegistry.register(receive, scheduler_door.take_orders, HookType.BEFORE)
    send = f"{_COMPONENTS}.output_sender.SenderWrapper.send_output"
    HookRegistry.register(send, scheduler_door.report_outputs, HookType.AROUND)
    HookRegistry.register(f"{_SCHEDULER}.publish_load_snapshot", reporter.note_load, HookType.AFTER)
    HookRegistry.register(f"{_SCHEDULER}.load_lora_adapter", adapters.load_wholly, HookType.AROUND)
    manager = "sglang.srt.lora.lora_manager.LoRAManager.__init__"
    HookRegistry.register(manager, adapters.allow_unpinned, HookType.BEFORE)
    HookRegistry.register(f"{_SCHEDULER}.on_idle", idle_waits.wait_for_news, HookType.AFTER)
    HookRegistry.register(
        "sglang.srt.managers.data_parallel_controller.DataParallelController.event_loop",
        idle_waits.wait_for_requests,
        HookType.BEFORE,
    )
    EventPublisherFactory.register_publisher("isthmus", TreeEventPublisher)


def _kv_class(original: Callable[..., Any], backend: Any, class_type: Any) -> Any:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

    from services.engine.sglang.inside import kv_classes

    ours = {
        KVClassType.MANAGER: kv_classes.IsthmusKVManager,
        KVClassType.SENDER: kv_classes.IsthmusKVSender,
        KVClassType.RECEIVER: kv_classes.IsthmusKVReceiver,
        KVClassType.BOOTSTRAP_SERVER: kv_classes.NoBootstrapServer,
    }
    if backend == TransferBackend.NIXL and class_type in ours:
        return ours[class_type]
    return original(backend, class_type)


def _give_tokenizer(result: Any, manager: Any, scheduler: Any) -> None:
    # This is imported late, as SGLang silences existing loggers when it sets up its own.
    from services.engine.sglang.inside.grammar_tokenizer import give_tokenizer

    give_tokenizer(manager, scheduler)


def _note_prompt_len(decode_request: Any, queue: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """Record the prompt's length, which a ticket has and SGLang's own metadata lacks."""
    decode_request.kv_receiver.prompt_len = len(request.origin_input_ids)


def _note_scheduler(queue: Any) -> None:
    from services.engine.sglang.inside.kv_classes import IsthmusKVManager

    IsthmusKVManager.window_size = int(queue.scheduler.sliding_window_size or 0)

"""A plugin for SGLang as it is: what each decode rank already held of a request, and what prefill wrote.

SGLang says neither (its `cached_tokens` is the larger of both sides). The NIXL classes stay SGLang's own;
the hooks look, and register host memory as such on a CPU, without which NIXL does not run there. They
append a line of JSON per event to the file that the environment names:

    ticket   on decode, when it tells prefill where the KV goes: rid, dp_rank, decode_prefix_len, pages
    written  on prefill, when writes are posted: pages, size_bytes
"""

import json
import os
from pathlib import Path
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

FILE_VARIABLE = "ISTHMUS_BENCH_PROBE"
_NIXL = "sglang.srt.disaggregation.nixl.conn"
_QUEUE = "sglang.srt.disaggregation.decode.DecodePreallocQueue"


def register() -> None:
    HookRegistry.register(f"{_NIXL}.NixlKVManager.__init__", _register_host_memory, HookType.BEFORE)
    HookRegistry.register(f"{_NIXL}.NixlKVManager.send_kvcache", _note_written, HookType.AFTER)
    HookRegistry.register(f"{_NIXL}.NixlKVReceiver.send_metadata", _note_ticket, HookType.BEFORE)
    HookRegistry.register(f"{_QUEUE}._create_receiver_and_enqueue", _note_rid, HookType.AFTER)


def _register_host_memory(manager: Any, args: Any, mode: Any, server_args: Any, *_: Any, **__: Any) -> None:
    if server_args.device == "cpu":
        args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)


def _note_rid(decode_request: Any, queue: Any, request: Any, *_: Any, **__: Any) -> None:
    decode_request.kv_receiver.bench_rid = request.rid


def _note_ticket(
    receiver: Any,
    kv_indices: Any,
    aux_index: Any = None,
    state_indices: Any = None,
    decode_prefix_len: int | None = None,
    *_: Any,
    **__: Any,
) -> None:
    manager = receiver.kv_mgr
    dp_rank = manager.attn_dp_rank if manager.system_dp_size == 1 else manager.system_dp_rank
    _append(
        kind="ticket",
        rid=receiver.bench_rid,
        dp_rank=int(dp_rank or 0),
        decode_prefix_len=int(decode_prefix_len or 0),
        pages=len(kv_indices),
    )


def _note_written(handle: Any, manager: Any, peer_name: str, kv_indices: Any, *_: Any, **__: Any) -> None:
    page_bytes = int(sum(manager.kv_args.kv_item_lens))
    _append(kind="written", pages=len(kv_indices), size_bytes=len(kv_indices) * page_bytes)


def _append(**event: object) -> None:
    with Path(os.environ[FILE_VARIABLE]).open("a") as file:
        file.write(json.dumps(event) + "\n")

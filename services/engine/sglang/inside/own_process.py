"""Both roles need the identity and the memory of their own process."""

import queue
from dataclasses import replace
from functools import cached_property
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager, num_kv_slots
from sglang.srt.disaggregation.utils import DisaggregationMode

from services.engine.sglang.inside.frames import Frames
from services.engine.sglang.inside.process_memory import (
    AttentionHeads,
    Buffers,
    Draft,
    HostAgent,
    ProcessMemory,
    components_of,
    read_item_bytes,
)
from services.engine.sglang.inside.reporter import LoopThread
from services.engine.sglang.plugin_settings import PluginSettings
from services.transfer.hello import Hello
from services.transfer.nixl import let_sleep, telling_paths
from services.values.kv import KvLayout, PoolMemory
from services.values.rank import Generation, RankId

_TRANSPORT = "sglang-nixl"


class _Inbox:
    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Frames] = queue.SimpleQueue()
        self.put = self._queue.put

    def recv_multipart(self) -> Frames:
        return self._queue.get()


class OwnProcess(NixlKVManager):
    # The plugin's hook sets it.
    window_size = 0  # A windowed layer sees so many tokens before its own.

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        self._settings = PluginSettings.from_environment()
        self._loop_thread = LoopThread("isthmus-handshake")
        self._inbox = _Inbox()
        self._topology: dict[str, Any] = {}
        self._listening = ""
        self._sleeps = bool(server_args.sleep_on_idle)
        self._on_cpu = server_args.device == "cpu"
        self._nixl = self._settings.nixl(writes=mode == DisaggregationMode.PREFILL)
        if self._on_cpu:
            args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        with telling_paths(self._nixl):
            super().__init__(args, mode, server_args, is_mla_backend)

    @property
    def agent(self) -> Any:
        """Return NIXL's agent, which the base constructor sets before it gives it a backend."""
        return self._agent

    @agent.setter
    def agent(self, agent: Any) -> None:
        if self._sleeps:
            let_sleep(agent, self._nixl, one_thread=False)
        self._agent = HostAgent(agent) if self._on_cpu else agent

    @property
    def _dp_rank(self) -> int:
        rank = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        return int(rank or 0)

    @cached_property
    def _memory(self) -> ProcessMemory:
        args, settings = self.kv_args, self._settings
        own, of_draft = read_item_bytes(args.kv_item_lens, int(args.num_draft_entries))
        heads = AttentionHeads(settings.num_kv_heads, settings.head_dim, str(self.kv_cache_dtype_str))
        # This is MLA, also beside recurrent layers.
        is_latent = bool(self.is_mla_backend or getattr(args, "is_hybrid_mla_backend", False))
        buffers = Buffers(own, heads, is_latent)
        return ProcessMemory(
            page_size=int(args.page_size),
            num_pages=int(num_kv_slots(args.kv_data_lens, args.kv_item_lens)),
            tp_size=int(self.attn_tp_size),
            buffers=buffers,
            layer_ids=tuple(map(int, args.kv_layer_ids[: len(own)])),
            components=components_of(args),
            window_size=self.window_size,
            draft=self._draft(of_draft, buffers) if of_draft else None,
        )

    def _draft(self, item_bytes: tuple[int, ...], of_model: Buffers) -> Draft:
        """Return the draft; without a checkpoint of its own it is a layer of the model's."""
        settings, buffers = self._settings, replace(of_model, item_bytes=item_bytes)
        if settings.draft_kv_heads:
            heads = replace(
                of_model.heads, num_kv_heads=settings.draft_kv_heads, head_dim=settings.draft_head_dim
            )
            buffers = Buffers(item_bytes, heads, settings.draft_is_latent)
        return Draft(buffers, settings.draft_fingerprint)

    @cached_property
    def _layout(self) -> KvLayout:
        return self._memory.layout(self._settings.model_fingerprint)

    def _own_hello(self, agent_metadata: bytes = b"") -> Hello:
        generation = Generation(self._settings.generations[self._dp_rank])
        rank = RankId(self._settings.worker, self._dp_rank, generation)
        kinds = getattr(self.kv_args, "kv_data_mem_kinds", None) or ["VRAM"]
        place = kinds[0], int(self.kv_args.gpu_id or 0)
        memory = self._memory
        pages = PoolMemory(0, memory.num_pages, *place)
        carried = [PoolMemory(0, part.num_units, *place) for part in memory.components if part.is_carried]
        return Hello.of(rank, self._layout, (pages, *carried, pages), _TRANSPORT, agent_metadata)

    def _take_inbox(self) -> None:
        """Let SGLang's threads read our inbox from now on; its own socket is closed unread."""
        self.server_socket.close(linger=0)
        self.server_socket: Any = self._inbox

    def _fail_transfer(self, transfer_id: int, reason: str) -> None:
        """Fail a transfer, even before its request arrives, so that it does not wait for another ticket."""
        self.record_failure(transfer_id, reason)
        if transfer_id not in self.request_status:
            self.update_status(transfer_id, KVPoll.Bootstrapping)
        self.update_status(transfer_id, KVPoll.Failed)

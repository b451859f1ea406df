"""SGLang's NIXL manager, sender and receiver use our Handshake instead of ZMQ and its HTTP registry.

SGLang keeps its handling of KV: queues, radix trees, NIXL writes, deferred release. Only the communication of
its processes is replaced:

    SGLang                                     here
    PULL socket of each process                inbox, filled by our streams
    PUSH sockets, blocking sends               outboxes of streams, on a loop of their own
    registry over HTTP (PUT/GET /route)        Handshake.DescribeRanks of the prefill service
    heartbeat over HTTP                        the stream itself: it ends when the peer does

SGLang spawns its processes, and the manager's constructor is the first to use gRPC in them.
"""

import logging
import os
from contextlib import nullcontext
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender
from sglang.srt.disaggregation.utils import DisaggregationMode

from services.engine.sglang.inside import idle_waits
from services.engine.sglang.inside.decode_end import DecodeEnd
from services.engine.sglang.inside.frames import Frames
from services.engine.sglang.inside.prefill_end import PrefillEnd
from services.engine.sglang.inside.reporter import BEAT_S, LOAD_S, process_reporter, report_load
from services.engine.sglang.reports import Active, Beat, TicketSent, draft_fields, group_fields
from services.values.errors import ProtocolError

log = logging.getLogger(__name__)


class IsthmusKVManager(PrefillEnd, DecodeEnd):
    """Each of SGLang's processes with KV has one; its role decides which end is used."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        idle_waits.more_fds.append(process_reporter().fileno())
        process_reporter().report(self._active())
        self._loop_thread.every(LOAD_S, report_load)
        beat = Beat(os.getpid(), self._settings.advertise_host)
        self._loop_thread.every(BEAT_S, lambda: process_reporter().report(beat))

    def _active(self) -> Active:
        decode = self.disaggregation_mode == DisaggregationMode.DECODE
        return Active(
            role="decode" if decode else "prefill",
            dp_rank=self._dp_rank,
            tp_rank=int(self.attn_tp_rank),
            cp_rank=int(self.attn_cp_rank),
            pp_rank=int(self.pp_rank or 0),
            tp_size=int(self.attn_tp_size),
            pid=os.getpid(),
            endpoint=self._listening,
            page_size=int(self.kv_args.page_size),
            page_bytes=self._memory.page_bytes,
            num_pages=self._memory.num_pages,
            dtype=str(self.kv_cache_dtype_str),
            num_layers=self._memory.num_layers,
            state_kinds=[component.kind for component in self._memory.components],
            carried=[group_fields(group) for group in self._layout.carried],
            draft=draft_fields(self._layout.draft),
            topology=self._topology,
        )


class NoBootstrapServer(BaseKVBootstrapServer):
    """Our service answers DescribeRanks, so SGLang's HTTP registry is not needed."""

    def __init__(self, host: str, port: int) -> None:
        log.info("bootstrap_server_replaced by=Handshake.DescribeRanks")


class IsthmusKVSender(NixlKVSender):
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Begin; `num_kv_indices` counts pages past decode_prefix_len, which SGLang never checks."""
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.check_ticket_of(self.bootstrap_room, num_kv_indices)

    def clear(self) -> None:
        super().clear()
        if self.bootstrap_room not in self.kv_mgr.request_status:
            self.kv_mgr.forget_transfer(self.bootstrap_room)

    def _register_prefill_dp_rank(self) -> None:
        reason = "the request does not carry disagg_prefill_dp_rank; there is no registry to put it in"
        self.kv_mgr.record_failure(self.bootstrap_room, reason)
        self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)


class _ToPrefill:
    def __init__(self, manager: IsthmusKVManager, endpoint: str) -> None:
        self._manager = manager
        self._endpoint = endpoint

    def open(self) -> None:
        self._manager.open_stream(self._endpoint)

    def send_multipart(self, parts: Frames, prompt_len: int = 0) -> None:
        self._manager.send_to_prefill(self._endpoint, self._manager.message_of(parts, prompt_len))


class IsthmusKVReceiver(NixlKVReceiver):
    prompt_len = 0  # This is in tokens; the plugin's hook sets it.

    @classmethod
    def _connect_to_bootstrap_server(cls, bootstrap_info: dict[str, Any]) -> tuple[Any, Any]:
        return bootstrap_info["stream"], nullcontext()

    def _get_bootstrap_info_from_server(
        self, prefill_dp_rank: int, prefill_cp_rank: int, target_tp_rank: int, target_pp_rank: int
    ) -> dict[str, Any] | None:
        place = (int(prefill_dp_rank), int(prefill_cp_rank), int(target_tp_rank), int(target_pp_rank))
        endpoint = self.kv_mgr.process_of(self.bootstrap_addr, place)
        if endpoint is None:
            return None
        host, _, port = endpoint.rpartition(":")
        stream = _ToPrefill(self.kv_mgr, endpoint)
        return {"rank_ip": host, "rank_port": int(port), "pp_rank": int(target_pp_rank), "stream": stream}

    def _send_bootstrap_message(
        self, *, bootstrap_info: dict[str, Any], message: Frames, operation: str
    ) -> bool:
        """Return at once: the stream's Hello is the registration, so there is nothing more to send."""
        if operation == "_register_kv_args":
            bootstrap_info["stream"].open()
            return True
        try:
            bootstrap_info["stream"].send_multipart(message, self.prompt_len)
        except ProtocolError as error:
            self.kv_mgr.record_failure(self.bootstrap_room, str(error))
            self.kv_mgr.update_status(self.bootstrap_room, KVPoll.Failed)
            self.conclude_state = KVPoll.Failed
            return False
        return True

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: Any = None,
        decode_prefix_len: int | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        super().send_metadata(kv_indices, aux_index, state_indices, decode_prefix_len, *args, **kwargs)
        ticket = TicketSent(self.bootstrap_room, int(decode_prefix_len or 0), len(kv_indices))
        process_reporter().report(ticket)

    def _clear(self) -> None:
        self.kv_mgr.forget_transfer(self.bootstrap_room)
        super()._clear()

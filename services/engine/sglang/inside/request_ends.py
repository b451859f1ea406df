"""SGLang's two ends of one request have our streams for its sockets and our reports of what it says."""

from contextlib import nullcontext
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVReceiver, NixlKVSender

from services.engine.sglang.inside.door.reporter import process_reporter
from services.engine.sglang.inside.manager import IsthmusKVManager
from services.engine.sglang.inside.streams.frames import Frames
from services.engine.sglang.reports import TicketSent
from services.values.errors import ProtocolError


class IsthmusKVSender(NixlKVSender):
    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """Begin; `num_kv_indices` are pages of the prompt past decode_prefix_len, which SGLang itself never
        checks."""
        super().init(num_kv_indices, aux_index)
        self.kv_mgr.check_ticket_of(self.bootstrap_room, num_kv_indices)

    def clear(self) -> None:
        super().clear()
        if self.bootstrap_room not in self.kv_mgr.request_status:
            self.kv_mgr.forget_room(self.bootstrap_room)

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
    prompt_len = 0  # It counts tokens; the plugin's hook sets it.

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
        """Return at once: a registration is the stream's Hello, so there is nothing more to send."""
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
        self.kv_mgr.forget_room(self.bootstrap_room)
        super()._clear()

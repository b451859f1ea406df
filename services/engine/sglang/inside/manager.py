"""SGLang's NIXL classes use our Handshake instead of ZMQ and its HTTP registry.

SGLang keeps what it does with KV: queues, radix trees, NIXL writes, deferred release. What is replaced is how
its processes speak to each other:

    SGLang                                     here
    PULL socket of each process                inbox, filled by our streams
    PUSH sockets, blocking sends               outboxes of streams, on a loop of their own
    registry over HTTP (PUT/GET /route)        Handshake.DescribeRanks of the prefill service
    heartbeat over HTTP                        the stream itself: it ends when the peer does

A process of SGLang's is spawned, and gRPC is first used in it by the manager's constructor.
"""

import logging
import os
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer
from sglang.srt.disaggregation.utils import DisaggregationMode

from services.engine.sglang.beats import BEAT_S
from services.engine.sglang.inside import idle_waits
from services.engine.sglang.inside.decode_end import DecodeEnd
from services.engine.sglang.inside.door.load_reports import LOAD_S, tell_load
from services.engine.sglang.inside.door.reporter import process_reporter
from services.engine.sglang.inside.prefill_end import PrefillEnd
from services.engine.sglang.reports import Active, Beat, draft_fields, group_fields

log = logging.getLogger(__name__)


class IsthmusKVManager(PrefillEnd, DecodeEnd):
    """Each process of SGLang's that holds KV has one; its role says which end is used."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        super().__init__(args, mode, server_args, is_mla_backend)
        idle_waits.more_fds.append(process_reporter().fileno())
        process_reporter().report(self._active())
        self._loop_thread.every(LOAD_S, tell_load)
        self._loop_thread.every(BEAT_S, lambda: process_reporter().report(Beat(os.getpid())))

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

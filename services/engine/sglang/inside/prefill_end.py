"""The prefill end of transfers serves the Handshake, and counts the bytes that are written."""

import logging
import threading
import time
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import KVArgsRegisterInfo, TransferInfo

from services.engine.sglang.inside import frames
from services.engine.sglang.inside.frames import Frames
from services.engine.sglang.inside.handshake_streams import PrefillStreams
from services.engine.sglang.inside.idle_waits import transfer_news
from services.engine.sglang.inside.own_process import OwnProcess
from services.engine.sglang.inside.process_memory import Posted, TpPlace
from services.engine.sglang.inside.reporter import process_reporter
from services.engine.sglang.reports import Moved, PathFound
from services.host.ports import bindable, host_port
from services.net import servers
from services.transfer.nixl import known_paths
from services.values.errors import ProtocolError
from services.values.kv import DRAFT, KvPath
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_LISTEN_TIMEOUT_S = 30.0


class PrefillEnd(OwnProcess):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._posting = threading.local()
        self._posted: dict[int, Posted] = {}  # The keys are transfers.
        self._unwritten: dict[int, tuple[Any, ...]] = {}  # It maps transfers to CUDA events to wait for.
        # It maps decode's agents to the reason why they cannot be written to.
        self._unusable: dict[str, str] = {}
        self._paths: tuple[KvPath, ...] = ()
        self._paths_lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def register_to_bootstrap(self) -> None:
        """Listen, then let SGLang describe this rank to `_register_topology_row`.

        The base constructor calls it before NIXL is ready; earlier messages wait in the inbox.
        """
        own = self._own_hello()

        def own_message() -> handshake_pb2.HandshakeMessage:
            message = own.message(time.monotonic())
            message.hello.tp_rank = int(self.attn_tp_rank)
            message.hello.writer_rank = int(self._prefill_unique_rank())
            return message

        self._prefill_streams = PrefillStreams(own, own_message, self._deliver, self._fail_transfer)
        opening = self._loop_thread.spawn(self._listen())
        self.rank_port = opening.result(_LISTEN_TIMEOUT_S)
        self.local_ip = self._settings.advertise_host
        self._listening = host_port(self.local_ip, self.rank_port)
        self._take_inbox()
        super().register_to_bootstrap()

    def _start_bootstrap_thread(self) -> None:
        """Start the thread as a daemon, which it inherits from the thread that starts it.

        SGLang's is none (0.5.23), and waits for messages for ever: its process would be killed at each stop,
        before it has freed its memory.
        """
        starter = threading.Thread(target=super()._start_bootstrap_thread, daemon=True)
        starter.start()
        starter.join()

    async def _listen(self) -> int:
        server = await servers.open_server(
            host_port(bindable(self._settings.host), 0),
            partial(handshake_pb2_grpc.add_HandshakeServicer_to_server, self._prefill_streams),
            [handshake_pb2.DESCRIPTOR.services_by_name["Handshake"].full_name],
            self._settings.tls(),
        )
        self._server = server  # The reference is kept, since a server that is garbage-collected stops.
        return server.port

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        self._topology = payload

    def _deliver(self, parts: Frames) -> None:
        """Pass frames to SGLang's thread if it can read them; others would end the thread.

        Raises ProtocolError for unreadable frames.
        """
        try:
            if parts[:2] == [frames.GUARD, frames.REGISTRATION]:
                KVArgsRegisterInfo.from_zmq(parts[1:])
            elif parts[0] == frames.GUARD:
                TransferInfo.from_zmq(parts[1:])
        except Exception as error:
            raise ProtocolError(f"SGLang cannot read it: {error!r}") from error
        self._inbox.put(parts)

    def _send_multipart_locked(self, endpoint: str, parts: Frames, is_ipv6: bool = False) -> None:
        self._loop_thread.soon(self._prefill_streams.send, endpoint, frames.message_of_prefill(parts))

    def _add_remote_peer(self, decode_kv_args: Any) -> None:
        """Add a peer. An unusable one must fail only its own transfers, not SGLang's thread."""
        try:
            super()._add_remote_peer(decode_kv_args)
        except Exception as error:
            log.exception("kv_peer_unusable agent=%s", decode_kv_args.agent_name)
            self._unusable[decode_kv_args.agent_name] = repr(error)

    def _prepare_payload_xfer(self, peer_info: Any) -> None:
        """Prepare writes to host memory on a CPU, also with unequal tensor parallelism.

        SGLang refuses that combination, as a GPU's host memory may have another layout. On a CPU host memory
        is the pool itself, whose layout is the one that SGLang slices.
        """
        on_cpu = self.src_mem_kind == "DRAM" and set(peer_info.dst_kv_mem_kinds) == {"DRAM"}
        if not on_cpu or self.is_mla_backend or peer_info.decode_tp_size == self.attn_tp_size:
            super()._prepare_payload_xfer(peer_info)
            return
        peer_info.dst_homogeneous_mem_kind = "DRAM"
        self._init_hetero_tp_prep_handle(peer_info.agent_name, peer_info, "DRAM", "DRAM")

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        if status == KVPoll.Transferring:
            self._posting.transfer_id = bootstrap_room  # This thread posts for this transfer now.
        super().update_status(bootstrap_room, status)
        transfer_news().set()

    def add_transfer_request(self, bootstrap_room: int, *args: Any, **kwargs: Any) -> Any:
        """Keep the event of the pages' writing, which SGLang's NIXL drops (see `_until_written`)."""
        if kwargs.get("wait_event") is not None:
            earlier = self._unwritten.get(bootstrap_room, ())  # At worst this waits for an event twice.
            self._unwritten[bootstrap_room] = (*earlier, kwargs["wait_event"])
        return super().add_transfer_request(bootstrap_room, *args, **kwargs)

    def _until_written(self) -> None:
        """Wait on the thread that posts, as the scheduler must not wait.

        The early send of a cached prefix, which needs it, is off (settings.environment); should SGLang rename
        the switch, this still works.
        """
        for event in self._unwritten.pop(self._posting.transfer_id, ()):
            event.synchronize()

    def send_kvcache(self, peer_name: str, prefill_kv_indices: Any, *args: Any, **kwargs: Any) -> Any:
        self._until_written()
        handle = super().send_kvcache(peer_name, prefill_kv_indices, *args, **kwargs)
        self._count(peer_name, len(prefill_kv_indices))
        return handle

    def send_kvcache_slice(self, peer_name: str, prefill_kv_indices: Any, dst_kv_indices: Any) -> Any:
        self._until_written()
        handle = super().send_kvcache_slice(peer_name, prefill_kv_indices, dst_kv_indices)
        self._count(peer_name, len(prefill_kv_indices))
        return handle

    def _count(self, peer_name: str, num_pages: int) -> None:
        peer = self.decode_kv_args_table[peer_name]
        of_model, of_draft = self._memory.written_bytes(peer.dst_kv_item_lens, *self._places(peer))
        posted = self._posted.setdefault(self._posting.transfer_id, Posted())
        if of_model:
            posted.pages(num_pages, of_model)
        if of_draft:
            posted.carried(DRAFT, num_pages * of_draft)

    def maybe_send_extra(self, peer_name: str, prefill_state_indices: Any, *args: Any, **kwargs: Any) -> Any:
        """Count windows' tails and states with the last chunk; all that SGLang yields is posted."""
        self._until_written()
        peer = self.decode_kv_args_table[peer_name]
        posted = self._posted.setdefault(self._posting.transfer_id, Posted())
        for kind, size_bytes in self._memory.written_states(
            prefill_state_indices, peer.dst_state_item_lens, *self._places(peer)
        ):
            posted.carried(kind, size_bytes)
        yield from super().maybe_send_extra(peer_name, prefill_state_indices, *args, **kwargs)

    def _places(self, peer: Any) -> tuple[TpPlace, TpPlace]:
        reader = TpPlace(peer.decode_tp_rank % peer.decode_tp_size, peer.decode_tp_size)
        return TpPlace(int(self.attn_tp_rank), int(self.attn_tp_size)), reader

    def forget_transfer(self, transfer_id: int) -> None:
        """Forget a request that has ended, also one that was partly posted and never concluded."""
        self._posted.pop(transfer_id, None)
        self._unwritten.pop(transfer_id, None)

    def conclude_transfer(self, *, bootstrap_room: int, status: Any, **kwargs: Any) -> Any:
        posted = self._posted.pop(bootstrap_room, Posted())
        self._unwritten.pop(bootstrap_room, None)
        if status == KVPoll.Success:  # Nobody can see the success before that.
            moved = Moved(bootstrap_room, posted.num_pages, posted.size_bytes, posted.carried_bytes)
            process_reporter().report(moved)
            if posted.num_pages:
                self._report_paths()
        return super().conclude_transfer(bootstrap_room=bootstrap_room, status=status, **kwargs)

    def _report_paths(self) -> None:
        with self._paths_lock:
            piece_bytes = min(map(int, self.kv_args.kv_item_lens))
            paths = known_paths(self.agent.name, piece_bytes, self._nixl)
            for path in paths:
                if path not in self._paths:
                    self._nixl.tell(path)
                    report = PathFound(self._dp_rank, path.kind.value, path.reach, path.lanes)
                    process_reporter().report(report)
            self._paths = paths

    def check_ticket_of(self, transfer_id: int, num_pages: int) -> None:
        """Fail the transfer unless its tickets all have the `num_pages` to send, in writable memory."""
        for agent, info in list(self.transfer_infos.get(transfer_id, {}).items()):
            reason = ""
            if agent in self._unusable:
                reason = f"the decode rank's memory cannot be written: {self._unusable[agent]}"
            elif not info.is_dummy and len(info.dst_kv_indices) != num_pages:
                reason = (
                    f"the ticket of transfer {transfer_id:016x} has {len(info.dst_kv_indices)} pages after "
                    f"{info.decode_prefix_len} tokens, the prompt needs {num_pages}"
                )
            if reason:
                self.conclude_failure(bootstrap_room=transfer_id, failure_reason=reason)
                return

"""The decode end of transfers finds prefill processes, and opens the streams to them."""

import logging
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import PrefillServerInfo

from services.engine.sglang.directory import Directory, Lookups, look_up
from services.engine.sglang.inside import frames
from services.engine.sglang.inside.frames import Frames
from services.engine.sglang.inside.handshake_streams import DecodeStreams
from services.engine.sglang.inside.own_process import OwnProcess
from services.net import channels
from services.values.errors import IsthmusError
from services.wire.isthmus.v1 import handshake_pb2

log = logging.getLogger(__name__)

# At the first contact with a prefill worker the scheduler waits this long for its directory. If that takes
# longer, SGLang asks again a second later.
_DIRECTORY_WAIT_S = 0.2


class DecodeEnd(OwnProcess):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._directories: dict[str, Directory] = {}
        self._lookups = Lookups(self._request_directory)
        self._transfers: dict[
            int, set[str]
        ] = {}  # It maps open transfers to the prefill processes that write them.
        self._transfers_lock = threading.Lock()
        super().__init__(*args, **kwargs)

    def _start_decode_listener_thread(self) -> None:
        registration = self.build_receiver_registration_message()
        memory, agent_metadata, _ = frames.memory_of_registration(registration)
        own = self._own_hello(agent_metadata)

        def own_message() -> handshake_pb2.HandshakeMessage:
            message = own.message(time.monotonic())
            message.hello.tp_rank = int(self.attn_tp_rank)
            message.hello.engine_memory.CopyFrom(memory)
            return message

        open_channel = partial(channels.open_channel, tls=self._settings.tls())
        self._decode_streams = DecodeStreams(
            own, own_message, open_channel, self._inbox.put, self._on_stream_lost
        )
        self._take_inbox()
        super()._start_decode_listener_thread()

    def _start_heartbeat_checker_thread(self) -> threading.Thread:
        return self._loop_thread.thread

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Return whether the prefill worker is known; `bootstrap_addr` is HOST:PORT of its service."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        try:
            directory = self._lookups.take(bootstrap_addr, _DIRECTORY_WAIT_S)
        except IsthmusError as error:
            log.warning("kv_directory_unavailable prefill=%s reason=%r", bootstrap_addr, str(error))
            return False
        if directory is None:
            return False  # The answer has not come yet.
        self._learn(bootstrap_addr, directory)
        return True

    def _request_directory(self, endpoint: str) -> "Future[Directory]":
        return self._loop_thread.spawn(look_up(endpoint, self._settings.tls()))

    def _learn(self, bootstrap_addr: str, directory: Directory) -> None:
        info = _server_info(directory.topology)
        self._resolve_rank_mapping(info)
        self._directories[bootstrap_addr] = directory
        self.prefill_info_table[bootstrap_addr] = info

    def process_of(self, bootstrap_addr: str, place: tuple[int, int, int, int]) -> str | None:
        directory = self._directories.get(bootstrap_addr)
        return directory.endpoints.get(place) if directory is not None else None

    def open_stream(self, endpoint: str) -> None:
        self._loop_thread.soon(self._decode_streams.open, endpoint)

    def message_of(self, parts: Frames, prompt_len: int) -> handshake_pb2.HandshakeMessage:
        """Return SGLang's frames for prefill as our message. Raises ProtocolError."""
        message = frames.message_of_decode(parts, prompt_len)
        if message.HasField("ticket") and not message.ticket.no_pages:
            places = self._memory.carried_places
            targets = frames.targets_of_state(message.ticket, self._layout, places)
            message.ticket.targets.extend(targets)
        return message

    def send_to_prefill(self, endpoint: str, message: handshake_pb2.HandshakeMessage) -> None:
        if message.HasField("ticket"):
            with self._transfers_lock:
                self._transfers.setdefault(message.ticket.room, set()).add(endpoint)
        self._loop_thread.soon(self._decode_streams.send, endpoint, message)

    def forget_transfer(self, transfer_id: int) -> None:
        with self._transfers_lock:
            self._transfers.pop(transfer_id, None)

    def _on_stream_lost(self, endpoint: str, reason: str) -> None:
        """Fail the transfers that the stream's process would have written; this runs on the loop.

        The worker's directory is requested again.
        """
        with self._transfers_lock:
            transfers = [
                transfer_id for transfer_id, endpoints in self._transfers.items() if endpoint in endpoints
            ]
        for transfer_id in transfers:
            if transfer_id in self.request_status and self.check_status(transfer_id) != KVPoll.Success:
                self._fail_transfer(transfer_id, f"the handshake stream to {endpoint} was lost: {reason}")
        with self.connection_lock:
            for address, directory in list(self._directories.items()):
                if endpoint in directory.endpoints.values():
                    del self._directories[address]
                    self.prefill_info_table.pop(address, None)
                    for key in [key for key in self.connection_pool if key.startswith(f"{address}_")]:
                        del self.connection_pool[key]


def _server_info(topology: dict[str, Any]) -> PrefillServerInfo:
    """Return what CommonKVBootstrapServer builds from a prefill rank's description."""
    plain_dp = topology["system_dp_size"] == 1
    return PrefillServerInfo(
        attn_tp_size=topology["attn_tp_size"],
        attn_cp_size=topology["attn_cp_size"],
        dp_size=topology["attn_dp_size" if plain_dp else "system_dp_size"],
        pp_size=topology["pp_size"],
        page_size=topology["page_size"],
        kv_cache_dtype=topology["kv_cache_dtype"],
        kv_layout=topology["kv_layout"],
        dsv41_spec_layout=topology["dsv41_spec_layout"],
        follow_bootstrap_room=topology["load_balance_method"] == "follow_bootstrap_room",
        enable_dsa_cache_layer_split=bool(topology["enable_dsa_cache_layer_split"]),
        enable_kv_cache_sharding=bool(topology["enable_kv_cache_sharding"]),
        decode_allocation_policy=topology["decode_allocation_policy"],
    )

"""SGLang's NIXL classes with our Handshake instead of ZMQ and its HTTP registry.

SGLang keeps what it does with KV: queues, radix trees, NIXL writes, deferred release. Replaced is how
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
import queue
import threading
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, KVPoll
from sglang.srt.disaggregation.common.conn import PrefillServerInfo
from sglang.srt.disaggregation.nixl.conn import (
    KVArgsRegisterInfo,
    NixlKVManager,
    TransferInfo,
    num_kv_slots,
)
from sglang.srt.disaggregation.utils import DisaggregationMode

from services.engine.sglang.beats import BEAT_S
from services.engine.sglang.directory import Directory, Lookups, look_up
from services.engine.sglang.inside.host_states import HostAgent
from services.engine.sglang.inside.idle_waits import room_news
from services.engine.sglang.inside.loop_thread import LoopThread
from services.engine.sglang.inside.memory.posted import Posted
from services.engine.sglang.inside.memory.process_memory import (
    Buffers,
    Draft,
    ProcessMemory,
    read_item_bytes,
)
from services.engine.sglang.inside.memory.replicas import TpPlace, is_counted
from services.engine.sglang.inside.memory.state_groups import (
    WINDOW,
    AttentionHeads,
    StateComponent,
    components_of,
)
from services.engine.sglang.inside.process_reporter import process_reporter
from services.engine.sglang.inside.streams import frames
from services.engine.sglang.inside.streams.decode_streams import DecodeStreams
from services.engine.sglang.inside.streams.frames import Frames
from services.engine.sglang.inside.streams.prefill_streams import PrefillStreams
from services.engine.sglang.plugin_settings import PluginSettings
from services.engine.sglang.reports import Active, Beat, Moved, PathFound, draft_fields, group_fields
from services.host.ports import bindable, host_port
from services.net import channels, servers
from services.transfer.hello import Hello
from services.transfer.nixl import known_paths, let_sleep, telling_paths
from services.values.errors import IsthmusError, ProtocolError
from services.values.kv import DRAFT, KvLayout, PoolMemory
from services.values.kv_path import KvPath
from services.values.rank import Generation, RankId
from services.wire.isthmus.v1 import handshake_pb2, handshake_pb2_grpc

log = logging.getLogger(__name__)

_LISTEN_TIMEOUT_S = 30.0
# At the first contact with a prefill worker the scheduler waits this long for its directory; what
# takes longer is asked for again by SGLang, a second later.
_DIRECTORY_WAIT_S = 0.2
_TRANSPORT = "sglang-nixl"


class _Inbox:
    """What SGLang's listener thread reads in place of a ZMQ socket."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Frames] = queue.SimpleQueue()
        self.put = self._queue.put

    def recv_multipart(self) -> Frames:
        return self._queue.get()


class IsthmusKVManager(NixlKVManager):
    """One per process of SGLang's that holds KV."""

    # Set by the plugin's hook:
    window_size = 0  # tokens before its own that a windowed layer sees
    keys_are_pairs = False  # of the radix tree

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool = False) -> None:
        self._settings = PluginSettings.from_environment()
        self._loop_thread = LoopThread("isthmus-handshake")
        self._inbox = _Inbox()
        self._topology: dict[str, Any] = {}
        self._listening = ""
        self._sleeps = bool(server_args.sleep_on_idle)
        self._on_cpu = server_args.device == "cpu"
        # decode
        self._directories: dict[str, Directory] = {}
        self._lookups = Lookups(self._ask)
        self._rooms: dict[int, set[str]] = {}  # open rooms and the prefill processes that write them
        self._rooms_lock = threading.Lock()
        # prefill
        self._posting = threading.local()
        self._posted: dict[int, Posted] = {}  # by room
        self._unwritten: dict[int, tuple[Any, ...]] = {}  # room -> CUDA events to wait for
        self._unusable: dict[str, str] = {}  # decode's agent -> why it cannot be written to
        self._nixl = self._settings.nixl(tells_paths=mode == DisaggregationMode.PREFILL)
        self._paths: tuple[KvPath, ...] = ()
        self._paths_lock = threading.Lock()
        if self._on_cpu:
            args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
        with telling_paths(self._nixl):
            super().__init__(args, mode, server_args, is_mla_backend)
        process_reporter().report(self._active())
        self._loop_thread.every(BEAT_S, lambda: process_reporter().report(Beat(os.getpid())))

    @property
    def agent(self) -> Any:
        """NIXL's, which the base constructor sets before it gives it a backend."""
        return self._agent

    @agent.setter
    def agent(self, agent: Any) -> None:
        if self._sleeps:
            let_sleep(agent, one_thread=False)
        self._agent = HostAgent(agent) if self._on_cpu else agent

    # -- who we are ---------------------------------------------------------------------------------------

    @property
    def _dp_rank(self) -> int:
        rank = self.attn_dp_rank if self.system_dp_size == 1 else self.system_dp_rank
        return int(rank or 0)

    @cached_property
    def _memory(self) -> ProcessMemory:
        args, settings = self.kv_args, self._settings
        own, of_draft = read_item_bytes(args.kv_item_lens, int(args.num_draft_entries))
        heads = AttentionHeads(settings.num_kv_heads, settings.head_dim, str(self.kv_cache_dtype_str))
        # MLA, also beside recurrent layers.
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
        """Where it has no checkpoint of its own it is a layer of the model's."""
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
            keys_are_pairs=self.keys_are_pairs,
            topology=self._topology,
        )

    def _take_inbox(self) -> None:
        """SGLang's threads read our inbox from now on; its own socket is closed unread."""
        self.server_socket.close(linger=0)
        self.server_socket: Any = self._inbox

    # -- prefill --------------------------------------------------------------------------------------------

    def register_to_bootstrap(self) -> None:
        """Listen, then have SGLang describe this rank to `_register_topology_row`.

        Called by the base constructor before NIXL stands: what comes earlier waits in the inbox.
        """
        own = self._own_hello()

        def own_message() -> handshake_pb2.HandshakeMessage:
            message = own.message(time.monotonic())
            message.hello.tp_rank = int(self.attn_tp_rank)
            message.hello.writer_rank = int(self._prefill_unique_rank())
            return message

        self._prefill_streams = PrefillStreams(own, own_message, self._deliver, self._fail_room)
        opening = self._loop_thread.spawn(self._listen())
        self.rank_port = opening.result(_LISTEN_TIMEOUT_S)
        self.local_ip = self._settings.advertise_host
        self._listening = host_port(self.local_ip, self.rank_port)
        self._take_inbox()
        super().register_to_bootstrap()

    async def _listen(self) -> int:
        server = await servers.open_server(
            host_port(bindable(self._settings.host), 0),
            partial(handshake_pb2_grpc.add_HandshakeServicer_to_server, self._prefill_streams),
            [handshake_pb2.DESCRIPTOR.services_by_name["Handshake"].full_name],
            self._settings.tls(),
        )
        self._server = server  # kept: a server that is collected stops
        return server.port

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        """Our service tells it to whoever asks for DescribeRanks."""
        self._topology = payload

    def _deliver(self, parts: Frames) -> None:
        """To SGLang's thread, unless it could not read it: that would end it, and leave the rank deaf.

        Raises ProtocolError.
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
        """An unusable peer must not end SGLang's thread, which serves all others; its rooms fail alone."""
        try:
            super()._add_remote_peer(decode_kv_args)
        except Exception as error:
            log.exception("kv_peer_unusable agent=%s", decode_kv_args.agent_name)
            self._unusable[decode_kv_args.agent_name] = repr(error)

    def _prepare_payload_xfer(self, peer_info: Any) -> None:
        """With unequal tensor parallelism SGLang writes to no host memory: a GPU's may have another layout.
        On a CPU host memory is the pool itself, with the layout that is sliced everywhere."""
        on_cpu = self.src_mem_kind == "DRAM" and set(peer_info.dst_kv_mem_kinds) == {"DRAM"}
        if not on_cpu or self.is_mla_backend or peer_info.decode_tp_size == self.attn_tp_size:
            super()._prepare_payload_xfer(peer_info)
            return
        peer_info.dst_homogeneous_mem_kind = "DRAM"
        self._init_hetero_tp_prep_handle(peer_info.agent_name, peer_info, "DRAM", "DRAM")

    def _fail_room(self, room: int, reason: str) -> None:
        """Also one whose request has not come yet: it must not wait for another ticket."""
        self.record_failure(room, reason)
        if room not in self.request_status:
            self.update_status(room, KVPoll.Bootstrapping)
        self.update_status(room, KVPoll.Failed)

    def update_status(self, bootstrap_room: int, status: Any) -> None:
        if status == KVPoll.Transferring:
            self._posting.room = bootstrap_room  # this thread posts for it now
        super().update_status(bootstrap_room, status)
        room_news().set()

    def add_transfer_request(self, bootstrap_room: int, *args: Any, **kwargs: Any) -> Any:
        """SGLang's NIXL drops the event that says when the pages have been written; see `_until_written`."""
        if kwargs.get("wait_event") is not None:
            earlier = self._unwritten.get(bootstrap_room, ())  # at worst waited for twice
            self._unwritten[bootstrap_room] = (*earlier, kwargs["wait_event"])
        return super().add_transfer_request(bootstrap_room, *args, **kwargs)

    def _until_written(self) -> None:
        """On the thread that posts: the scheduler must not wait. The early send of a cached prefix, which
        needs it, is off (settings.environment); should SGLang rename the switch, this still holds."""
        for event in self._unwritten.pop(self._posting.room, ()):
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
        posted = self._posted.setdefault(self._posting.room, Posted())
        if of_model:
            posted.pages(num_pages, of_model)
        if of_draft:
            posted.carried(DRAFT, num_pages * of_draft)

    def maybe_send_extra(self, peer_name: str, prefill_state_indices: Any, *args: Any, **kwargs: Any) -> Any:
        """A generator of SGLang's: what it yields is posted. Windows' tails and states are counted here, with
        the room's last chunk; of unequal sides the narrower one's part is written."""
        self._until_written()
        peer = self.decode_kv_args_table[peer_name]
        for index, component in enumerate(self._memory.components):
            if component.is_carried and self._is_state_counted(component, peer):
                own, its = component.own_bytes(), sum(peer.dst_state_item_lens[index])
                units = len(prefill_state_indices[index])
                self._posted.setdefault(self._posting.room, Posted()).carried(
                    component.kind, units * min(own, its)
                )
        yield from super().maybe_send_extra(peer_name, prefill_state_indices, *args, **kwargs)

    def _is_state_counted(self, component: StateComponent, peer: Any) -> bool:
        """A window's heads are spread as full attention's; every process has a part of a state of its own."""
        heads = self._memory.buffers.spread_heads
        return component.kind != WINDOW or is_counted(heads, *self._places(peer))

    def _places(self, peer: Any) -> tuple[TpPlace, TpPlace]:
        """Of the writer, this process, and of the reader."""
        reader = TpPlace(peer.decode_tp_rank % peer.decode_tp_size, peer.decode_tp_size)
        return TpPlace(int(self.attn_tp_rank), int(self.attn_tp_size)), reader

    def conclude_transfer(self, *, bootstrap_room: int, status: Any, **kwargs: Any) -> Any:
        posted = self._posted.pop(bootstrap_room, Posted())
        self._unwritten.pop(bootstrap_room, None)
        if status == KVPoll.Success:  # before anybody can see the success
            moved = Moved(bootstrap_room, posted.num_pages, posted.size_bytes, posted.carried_bytes)
            process_reporter().report(moved)
            if posted.num_pages:
                self._report_paths()
        return super().conclude_transfer(bootstrap_room=bootstrap_room, status=status, **kwargs)

    def _report_paths(self) -> None:
        """Several of SGLang's threads conclude transfers."""
        with self._paths_lock:
            piece_bytes = min(map(int, self.kv_args.kv_item_lens))
            paths = known_paths(self.agent.name, piece_bytes, self._nixl)
            for path in paths:
                if path not in self._paths:
                    self._nixl.tell(path)
                    report = PathFound(self._dp_rank, path.kind.value, path.reach, path.lanes)
                    process_reporter().report(report)
            self._paths = paths

    def check_ticket_of(self, room: int, num_pages: int) -> None:
        """Fail the room unless every ticket of it covers the `num_pages` that prefill will send, and to
        memory that can be written."""
        for agent, info in list(self.transfer_infos.get(room, {}).items()):
            reason = ""
            if agent in self._unusable:
                reason = f"the decode rank's memory cannot be written: {self._unusable[agent]}"
            elif not info.is_dummy and len(info.dst_kv_indices) != num_pages:
                reason = (
                    f"the ticket of room {room:016x} has {len(info.dst_kv_indices)} pages after "
                    f"{info.decode_prefix_len} tokens, the prompt needs {num_pages}"
                )
            if reason:
                self.conclude_failure(bootstrap_room=room, failure_reason=reason)
                return

    # -- decode ---------------------------------------------------------------------------------------------

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
        """None is needed: a stream that ends tells the same, at once."""
        return self._loop_thread.thread

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """`bootstrap_addr` is HOST:PORT of the prefill worker's service."""
        if bootstrap_addr in self.prefill_info_table:
            return True
        try:
            directory = self._lookups.take(bootstrap_addr, _DIRECTORY_WAIT_S)
        except IsthmusError as error:
            log.warning("kv_directory_unavailable prefill=%s reason=%r", bootstrap_addr, str(error))
            return False
        if directory is None:
            return False  # still asking
        self._learn(bootstrap_addr, directory)
        return True

    def _ask(self, endpoint: str) -> "Future[Directory]":
        return self._loop_thread.spawn(look_up(endpoint, self._settings.tls()))

    def _learn(self, bootstrap_addr: str, directory: Directory) -> None:
        info = _server_info(directory.topology)
        self._resolve_rank_mapping(info)
        self._directories[bootstrap_addr] = directory
        self.prefill_info_table[bootstrap_addr] = info

    def process_of(self, bootstrap_addr: str, place: tuple[int, int, int, int]) -> str | None:
        """HOST:PORT of the Handshake of one process of a prefill worker."""
        directory = self._directories.get(bootstrap_addr)
        return directory.endpoints.get(place) if directory is not None else None

    def open_stream(self, endpoint: str) -> None:
        self._loop_thread.soon(self._decode_streams.open, endpoint)

    def message_of(self, parts: Frames, prompt_len: int) -> handshake_pb2.HandshakeMessage:
        """What SGLang says to prefill. Raises ProtocolError."""
        message = frames.message_of_decode(parts, prompt_len)
        if message.HasField("ticket") and not message.ticket.no_pages:
            places = self._memory.carried_places
            targets = frames.targets_of_state(message.ticket, self._layout, places)
            message.ticket.targets.extend(targets)
        return message

    def send_to_prefill(self, endpoint: str, message: handshake_pb2.HandshakeMessage) -> None:
        if message.HasField("ticket"):
            with self._rooms_lock:
                self._rooms.setdefault(message.ticket.room, set()).add(endpoint)
        self._loop_thread.soon(self._decode_streams.send, endpoint, message)

    def forget_room(self, room: int) -> None:
        with self._rooms_lock:
            self._rooms.pop(room, None)

    def _on_stream_lost(self, endpoint: str, reason: str) -> None:
        """On the loop: rooms that it would have written have failed; the worker is looked up anew."""
        with self._rooms_lock:
            rooms = [room for room, endpoints in self._rooms.items() if endpoint in endpoints]
        for room in rooms:
            if room in self.request_status and self.check_status(room) != KVPoll.Success:
                self._fail_room(room, f"the handshake stream to {endpoint} was lost: {reason}")
        with self.connection_lock:
            for address, directory in list(self._directories.items()):
                if endpoint in directory.endpoints.values():
                    del self._directories[address]
                    self.prefill_info_table.pop(address, None)
                    for key in [key for key in self.connection_pool if key.startswith(f"{address}_")]:
                        del self.connection_pool[key]


class NoBootstrapServer(BaseKVBootstrapServer):
    """SGLang's HTTP registry is not needed: our service answers DescribeRanks."""

    def __init__(self, host: str, port: int) -> None:
        log.info("bootstrap_server_replaced by=Handshake.DescribeRanks")


def _server_info(topology: dict[str, Any]) -> PrefillServerInfo:
    """As CommonKVBootstrapServer makes it of what a prefill rank says."""
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

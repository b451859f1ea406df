"""KV values to protobuf and back: ranks, layouts, pools, tickets, loads, plans, roles.

Every `X_from_proto` raises ProtocolError when a peer sent what can never be right: an unset id, an
enum value that we do not know, an empty run of pages, a number that is not finite. Whether a value
that is well formed also fits the moment (generation, range, alignment) is for its user to say.
Request values are in convert_request.py.
"""

import math
from collections.abc import Iterable
from typing import TypeVar

from services.values.errors import ProtocolError
from services.values.kv import (
    GroupKind,
    GroupTarget,
    KvGroup,
    KvLayout,
    KvTicket,
    PageBooks,
    PageRun,
    PoolMemory,
)
from services.values.kv_path import KvPath, KvPathKind
from services.values.load import RankLoad
from services.values.rank import (
    Generation,
    Plan,
    RankAddress,
    RankId,
    Rendezvous,
    Role,
    Room,
)
from services.wire.isthmus.v1 import common_pb2, handshake_pb2, prefill_pb2

_Name = TypeVar("_Name")

_PLAN_TO_PROTO = {Plan.REMOTE: common_pb2.PLAN_REMOTE, Plan.LOCAL: common_pb2.PLAN_LOCAL}
_PLAN_FROM_PROTO: dict[int, Plan] = {number: plan for plan, number in _PLAN_TO_PROTO.items()}
_PATH_KINDS = {kind.value: kind for kind in KvPathKind}
_ROLE_TO_PROTO = {Role.PREFILL: common_pb2.ROLE_PREFILL, Role.DECODE: common_pb2.ROLE_DECODE}
_ROLE_FROM_PROTO: dict[int, Role] = {number: role for role, number in _ROLE_TO_PROTO.items()}
_KIND_TO_PROTO = {
    GroupKind.FULL_ATTENTION: handshake_pb2.KvGroup.KIND_FULL_ATTENTION,
    GroupKind.SLIDING_WINDOW: handshake_pb2.KvGroup.KIND_SLIDING_WINDOW,
    GroupKind.CHUNKED_WINDOW: handshake_pb2.KvGroup.KIND_CHUNKED_WINDOW,
    GroupKind.RECURRENT: handshake_pb2.KvGroup.KIND_RECURRENT,
}
_KIND_FROM_PROTO: dict[int, GroupKind] = {number: kind for kind, number in _KIND_TO_PROTO.items()}
_MEMORY_KINDS = ("DRAM", "VRAM")


def finite(field_name: str, value: float) -> float:
    """`value`, or ProtocolError: a NaN or an infinity would slip through every later comparison."""
    if not math.isfinite(value):
        raise ProtocolError(f"{field_name} must be finite, got {value!r}")
    return value


def known(field_name: str, names: dict[int, _Name], number: int) -> _Name:
    """The name of an enum's number, or ProtocolError: proto3 lets unknown numbers through."""
    try:
        return names[number]
    except KeyError:
        raise ProtocolError(f"{field_name} has the unknown value {number}") from None


def _positive(field_name: str, value: int) -> int:
    if value < 1:
        raise ProtocolError(f"{field_name} must be positive, got {value}")
    return value


def _filled(field_name: str, value: str) -> str:
    if not value:
        raise ProtocolError(f"{field_name} must not be empty")
    return value


def plan_to_proto(plan: Plan) -> common_pb2.Plan:
    return _PLAN_TO_PROTO[plan]


def plan_from_proto(number: int) -> Plan:
    return known("plan", _PLAN_FROM_PROTO, number)


def role_to_proto(role: Role) -> common_pb2.Role:
    return _ROLE_TO_PROTO[role]


def role_from_proto(number: int) -> Role:
    return known("role", _ROLE_FROM_PROTO, number)


def rank_id_to_proto(rank: RankId) -> common_pb2.RankId:
    return common_pb2.RankId(worker=rank.worker, rank=rank.rank, generation=rank.generation)


def rank_id_from_proto(pb: common_pb2.RankId) -> RankId:
    return RankId(_filled("rank_id.worker", pb.worker), pb.rank, Generation(pb.generation))


def address_to_proto(address: RankAddress) -> common_pb2.RankAddress:
    return common_pb2.RankAddress(id=rank_id_to_proto(address.id), endpoint=address.endpoint)


def address_from_proto(pb: common_pb2.RankAddress) -> RankAddress:
    return RankAddress(rank_id_from_proto(pb.id), _filled("rank_address.endpoint", pb.endpoint))


def rendezvous_to_proto(rendezvous: Rendezvous) -> prefill_pb2.Rendezvous:
    return prefill_pb2.Rendezvous(
        room=rendezvous.room,
        decode=rank_id_to_proto(rendezvous.decode),
        prefill=rank_id_to_proto(rendezvous.prefill),
    )


def rendezvous_from_proto(pb: prefill_pb2.Rendezvous) -> Rendezvous:
    return Rendezvous(Room(pb.room), rank_id_from_proto(pb.decode), rank_id_from_proto(pb.prefill))


def run_to_proto(run: PageRun) -> handshake_pb2.PageRun:
    return handshake_pb2.PageRun(first_page=run.first_page, num_pages=run.num_pages)


def run_from_proto(pb: handshake_pb2.PageRun) -> PageRun:
    return PageRun(pb.first_page, _positive("page_run.num_pages", pb.num_pages))


def runs_to_proto(runs: Iterable[PageRun]) -> list[handshake_pb2.PageRun]:
    return [run_to_proto(run) for run in runs]


def runs_from_proto(pbs: Iterable[handshake_pb2.PageRun]) -> tuple[PageRun, ...]:
    return tuple(run_from_proto(pb) for pb in pbs)


def layout_to_proto(layout: KvLayout) -> handshake_pb2.KvLayout:
    return handshake_pb2.KvLayout(
        page_size=layout.page_size,
        page_bytes=layout.page_bytes,
        model_fingerprint=layout.model_fingerprint,
        tp_size=layout.tp_size,
        groups=[_group_to_proto(group) for group in layout.groups],
    )


def layout_from_proto(pb: handshake_pb2.KvLayout, handshake_version: int) -> KvLayout:
    """The version stands beside the layout in a message."""
    return KvLayout(
        page_size=_positive("layout.page_size", pb.page_size),
        page_bytes=_positive("layout.page_bytes", pb.page_bytes),
        model_fingerprint=pb.model_fingerprint,
        tp_size=_positive("layout.tp_size", pb.tp_size),
        groups=tuple(_group_from_proto(group) for group in pb.groups),
        handshake_version=handshake_version,
    )


def _group_to_proto(group: KvGroup) -> handshake_pb2.KvGroup:
    return handshake_pb2.KvGroup(
        kind=_KIND_TO_PROTO[group.kind],
        layer_ids=group.layer_ids,
        num_kv_heads=group.num_kv_heads,
        head_dim=group.head_dim,
        dtype=group.dtype,
        v_head_dim=group.v_head_dim,
        window=group.window,
        unit_bytes=group.unit_bytes,
    )


def _group_from_proto(pb: handshake_pb2.KvGroup) -> KvGroup:
    return KvGroup(
        kind=known("layout.groups.kind", _KIND_FROM_PROTO, pb.kind),
        layer_ids=tuple(pb.layer_ids),
        num_kv_heads=pb.num_kv_heads,
        head_dim=pb.head_dim,
        dtype=_filled("layout.groups.dtype", pb.dtype),
        v_head_dim=pb.v_head_dim if pb.HasField("v_head_dim") else None,
        window=pb.window,
        unit_bytes=pb.unit_bytes,
    )


def memory_to_proto(memory: PoolMemory) -> handshake_pb2.PoolMemory:
    return handshake_pb2.PoolMemory(
        base_address=memory.base_address,
        num_pages=memory.num_pages,
        kind=memory.kind,
        device_id=memory.device_id,
    )


def memory_from_proto(pb: handshake_pb2.PoolMemory) -> PoolMemory:
    if pb.kind not in _MEMORY_KINDS:
        raise ProtocolError(f"memory.kind must be one of {', '.join(_MEMORY_KINDS)}, got {pb.kind!r}")
    num_pages = _positive("memory.num_pages", pb.num_pages)
    return PoolMemory(pb.base_address, num_pages, pb.kind, pb.device_id)


def ticket_to_proto(ticket: KvTicket) -> handshake_pb2.KvTicket:
    return handshake_pb2.KvTicket(
        room=ticket.room,
        prefill_generation=ticket.prefill_generation,
        prompt_len=ticket.prompt_len,
        decode_prefix_len=ticket.decode_prefix_len,
        runs=runs_to_proto(ticket.runs),
        targets=[_target_to_proto(target) for target in ticket.targets],
        aux_slot=ticket.aux_slot,
        write_until_s=ticket.write_until_s,
        want_digests=ticket.want_digests,
    )


def ticket_from_proto(pb: handshake_pb2.KvTicket) -> KvTicket:
    return KvTicket(
        room=Room(pb.room),
        prefill_generation=Generation(pb.prefill_generation),
        prompt_len=pb.prompt_len,
        decode_prefix_len=pb.decode_prefix_len,
        runs=runs_from_proto(pb.runs),
        write_until_s=finite("ticket.write_until_s", pb.write_until_s),
        targets=tuple(_target_from_proto(target) for target in pb.targets),
        aux_slot=pb.aux_slot if pb.HasField("aux_slot") else None,
        want_digests=pb.want_digests,
    )


def _target_to_proto(target: GroupTarget) -> handshake_pb2.GroupTarget:
    runs = runs_to_proto(target.runs)
    return handshake_pb2.GroupTarget(group=target.group, start_token=target.start_token, runs=runs)


def _target_from_proto(pb: handshake_pb2.GroupTarget) -> GroupTarget:
    return GroupTarget(pb.group, pb.start_token, runs_from_proto(pb.runs))


def load_to_proto(load: RankLoad) -> common_pb2.RankLoad:
    books = load.books
    return common_pb2.RankLoad(
        running=load.running,
        waiting=load.waiting,
        pending_tokens=load.pending_tokens,
        free_pages=books.free,
        cached_pages=books.cached,
        used_pages=books.locked + books.private,
        quarantined_pages=books.quarantined,
        total_pages=books.total,
        step_s=load.step_s,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        draining=load.draining,
        waiting_tokens=load.waiting_tokens,
        admitted_per_s=load.admitted_per_s,
        stalled=load.stalled,
        kv_paths=[
            common_pb2.KvPath(kind=path.kind.value, reach=path.reach, lanes=path.lanes)
            for path in load.kv_paths
        ],
    )


def load_from_proto(pb: common_pb2.RankLoad) -> RankLoad:
    """The wire has one number for pages in use: all of them come back as `private`."""
    return RankLoad(
        running=pb.running,
        waiting=pb.waiting,
        pending_tokens=pb.pending_tokens,
        books=PageBooks(
            total=pb.total_pages,
            free=pb.free_pages,
            cached=pb.cached_pages,
            locked=0,
            private=pb.used_pages,
            quarantined=pb.quarantined_pages,
        ),
        step_s=finite("load.step_s", pb.step_s),
        prefill_tokens_per_s=finite("load.prefill_tokens_per_s", pb.prefill_tokens_per_s),
        draining=pb.draining,
        waiting_tokens=pb.waiting_tokens,
        admitted_per_s=finite("load.admitted_per_s", pb.admitted_per_s),
        stalled=pb.stalled,
        kv_paths=tuple(_kv_path_from_proto(path) for path in pb.kv_paths),
    )


def _kv_path_from_proto(pb: common_pb2.KvPath) -> KvPath:
    """A kind that a later version has made is none that we know."""
    return KvPath(_PATH_KINDS.get(pb.kind, KvPathKind.UNKNOWN), pb.reach, pb.lanes)

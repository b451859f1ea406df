"""This module translates KV values to protobuf and back: ranks, layouts, pools, tickets, loads, plans, roles.

Every `X_from_proto` raises ProtocolError if the message is wrong in any case: an unset id, an unknown enum
value, an empty run of pages, a number that is not finite. Whether a well-formed value also fits the current
state (generation, range, alignment) is checked by its user. Request values are in convert_request.py.
"""

from collections.abc import Iterable
from itertools import islice
from typing import TypeVar

import numpy as np

from services.values.adapter import Adapter
from services.values.errors import InvalidRequest, ProtocolError
from services.values.kv import (
    DraftKv,
    GroupKind,
    GroupTarget,
    KvGroup,
    KvLayout,
    KvPath,
    KvPathKind,
    KvTicket,
    PageBooks,
    PageRun,
    PoolMemory,
    PullGrant,
    PullRequest,
)
from services.values.rank import (
    Generation,
    Plan,
    PullSource,
    RankAddress,
    RankId,
    Rendezvous,
    Role,
    TakenOver,
    TakeOver,
    TransferId,
)
from services.values.rank_reports import MOST_OVERTAKEN, Overtaken, RankLoad
from services.wire.fields import finite, message_of, value_of
from services.wire.isthmus.v1 import common_pb2, handshake_pb2, prefill_pb2, rank_pb2

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


def known(field_name: str, names: dict[int, _Name], number: int) -> _Name:
    """Return the name of an enum's number. Raises ProtocolError for unknown numbers, which proto3 accepts."""
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
        room=rendezvous.transfer_id,
        decode=rank_id_to_proto(rendezvous.decode),
        prefill=rank_id_to_proto(rendezvous.prefill),
    )


def rendezvous_from_proto(pb: prefill_pb2.Rendezvous) -> Rendezvous:
    return Rendezvous(TransferId(pb.room), rank_id_from_proto(pb.decode), rank_id_from_proto(pb.prefill))


def run_to_proto(run: PageRun) -> handshake_pb2.PageRun:
    return handshake_pb2.PageRun(first_page=run.first_page, num_pages=run.num_pages)


def run_from_proto(pb: handshake_pb2.PageRun) -> PageRun:
    return PageRun(pb.first_page, _positive("page_run.num_pages", pb.num_pages))


def runs_to_proto(runs: Iterable[PageRun]) -> list[handshake_pb2.PageRun]:
    return [run_to_proto(run) for run in runs]


def runs_from_proto(pbs: Iterable[handshake_pb2.PageRun]) -> tuple[PageRun, ...]:
    return tuple(run_from_proto(pb) for pb in pbs)


def layout_to_proto(layout: KvLayout) -> handshake_pb2.KvLayout:
    draft = _draft_to_proto(layout.draft) if layout.draft is not None else None
    return message_of(handshake_pb2.KvLayout, layout, groups=map(_group_to_proto, layout.groups), draft=draft)


def _draft_to_proto(draft: DraftKv) -> handshake_pb2.DraftKv:
    return message_of(handshake_pb2.DraftKv, draft, group=_group_to_proto(draft.group))


def _group_to_proto(group: KvGroup) -> handshake_pb2.KvGroup:
    return message_of(handshake_pb2.KvGroup, group, kind=_KIND_TO_PROTO[group.kind])


def layout_from_proto(pb: handshake_pb2.KvLayout, handshake_version: int) -> KvLayout:
    for group in pb.groups[1:]:
        _positive("layout.groups.unit_bytes", group.unit_bytes)
    for name in ("page_size", "page_bytes", "tp_size"):
        _positive(f"layout.{name}", getattr(pb, name))
    groups = tuple(map(_group_from_proto, pb.groups))
    for index, group in enumerate(groups):
        _require_full_attention(f"layout.groups[{index}].kind", group, index == 0)
    draft = _draft_from_proto(pb.draft) if pb.HasField("draft") else None
    return value_of(KvLayout, pb, groups=groups, handshake_version=handshake_version, draft=draft)


def _draft_from_proto(pb: handshake_pb2.DraftKv) -> DraftKv:
    _positive("layout.draft.group.unit_bytes", pb.group.unit_bytes)
    group = _group_from_proto(pb.group)
    _require_full_attention("layout.draft.group.kind", group, True)
    return value_of(DraftKv, pb, group=group)


def _group_from_proto(pb: handshake_pb2.KvGroup) -> KvGroup:
    _filled("layout.groups.dtype", pb.dtype)
    kind = known("layout.groups.kind", _KIND_FROM_PROTO, pb.kind)
    if kind.is_windowed:
        _positive("layout.groups.window", pb.window)
    return value_of(KvGroup, pb, kind=kind)


def _require_full_attention(field_name: str, group: KvGroup, due: bool) -> None:
    """Raise ProtocolError unless the group is full attention exactly if `due`: only full attention has pages
    in the radix tree, and every other kind is per-request state.
    """
    if (group.kind is GroupKind.FULL_ATTENTION) is not due:
        raise ProtocolError(
            f"{field_name} must {'' if due else 'not '}be full attention, got {group.kind.value}"
        )


def memory_to_proto(memory: PoolMemory) -> handshake_pb2.PoolMemory:
    return message_of(handshake_pb2.PoolMemory, memory)


def memory_from_proto(pb: handshake_pb2.PoolMemory) -> PoolMemory:
    if pb.kind not in _MEMORY_KINDS:
        raise ProtocolError(f"memory.kind must be one of {', '.join(_MEMORY_KINDS)}, got {pb.kind!r}")
    _positive("memory.num_pages", pb.num_pages)
    return value_of(PoolMemory, pb)


def ticket_to_proto(ticket: KvTicket) -> handshake_pb2.KvTicket:
    targets = map(target_to_proto, ticket.targets)
    return message_of(
        handshake_pb2.KvTicket,
        ticket,
        room=ticket.transfer_id,
        runs=runs_to_proto(ticket.runs),
        targets=targets,
    )


def ticket_from_proto(pb: handshake_pb2.KvTicket) -> KvTicket:
    targets = tuple(map(_target_from_proto, pb.targets))
    runs = runs_from_proto(pb.runs)
    return value_of(KvTicket, pb, transfer_id=TransferId(pb.room), runs=runs, targets=targets)


def target_to_proto(target: GroupTarget) -> handshake_pb2.GroupTarget:
    return message_of(handshake_pb2.GroupTarget, target, runs=runs_to_proto(target.runs))


def _target_from_proto(pb: handshake_pb2.GroupTarget) -> GroupTarget:
    return value_of(GroupTarget, pb, runs=runs_from_proto(pb.runs))


def adapter_to_proto(adapter: Adapter) -> common_pb2.Adapter:
    return message_of(common_pb2.Adapter, adapter)


def adapter_from_proto(pb: common_pb2.Adapter) -> Adapter:
    """Return the adapter. Raises ProtocolError where the name or the digest is none."""
    try:
        return value_of(Adapter, pb)
    except InvalidRequest as error:
        raise ProtocolError(str(error)) from error


def source_to_proto(source: PullSource) -> common_pb2.PullSource:
    return common_pb2.PullSource(rank=address_to_proto(source.rank), tokens=source.tokens)


def source_from_proto(pb: common_pb2.PullSource) -> PullSource:
    return PullSource(address_from_proto(pb.rank), pb.tokens)


def pull_request_to_proto(request: PullRequest) -> handshake_pb2.PullRequest:
    token_ids = _packed(request.token_ids)
    return message_of(handshake_pb2.PullRequest, request, room=request.transfer_id, token_ids=token_ids)


def pull_request_from_proto(pb: handshake_pb2.PullRequest) -> PullRequest:
    token_ids = _unpacked("pull_request.token_ids", pb.token_ids)
    return value_of(PullRequest, pb, transfer_id=TransferId(pb.room), token_ids=token_ids)


def take_over_to_proto(asked: TakeOver, generation: Generation) -> rank_pb2.TakeOverRequest:
    source, token_ids = address_to_proto(asked.source), _packed(asked.token_ids)
    return message_of(
        rank_pb2.TakeOverRequest, asked, generation=generation, source=source, token_ids=token_ids
    )


def take_over_from_proto(pb: rank_pb2.TakeOverRequest) -> TakeOver:
    token_ids = _unpacked("take_over.token_ids", pb.token_ids)
    _positive("take_over.token_ids", len(token_ids))
    return value_of(TakeOver, pb, source=address_from_proto(pb.source), token_ids=token_ids)


def taken_over_to_proto(taken: TakenOver) -> rank_pb2.TakeOverResponse:
    return message_of(rank_pb2.TakeOverResponse, taken)


def taken_over_from_proto(pb: rank_pb2.TakeOverResponse) -> TakenOver:
    return value_of(TakenOver, pb)


def _packed(token_ids: tuple[int, ...]) -> bytes:
    return np.array(token_ids, "<u4").tobytes()


def _unpacked(field_name: str, packed: bytes) -> tuple[int, ...]:
    if len(packed) % 4:
        raise ProtocolError(f"{field_name} has {len(packed)} bytes, not whole ids")
    return tuple(np.frombuffer(packed, "<u4").tolist())


def pull_grant_to_proto(grant: PullGrant) -> handshake_pb2.PullGrant:
    return message_of(handshake_pb2.PullGrant, grant, room=grant.transfer_id)


def pull_grant_from_proto(pb: handshake_pb2.PullGrant) -> PullGrant:
    return value_of(PullGrant, pb, transfer_id=TransferId(pb.room))


def load_to_proto(load: RankLoad) -> common_pb2.RankLoad:
    pb = common_pb2.RankLoad()
    fill_load(pb, load)
    return pb


def fill_load(pb: common_pb2.RankLoad, load: RankLoad) -> None:
    """Fill a message that has no load yet, field by field, since a rank reports one at each step."""
    pb.running = load.running
    pb.waiting = load.waiting
    pb.pending_tokens = load.pending_tokens
    pb.step_s = load.step_s
    pb.prefill_tokens_per_s = load.prefill_tokens_per_s
    pb.draining = load.draining
    pb.waiting_tokens = load.waiting_tokens
    pb.admitted_per_s = load.admitted_per_s
    pb.stalled = load.stalled
    pb.tokens_per_step = load.tokens_per_step
    pb.granted_pages = load.granted_pages
    pb.memory_tier_bytes_per_s = load.memory_tier_bytes_per_s
    pb.file_tier_bytes_per_s = load.file_tier_bytes_per_s
    pb.shared_tier_bytes_per_s = load.shared_tier_bytes_per_s
    pb.tiers_off = load.tiers_off
    if load.common_tokens is not None:
        pb.common_tokens = load.common_tokens
    for each in load.overtaken:
        pb.overtaken.add(below_tokens=each.below_tokens, tokens=each.tokens, prompts=each.prompts)
    books = load.books
    pb.free_pages = books.free
    pb.cached_pages = books.cached
    pb.used_pages = books.locked + books.private
    pb.quarantined_pages = books.quarantined
    pb.total_pages = books.total
    if load.kv_paths:
        pb.kv_paths.extend(message_of(common_pb2.KvPath, path) for path in load.kv_paths)


def load_from_proto(pb: common_pb2.RankLoad) -> RankLoad:
    """Return the load, read field by field: a router reads one with each token, and `value_of` takes 4 us
    longer.

    A message has only one number for pages in use, which becomes `private`.
    """
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
        kv_paths=tuple(map(_kv_path_from_proto, pb.kv_paths)),
        tokens_per_step=finite("load.tokens_per_step", pb.tokens_per_step),
        granted_pages=pb.granted_pages,
        memory_tier_bytes_per_s=finite("load.memory_tier_bytes_per_s", pb.memory_tier_bytes_per_s),
        file_tier_bytes_per_s=finite("load.file_tier_bytes_per_s", pb.file_tier_bytes_per_s),
        shared_tier_bytes_per_s=finite("load.shared_tier_bytes_per_s", pb.shared_tier_bytes_per_s),
        tiers_off=pb.tiers_off,
        common_tokens=pb.common_tokens if pb.HasField("common_tokens") else None,
        # Placing reads all of them for each request, so a rank cannot slow that down by sending more.
        overtaken=tuple(
            [
                Overtaken(each.below_tokens, each.tokens, each.prompts)
                for each in islice(pb.overtaken, MOST_OVERTAKEN)
            ]
        ),
    )


def _kv_path_from_proto(pb: common_pb2.KvPath) -> KvPath:
    """Return the path; a kind of a later version becomes an unknown one."""
    return value_of(KvPath, pb, kind=_PATH_KINDS.get(pb.kind, KvPathKind.UNKNOWN))

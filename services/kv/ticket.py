"""A decode rank says in a ticket where KV is to be written; the prefill rank checks everything in it.

group                            where it goes            what goes there
full attention                   ticket.runs              the delta: [decode_prefix_len, prompt_len)
each of the others, in order     ticket.targets           all that the first generated token needs of the
                                                          prompt (tails.py), whatever decode already has
"""

from collections.abc import Sequence
from math import isfinite

from services.kv.tails import tail_start, units_at
from services.kv.transfer_plan import pages_covering, runs_of
from services.values.errors import ProtocolError, StaleGeneration
from services.values.kv import (
    GroupKind,
    GroupTarget,
    HitKind,
    KvGroup,
    KvLayout,
    KvTicket,
    PageId,
    PageRun,
    PoolMemory,
)
from services.values.rank import Generation, TransferId


class StartsWithinPage(ProtocolError):
    """The ticket would be accepted with a delta from `start`, a page's begin: pages are written whole."""

    def __init__(self, start: int, decode_prefix_len: int) -> None:
        super().__init__(f"the delta starts at token {decode_prefix_len}, within the page from {start} on")
        self.start = start


_EQUAL_IN_LAYOUTS = ("handshake_version", "page_size", "page_bytes", "model_fingerprint", "groups")


def hit_kind(decode_prefix_len: int, prompt_len: int) -> HitKind:
    if not 0 <= decode_prefix_len <= prompt_len:
        raise ProtocolError(f"a prefix of {decode_prefix_len} tokens is not one of {prompt_len} tokens")
    if decode_prefix_len == 0:
        return HitKind.NONE
    return HitKind.FULL if decode_prefix_len == prompt_len else HitKind.PARTIAL


def make_ticket(
    transfer_id: TransferId,
    prefill_generation: Generation,
    prompt_len: int,
    decode_prefix_len: int,
    delta_pages: Sequence[PageId],
    write_until_s: float,
    *,
    targets: tuple[GroupTarget, ...] = (),
    want_digests: bool = False,
) -> KvTicket:
    """Return a ticket whose `delta_pages` hold tokens [decode_prefix_len, prompt_len), in token order.

    `targets` come from `targets_of`. `write_until_s` is a time on the writer's monotonic clock.

    Raises:
        ProtocolError: the prefix is longer than the prompt, a delta has no pages, or pages have no delta.
    """
    full = hit_kind(decode_prefix_len, prompt_len) is HitKind.FULL
    if full == bool(delta_pages):
        delta_tokens = prompt_len - decode_prefix_len
        raise ProtocolError(f"{len(delta_pages)} pages cannot hold a delta of {delta_tokens} tokens")
    return KvTicket(
        transfer_id=transfer_id,
        prefill_generation=prefill_generation,
        prompt_len=prompt_len,
        decode_prefix_len=decode_prefix_len,
        runs=runs_of(delta_pages),
        write_until_s=write_until_s,
        targets=targets,
        want_digests=want_digests,
    )


def targets_of(
    layout: KvLayout, prompt_len: int, carried: Sequence[Sequence[PageId]]
) -> tuple[GroupTarget, ...]:
    """Return where the per-request state at the prompt's end is to be written.

    `carried` has the receiving units of each group beside full attention, in the layout's order, and within
    a group in token order.

    Raises:
        ProtocolError: the number of groups or of units is wrong.
    """
    if len(carried) != len(layout.carried):
        raise ProtocolError(f"units of {len(carried)} groups are given, {len(layout.carried)} are carried")
    targets = tuple(
        GroupTarget(index, tail_start(group, prompt_len, layout.page_size), runs_of(units))
        for index, (group, units) in enumerate(zip(layout.carried, carried, strict=True), 1)
    )
    for group, target in zip(layout.carried, targets, strict=True):
        _check_units(group, target, units_at(group, prompt_len, layout.page_size))
    return targets


def check_ticket(
    ticket: KvTicket,
    prompt_len: int | None,
    layout: KvLayout,
    peer_memories: Sequence[PoolMemory],
    own_generation: Generation,
) -> None:
    """Check a ticket before anything is written by it.

    `prompt_len` is the request's, or None while it has not come. `peer_memories` are the peer's pools, by
    group.

    Raises:
        StaleGeneration: the ticket is for another incarnation of this rank.
        StartsWithinPage: the ticket would be accepted with an earlier start.
        ProtocolError: the ticket cannot be accepted; the message says why.
    """
    if ticket.prefill_generation != own_generation:
        raise StaleGeneration(
            f"the ticket is for generation {ticket.prefill_generation:016x}, this is {own_generation:016x}"
        )
    if prompt_len is not None and ticket.prompt_len != prompt_len:
        raise ProtocolError(f"the ticket has {ticket.prompt_len} prompt tokens, the request {prompt_len}")
    if not isfinite(ticket.write_until_s):
        raise ProtocolError(f"a write lease until {ticket.write_until_s} would never end")
    _check_runs(ticket, layout.page_size, peer_memories[0].num_pages)
    _check_targets(ticket, layout, peer_memories)


def check_layouts(own: KvLayout, peer: KvLayout) -> None:
    """Raise ProtocolError, naming the field, if KV cannot cross between the two. TP degrees may differ."""
    if name := difference(own, peer):
        ours, theirs = getattr(own, name), getattr(peer, name)
        raise ProtocolError(f"the KV layouts differ in {name}: ours is {ours}, the peer's {theirs}")


def difference(one: KvLayout, other: KvLayout) -> str:
    """Return the first field that keeps KV from crossing, or "" if there is none. TP degrees may differ."""
    return next((name for name in _EQUAL_IN_LAYOUTS if getattr(one, name) != getattr(other, name)), "")


def _check_runs(ticket: KvTicket, page_size: int, pool_pages: int) -> None:
    hit_kind(ticket.decode_prefix_len, ticket.prompt_len)
    if offset := ticket.decode_prefix_len % page_size:
        raise StartsWithinPage(ticket.decode_prefix_len - offset, ticket.decode_prefix_len)
    expected = len(pages_covering(ticket.decode_prefix_len, ticket.prompt_len, page_size))
    num_pages = sum(run.num_pages for run in ticket.runs)
    if num_pages != expected:
        raise ProtocolError(f"the delta covers {expected} pages, the ticket's runs {num_pages}")
    _check_apart("page", ticket.runs, pool_pages)


def _check_targets(ticket: KvTicket, layout: KvLayout, peer_memories: Sequence[PoolMemory]) -> None:
    named, due = [target.group for target in ticket.targets], list(range(1, len(layout.groups)))
    if named != due:
        raise ProtocolError(f"the ticket has targets of the groups {named}, the layout carries {due}")
    for target in ticket.targets:
        group = layout.groups[target.group]
        start = tail_start(group, ticket.prompt_len, layout.page_size)
        if target.start_token != start:
            raise ProtocolError(
                f"what is carried of {_name(group, target)} starts at token {start}, the ticket's target at "
                f"{target.start_token}"
            )
        _check_units(group, target, units_at(group, ticket.prompt_len, layout.page_size))
        unit = f"{_name(group, target)}: {_unit(group)}"
        _check_apart(unit, target.runs, peer_memories[target.group].num_pages)


def _check_units(group: KvGroup, target: GroupTarget, due: int) -> None:
    num_units = sum(run.num_pages for run in target.runs)
    if num_units != due:
        raise ProtocolError(
            f"what is carried of {_name(group, target)} takes {due} {_unit(group)}s, the ticket's target has "
            f"{num_units}"
        )


def _name(group: KvGroup, target: GroupTarget) -> str:
    return f"group {target.group} ({group.kind.value})"


def _unit(group: KvGroup) -> str:
    return "slot" if group.kind is GroupKind.RECURRENT else "page"


def _check_apart(unit: str, runs: Sequence[PageRun], pool_units: int) -> None:
    end = 0
    for run in sorted(runs, key=lambda run: run.first_page):
        if run.first_page < end:
            raise ProtocolError(f"{unit} {run.first_page} appears twice in the ticket's runs")
        end = run.end
    if end > pool_units:
        raise ProtocolError(f"{unit} {end - 1} is outside of the peer's pool of {pool_units}")

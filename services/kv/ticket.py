"""The ticket: decode says where the delta goes; prefill believes nothing it has not checked."""

from collections.abc import Sequence
from math import isfinite

from services.kv.transfer_plan import pages_covering, runs_of
from services.values.errors import ProtocolError, StaleGeneration
from services.values.kv import HitKind, KvLayout, KvTicket, PageId, PageRun, PoolMemory
from services.values.rank import Generation, Room


class StartsWithinPage(ProtocolError):
    """The ticket would do if its delta started at `start`, with the page: pages are written whole."""

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
    room: Room,
    prefill_generation: Generation,
    prompt_len: int,
    decode_prefix_len: int,
    delta_pages: Sequence[PageId],
    write_until_s: float,
    *,
    want_digests: bool = False,
) -> KvTicket:
    """`delta_pages` hold tokens [decode_prefix_len, prompt_len), in token order.

    `write_until_s` is on the writer's monotonic clock.

    Raises:
        ProtocolError: the prefix is longer than the prompt, or a delta has no pages, or pages no delta.
    """
    full = hit_kind(decode_prefix_len, prompt_len) is HitKind.FULL
    if full == bool(delta_pages):
        delta_tokens = prompt_len - decode_prefix_len
        raise ProtocolError(f"{len(delta_pages)} pages cannot hold a delta of {delta_tokens} tokens")
    return KvTicket(
        room=room,
        prefill_generation=prefill_generation,
        prompt_len=prompt_len,
        decode_prefix_len=decode_prefix_len,
        runs=runs_of(delta_pages),
        write_until_s=write_until_s,
        want_digests=want_digests,
    )


def check_ticket(
    ticket: KvTicket,
    prompt_len: int | None,
    layout: KvLayout,
    peer_memory: PoolMemory,
    own_generation: Generation,
) -> None:
    """Refuse a ticket that must not be written by; `prompt_len` is the request's, None before it came.

    Raises:
        StaleGeneration: the ticket is for another life of this rank.
        StartsWithinPage: an earlier start would do.
        ProtocolError: why it cannot be honoured, as a sentence.
    """
    if ticket.prefill_generation != own_generation:
        raise StaleGeneration(
            f"the ticket is for generation {ticket.prefill_generation:016x}, this is {own_generation:016x}"
        )
    if prompt_len is not None and ticket.prompt_len != prompt_len:
        raise ProtocolError(f"the ticket has {ticket.prompt_len} prompt tokens, the request {prompt_len}")
    if not isfinite(ticket.write_until_s):
        raise ProtocolError(f"a write lease until {ticket.write_until_s} would never end")
    _check_runs(ticket, layout.page_size, peer_memory.num_pages)


def check_layouts(own: KvLayout, peer: KvLayout) -> None:
    """Raises ProtocolError, naming the field, unless KV may cross; TP degrees may differ."""
    if name := difference(own, peer):
        ours, theirs = getattr(own, name), getattr(peer, name)
        raise ProtocolError(f"the KV layouts differ in {name}: ours is {ours}, the peer's {theirs}")


def difference(one: KvLayout, other: KvLayout) -> str:
    """The first field that keeps KV from crossing, or nothing; TP degrees may differ."""
    return next((name for name in _EQUAL_IN_LAYOUTS if getattr(one, name) != getattr(other, name)), "")


def _check_runs(ticket: KvTicket, page_size: int, pool_pages: int) -> None:
    hit_kind(ticket.decode_prefix_len, ticket.prompt_len)
    if offset := ticket.decode_prefix_len % page_size:
        raise StartsWithinPage(ticket.decode_prefix_len - offset, ticket.decode_prefix_len)
    expected = len(pages_covering(ticket.decode_prefix_len, ticket.prompt_len, page_size))
    num_pages = sum(run.num_pages for run in ticket.runs)
    if num_pages != expected:
        raise ProtocolError(f"the delta covers {expected} pages, the ticket's runs {num_pages}")
    _check_apart(sorted(ticket.runs, key=lambda run: run.first_page), pool_pages)


def _check_apart(runs: Sequence[PageRun], pool_pages: int) -> None:
    """`runs` ascend by first page."""
    end = 0
    for run in runs:
        if run.first_page < end:
            raise ProtocolError(f"page {run.first_page} appears twice in the ticket's runs")
        end = run.end
    if end > pool_pages:
        raise ProtocolError(f"page {end - 1} is outside of the peer's pool of {pool_pages}")

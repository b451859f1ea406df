"""The load that was observed becomes requests of a replay, and so does one that is some times as large.

More load is more conversations: copies of those that were seen, at other times. What two conversations have
in common they share with the copies, too; the rest of a copy is its own. Less load leaves conversations out.

A request without the name of a conversation goes on with an earlier one if it begins with all of that one's
blocks, and no other has gone on with that before.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from statistics import fmean

from services.router.replay.observed import Observation, Observed
from services.router.replay.workload import TraceRequest

_MOST_BLOCKS = 48  # a prompt, in the mean
_WAITS = -1  # The copy of a request that waits.
_WARM_UP_S = 5.0  # between two prompts that are put into caches first


@dataclass(frozen=True, slots=True)
class Workload:
    """`warm` are prompts that caches held before the first request. `sources` has each request's index among
    the observed ones. Numbers count through both, by time. The first `waiting` ones are a backlog."""

    warm: Sequence[TraceRequest]
    requests: Sequence[TraceRequest]
    sources: Sequence[int]
    waiting: int = 0


@dataclass(frozen=True, slots=True)
class _Sent:
    arrival_s: float  # since the first one
    index: int
    copy: int


class ReplayedLoad:
    """A replay's block has `block_tokens`: it is so many of the index that a prompt has some dozen."""

    def __init__(self, observation: Observation) -> None:
        self._seen = sorted(observation.requests, key=lambda seen: seen.arrival_s)
        self._began_s = self._seen[0].arrival_s
        self.span_s = max(1.0, self._seen[-1].arrival_s - self._began_s)
        stride = _stride(self._seen)
        self.block_tokens = observation.fleet.block_tokens * stride
        # Every hash names its block with all before it, so that each n-th one names n blocks.
        self._blocks = [tuple(seen.blocks[stride - 1 :: stride]) for seen in self._seen]
        self._output_tokens = _output_tokens(self._seen)
        self._before = _earlier(self._seen, self._blocks)
        self._follower = {before: index for index, before in enumerate(self._before) if before is not None}
        self._session_of: dict[int, int] = {}
        self._sessions = self._by_session()
        self._shared = self._common()
        self._common_tokens = _common_tokens(self._seen, self._before, observation.fleet.block_tokens)

    def times(self, load: float, seed: int, from_now: bool = False) -> Workload:
        """Return the workload of so many times the load. `from_now` it begins with copies of those that wait
        for their first token now, all at once, as ranks have to serve them before what comes."""
        sent = sorted(self._sent(load, seed), key=lambda each: (each.arrival_s, each.index, each.copy))
        waits = [_Sent(0.0, n, _WAITS) for n, seen in enumerate(self._seen) if from_now and not seen.ttft_s]
        sent = [*waits, *sent]
        ids: dict[tuple[int, int], int] = {}
        named = [self._named(self._blocks[each.index], each.copy, ids) for each in sent]
        answered = [self._named(self._answered(each.index), each.copy, ids) for each in sent]
        warm = list(self._warm(sent, named, answered))
        numbers = {(each.index, each.copy): len(warm) + n for n, each in enumerate(sent)}
        first_s = len(warm) * _WARM_UP_S
        requests = [
            self._request(each, numbers, first_s, named[n], answered[n]) for n, each in enumerate(sent)
        ]
        return Workload(warm, requests, [each.index for each in sent], len(waits))

    def _request(
        self,
        each: _Sent,
        numbers: dict[tuple[int, int], int],
        first_s: float,
        blocks: tuple[int, ...],
        answered: tuple[int, ...],
    ) -> TraceRequest:
        seen, before = self._seen[each.index], self._before[each.index]
        request = TraceRequest(
            numbers[each.index, each.copy],
            first_s + each.arrival_s,
            blocks,
            seen.prompt_tokens,
            self._output_tokens[each.index],
            f"{self._session_of[each.index]}/{each.copy}",
            answered=answered,
            common_blocks=self._common_tokens[each.index] // self.block_tokens,
            common_tokens=self._common_tokens[each.index] % self.block_tokens,
        )
        if before is None or each.copy == _WAITS or self._seen[before].ended_s > seen.arrival_s:
            return request
        after = (numbers[before, each.copy],)
        return replace(request, after=after, wait_s=seen.arrival_s - self._seen[before].ended_s)

    def _sent(self, load: float, seed: int) -> Iterator[_Sent]:
        random = Random(seed)
        copies = [int(load) + (random.random() < load % 1) for _ in self._sessions]
        if not any(copies):  # The least load is one conversation.
            copies[0] = 1
        for indices, number in zip(self._sessions.values(), copies, strict=True):
            offset_s = self._seen[indices[0]].arrival_s - self._began_s
            for copy in range(number):
                later_s = copy * self.span_s / load if copy else 0.0
                moved_s = (offset_s + later_s) % self.span_s if copy else offset_s
                for index in indices:
                    at_s = self._seen[index].arrival_s - self._began_s
                    yield _Sent(at_s - offset_s + moved_s, index, copy)

    def _warm(
        self, sent: Sequence[_Sent], named: Sequence[tuple[int, ...]], answered: Sequence[tuple[int, ...]]
    ) -> Iterator[TraceRequest]:
        """Yield the prompts whose KV was found, and which no earlier request has left."""
        known, number = set[int](), 0
        for each, blocks, with_answer in zip(sent, named, answered, strict=True):
            found = blocks[: self._seen[each.index].reused_tokens // self.block_tokens]
            if found and found[-1] not in known:
                known.update(found)
                tokens = len(found) * self.block_tokens
                session = f"{self._session_of[each.index]}/{each.copy}"
                yield TraceRequest(number, number * _WARM_UP_S, found, tokens, 1, session)
                number += 1
            known.update(blocks, with_answer)

    def _named(self, blocks: Sequence[int], copy: int, ids: dict[tuple[int, int], int]) -> tuple[int, ...]:
        return tuple(
            ids.setdefault((block, 0 if block in self._shared else copy), len(ids)) for block in blocks
        )

    def _by_session(self) -> dict[int, list[int]]:
        """Return the requests of each session, which is named by its first one."""
        sessions: dict[int, list[int]] = {}
        for index, before in enumerate(self._before):
            session = self._session_of.setdefault(
                index, index if before is None else self._session_of[before]
            )
            sessions.setdefault(session, []).append(index)
        return sessions

    def _common(self) -> set[int]:
        """Return the blocks of more than one session."""
        first: dict[int, int] = {}
        shared = set[int]()
        for session, indices in self._sessions.items():
            for block in {block for index in indices for block in self._blocks[index]}:
                if first.setdefault(block, session) != session:
                    shared.add(block)
        return shared

    def _answered(self, index: int) -> tuple[int, ...]:
        """Return the blocks of prompt and answer, as the conversation's next prompt tells them."""
        seen, blocks = self._seen[index], self._blocks[index]
        follower = self._follower.get(index)
        if follower is None or len(self._blocks[follower]) <= len(blocks):
            return ()
        longer = self._blocks[follower]
        if blocks and longer[len(blocks) - 1] != blocks[-1]:
            return ()
        return longer[: (seen.prompt_tokens + seen.output_tokens - 1) // self.block_tokens]


def _stride(requests: Sequence[Observed]) -> int:
    mean, stride = fmean(len(seen.blocks) for seen in requests), 1
    while mean / stride > _MOST_BLOCKS:
        stride *= 2
    return stride


def _output_tokens(requests: Sequence[Observed]) -> list[int]:
    """Return the tokens of each answer; one that is not over is as long as those that are longer, in the
    mean."""
    whole = sorted(seen.output_tokens for seen in requests if seen.is_over)

    def expected(seen: Observed) -> int:
        longer = [tokens for tokens in whole if tokens > seen.output_tokens]
        return round(fmean(longer)) if longer and not seen.is_over else max(1, seen.output_tokens)

    return [expected(seen) for seen in requests]


def _earlier(requests: Sequence[Observed], blocks: Sequence[tuple[int, ...]]) -> list[int | None]:
    """Return the index of the request that each one goes on with."""
    found: list[int | None] = []
    by_conversation: dict[int, int] = {}
    by_last_block: dict[int, int] = {}
    for index, seen in enumerate(requests):
        before = by_conversation.get(seen.conversation) if seen.conversation else None
        if not seen.conversation:
            before = next((by_last_block.pop(b) for b in reversed(blocks[index]) if b in by_last_block), None)
        found.append(before)
        if seen.conversation:
            by_conversation[seen.conversation] = index
        elif blocks[index]:
            by_last_block[blocks[index][-1]] = index
    return found


def _common_tokens(
    requests: Sequence[Observed], before: Sequence[int | None], block_tokens: int
) -> list[int]:
    """Return how many tokens each prompt has in common with an earlier one or its answer, or was found to
    have with older ones, in blocks of the index."""
    known, found = set[int](), list[int]()
    for seen, index in zip(requests, before, strict=True):
        blocks = bisect_left(seen.blocks, True, key=lambda block: block not in known)
        if index is not None:
            said = (requests[index].prompt_tokens + requests[index].output_tokens - 1) // block_tokens
            blocks = max(blocks, min(said, len(seen.blocks)))
        found.append(max(blocks * block_tokens, min(seen.reused_tokens, seen.prompt_tokens - 1)))
        known.update(seen.blocks)
    return found

"""A simulated rank pulls what its source holds; both sides keep the engine's bounds, and answer in its words.

    puller  pages taken --hop--> asked     the source's step ends --> matched and locked, or refused
            published <-- landed <-- written over the source's link, behind what it sends already

A pull begins when the request comes, while others are computed. Whatever fails, the rank computes. The source
writes beside its steps, which take no longer for it, and pages that it may still write after a failure
count as free.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from services.kv.prefix_cache import SequencePages
from services.values.request import Pulled

if TYPE_CHECKING:
    from services.router.replay.ranks import Rank
    from services.router.replay.workload import Job

# The bounds are those of services/engine/paged/pulls.py and of services/engine/paged/shell/pulling.py.
MOST_SHARE, MOST_GRANTS = 8, 8
OF_COMPUTING, LEAST_S, MOST_S, GRANT_S = 0.5, 0.25, 30.0, 1.0


@dataclass(slots=True, eq=False)
class _Pull:
    job: "Job"
    source: "Rank"
    pages: SequencePages
    have: int  # blocks
    end: int
    began_s: float
    grant: SequencePages | None = None
    followers: "list[Job]" = field(default_factory=list)


class SimulatedPulls:
    def __init__(self, rank: "Rank") -> None:
        self._rank = rank
        self._under_way: dict[Job, _Pull] = {}
        self._granted: list[SequencePages] = []

    @property
    def granted_pages(self) -> int:
        return sum(len(pages.pages) for pages in self._granted)

    # -- the puller -------------------------------------------------------------------------------

    def begin(self, job: "Job") -> None:
        """Ask its source, if that is to hold more, nobody pulls the same, and there are pages."""
        rank, source = self._rank, job.source
        if source is None or self._who_pulls(job) is not None:
            return
        have = rank.cache.match_len(job.request.blocks, "")
        if job.source_blocks > have and (pages := rank.take_pages(job)) is not None:
            pull = _Pull(job, source, pages, have, job.source_blocks, rank.events.now)
            self._under_way[job] = pull
            rank.events.after(rank.timing.hop_s, self._asked, pull)

    def awaits(self, job: "Job") -> bool:
        """Return whether a job whose turn has come waits for its own pull, or for that of the same blocks."""
        if job not in self._under_way and job.source is not None and job.pulled is None:
            if (other := self._who_pulls(job)) is not None:
                other.followers.append(job)
                return True
            self.begin(job)
        return job in self._under_way

    def _who_pulls(self, job: "Job") -> _Pull | None:
        end, blocks = job.source_blocks, job.request.blocks
        pulls = (pull for pull in self._under_way.values() if pull.end >= end)
        return next((pull for pull in pulls if pull.job.request.blocks[:end] == blocks[:end]), None)

    def _asked(self, pull: _Pull) -> None:
        events, waits_s = self._rank.events, pull.source.step_left_s()
        late_s = pull.began_s + min(GRANT_S, self._limit_s(pull))
        if events.now + waits_s > late_s:
            events.at(late_s, self._ended, pull, Pulled(refused="late"))
        else:
            events.after(waits_s, self._answered, pull)

    def _answered(self, pull: _Pull) -> None:
        events, timing, job, source = self._rank.events, self._rank.timing, pull.job, pull.source
        # The last token of a prompt is always computed.
        most = (job.request.prompt_tokens - 1) // timing.block_tokens
        pull.grant, held, word = source.pulls.grant(job.request.blocks[:most], pull.have)
        answer = Pulled(refused=word, held_tokens=held * timing.block_tokens)
        if pull.grant is None:
            self._ended(pull, answer)
            return
        pull.end, now, limit_s = held, events.now, self._limit_s(pull)
        tokens = (held - pull.have) * timing.block_tokens
        num_bytes = tokens * timing.kv_bytes_per_token
        landed_s = max(now, source.link_free_s) + num_bytes / timing.bytes_per_s
        late_s = max(pull.began_s + limit_s, now + min(LEAST_S, limit_s))
        source.link_free_s = max(source.link_free_s, min(landed_s, late_s))
        if landed_s > late_s:
            events.at(late_s, self._ended, pull, Pulled(refused="late", held_tokens=answer.held_tokens))
        else:
            landed = Pulled(tokens, num_bytes, held_tokens=answer.held_tokens)
            events.at(landed_s, self._ended, pull, landed)

    def _limit_s(self, pull: _Pull) -> float:
        tokens = (pull.end - pull.have) * self._rank.timing.block_tokens
        return min(MOST_S, max(LEAST_S, OF_COMPUTING * tokens / self._rank.timing.reported_tokens_per_s))

    def _ended(self, pull: _Pull, pulled: Pulled) -> None:
        rank, job = self._rank, pull.job
        has = pull.end if pulled.tokens else pull.have
        if pulled.tokens:
            rank.cache.publish(pull.pages, job.request.blocks[:has])
        job.pulled = replace(pulled, seconds=rank.events.now - pull.began_s)
        job.pulled_blocks = has - pull.have
        del self._under_way[job]
        if pull.grant is not None:
            pull.source.pulls.end_grant(pull.grant)
        rank.pull_ended(job, pull.followers, (job.source_blocks - has) * rank.timing.block_tokens)

    # -- the source -------------------------------------------------------------------------------

    def grant(self, blocks: Sequence[int], least: int) -> tuple[SequencePages | None, int, str]:
        """Lock what is held of the blocks. Return that, how many they are, and why nothing is granted."""
        cache = self._rank.cache
        held = cache.match_len(blocks, "")
        if held <= least:
            return None, held, "evicted"
        if self._is_busy(held):
            return None, held, "busy"
        # No request here asked for the prefix again, so it is not protected.
        pages = cache.open(blocks, "", held, protect=False)
        self._granted.append(pages)
        return pages, held, ""

    def end_grant(self, pages: SequencePages) -> None:
        self._granted.remove(pages)
        self._rank.cache.close(pages)
        self._rank.freed()

    def _is_busy(self, num_pages: int) -> bool:
        if not self._granted:
            return False
        if len(self._granted) >= MOST_GRANTS:
            return True
        cache = self._rank.cache
        is_much = self.granted_pages + num_pages > cache.num_pages // MOST_SHARE
        return is_much and cache.available_pages - num_pages < cache.num_pages // 2

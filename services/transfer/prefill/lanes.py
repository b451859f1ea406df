"""What of a prompt one room has to write, group by group, and what of it is final.

full attention   [ held by decode | taken .......... | final | not yet computed )      by position
                 0                ^ first            ^ next                     ^ end
the others       [ taken | final once the prompt is computed )                   a tail, a state
                 0 = first                                   ^ end
the draft model  as full attention: the same pages, of its own pool
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from services.kv.transfer_plan import pages_covering
from services.values.kv import KvLayout, KvTicket, PageId


@dataclass(slots=True)
class Sources:
    """A prompt's units in the writer's pools, as far as they are final. Their owner adds to them."""

    pages: list[PageId] = field(default_factory=list)  # of full attention, from position 0 on
    # By group beside full attention, in the layout's order; empty: the prompt is not computed yet.
    carried: tuple[Sequence[PageId], ...] = ()

    def of(self, group: int) -> Sequence[PageId]:
        if group == 0:
            return self.pages
        return self.carried[group - 1] if self.carried else ()


@dataclass(slots=True)
class Lane:
    """Units [next, end) of a group's sources are still to be taken, each once and in token order."""

    group: int  # whose sources, and targets
    first: int
    end: int
    next: int
    pool: int  # that they are of, on either side

    @property
    def done(self) -> bool:
        return self.next == self.end

    def has_due(self, sources: Sources) -> bool:
        return self.next < min(len(sources.of(self.group)), self.end)

    def take(self, sources: Sources, most: int) -> Sequence[PageId]:
        """The next ones that are final, `most` of them at most."""
        units = sources.of(self.group)[self.next : min(self.next + most, self.end)]
        self.next += len(units)
        return units


def lanes_of(ticket: KvTicket, layout: KvLayout) -> list[Lane]:
    """One for each pool of what both sides have."""
    delta = pages_covering(ticket.decode_prefix_len, ticket.prompt_len, layout.page_size)
    lanes = [Lane(0, delta.start, delta.stop, next=delta.start, pool=0)]
    for target in ticket.targets:
        num_units = sum(run.num_pages for run in target.runs)
        lanes.append(Lane(target.group, 0, num_units, next=0, pool=target.group))
    if layout.draft is not None:
        lanes.append(replace(lanes[0], pool=len(lanes)))
    return lanes

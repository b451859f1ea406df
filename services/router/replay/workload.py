"""The requests that are replayed have index blocks in place of tokens."""

from dataclasses import dataclass

BLOCK_TOKENS = 512  # of the trace and of made-up requests


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """`blocks` are ids of blocks of Timing.block_tokens; the last one of a trace may be partly filled, and
    counts as a whole one, as in the trace's own figures. A generated request has its full blocks alone.

    It is sent at `arrival_s`, or `wait_s` after the requests whose numbers are in `after` have ended.
    """

    number: int
    arrival_s: float
    blocks: tuple[int, ...]
    prompt_tokens: int
    output_tokens: int
    session: str
    after: tuple[int, ...] = ()
    wait_s: float = 0.0
    answered: tuple[int, ...] = ()  # the full blocks of prompt and answer; none: nobody asks for them again
    new_tokens: int = 0  # of the prompt, behind what its session has said or what sessions share
    client: int = 0  # whose session it is
    common_blocks: int = -1  # the prompt's with others, where it is known that they have common tokens more
    common_tokens: int = 0  # those more: less than a block

    def num_pages(self, block_tokens: int) -> int:
        """Return the pages of the prompt."""
        return max(len(self.blocks), -(-self.prompt_tokens // block_tokens))

    def num_common(self, other: "TraceRequest") -> int:
        """Return how many of the first blocks both have. A block stands for all that comes before it, too."""
        low, high = 0, min(len(self.blocks), len(other.blocks))
        while low < high:
            middle = (low + high + 1) // 2
            if self.blocks[middle - 1] == other.blocks[middle - 1]:
                low = middle
            else:
                high = middle - 1
        return low

    def found_tokens(self, blocks: int, block_tokens: int) -> int:
        """Return the tokens that are found where so many blocks are."""
        return blocks * block_tokens + (self.common_tokens if blocks == self.common_blocks else 0)

"""What became of drafts. Pure."""

from collections import Counter

from services.values.load import DraftCount


class DraftCounts:
    """By source, since the rank's start; and what sequences get of a step."""

    def __init__(self) -> None:
        self._drafted = Counter[str]()
        self._accepted = Counter[str]()
        self.tokens_per_step = 0.0  # of a decoding sequence, lately; 0: none was there yet

    def __repr__(self) -> str:
        return f"DraftCounts({self.by_source()} tokens_per_step={self.tokens_per_step:.2f})"

    def note(self, source: str, drafted: int, accepted: int) -> None:
        """Of one verified proposal."""
        self._drafted[source] += drafted
        self._accepted[source] += accepted

    def note_step(self, num_sequences: int, num_tokens: int) -> None:
        """That so many decoding sequences got together."""
        if num_sequences:
            mean = num_tokens / num_sequences
            before = self.tokens_per_step or mean
            self.tokens_per_step = 0.9 * before + 0.1 * mean

    def by_source(self) -> tuple[DraftCount, ...]:
        return tuple(
            DraftCount(source, drafted, self._accepted[source])
            for source, drafted in sorted(self._drafted.items())
        )

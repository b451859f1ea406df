"""How far one answer has come in what its constraint allows."""

from collections.abc import Sequence

from llguidance import LLMatcher

from services.values.errors import InvalidRequest

_OTHERWISE = "the answer cannot go on as its constraint has it"


class Matcher:
    """Of one sequence; for one thread at a time. The ids that end an answer are none of its text: it is not
    told of them."""

    def __init__(self, inner: LLMatcher) -> None:
        self.inner = inner

    def __repr__(self) -> str:
        return f"Matcher(complete={self.is_complete} problem={self.problem!r})"

    def advance(self, token_ids: Sequence[int]) -> None:
        """Raises InvalidRequest where they do not follow; nothing does then."""
        if token_ids and not self.inner.consume_tokens(list(token_ids)):
            raise InvalidRequest(f"sampling.constraint: {self.problem}")

    def num_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of them, from the first on, may follow one another. Changes nothing."""
        fitting: int = self.inner.validate_tokens(list(token_ids))
        return fitting

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing may follow."""
        return bool(self.inner.is_stopped() and not self.inner.is_error())

    @property
    def problem(self) -> str:
        """Why nothing may follow though the text is not whole."""
        return sentence_of(self.inner.get_error()) or _OTHERWISE

    def copy(self) -> "Matcher":
        return Matcher(self.inner.deep_copy())


def sentence_of(message: str) -> str:
    """llguidance's own on one line, without what it prints of its state and of the grammar."""
    for extra in ("<state>", "<non-verbose/>", "\n   1 | "):
        message = message.partition(extra)[0]
    return " ".join(message.split())

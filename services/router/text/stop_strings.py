"""Stop strings are looked for in text that comes in pieces. Pure.

The match that is complete first wins; of those complete at the same character, the longest. So what is
released does not depend on where the pieces are cut, and no look-ahead past a match is needed. Each stop
string has a Knuth-Morris-Pratt automaton: a character costs the same however long the string is.
"""


class StopStrings:
    """One stream of text is searched. With `included`, what is found is released, too, so that nothing is
    held back.

    Raises:
        ValueError: A stop string is empty.
    """

    def __init__(self, stop: tuple[str, ...], included: bool = False) -> None:
        if not all(stop):
            raise ValueError("a stop string is empty")
        self._automata = [_Automaton(pattern) for pattern in stop]
        self._included = included
        self._held = ""
        self._matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that no stop string can begin in any more, and the stop string once one is
        complete.

        Text from the match on, or behind it where that is included, is dropped; so is all that comes later.
        """
        if self._matched is not None or not self._automata:
            return ("" if self._matched is not None else text), self._matched
        pending = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            matched = self._step(character)
            if matched is not None:
                self._matched, self._held = matched, ""
                return pending[: end if self._included else end - len(matched)], matched
        held_len = 0 if self._included else max(automaton.matched_len for automaton in self._automata)
        released_len = len(pending) - held_len
        self._held = pending[released_len:]
        return pending[:released_len], None

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held

    def _step(self, character: str) -> str | None:
        complete = [automaton.pattern for automaton in self._automata if automaton.step(character)]
        return max(complete, key=len, default=None)


class _Automaton:
    """It knows how much of `pattern` the text ends with: the longest prefix that is a suffix of the text."""

    def __init__(self, pattern: str) -> None:
        self.pattern = pattern
        self.matched_len = 0
        self._borders = _borders(pattern)

    def step(self, character: str) -> bool:
        while self.matched_len and self.pattern[self.matched_len] != character:
            self.matched_len = self._borders[self.matched_len - 1]
        if self.pattern[self.matched_len] == character:
            self.matched_len += 1
        return self.matched_len == len(self.pattern)


def _borders(pattern: str) -> list[int]:
    """Return for each i how long a proper prefix of pattern[:i + 1] that is also its suffix is at most."""
    borders = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = borders[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        borders[index] = length
    return borders

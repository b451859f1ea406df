"""Grammars have rules in llguidance's dialect of Lark, for text with a model's special tokens in it. Pure.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md: a special token is <[its id]>, which no
regular expression matches; %json is a schema; a [lazy] terminal ends where it first can.
"""

import re
from collections.abc import Mapping
from typing import Any

from services.router.parsing.json_text import text_of

# Templates write JSON so, and models are used to it. Nothing that the client's schema says of it counts.
_JSON: Mapping[str, Any] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
}


class Lark:
    """`special` are the ids of the model's special tokens, by their text."""

    def __init__(self, special: Mapping[str, int]) -> None:
        self._special = special
        self._cuts = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self._rules: dict[str, str] = {}  # names stand by body

    def has(self, token: str) -> bool:
        return token in self._special

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items())])

    def rule(self, body: str, name: str = "r") -> str:
        """Return the rule's name. One that ends in [lazy] or is in capitals says what kind it is of."""
        head, bracket, attributes = name.partition("[")
        key = body if not bracket else body + " "  # a lazy terminal is another one
        numbered = self._rules.setdefault(key, f"{head}{len(self._rules)}{bracket}{attributes}")
        return numbered.partition("[")[0]

    def literal(self, text: str) -> str:
        """Return the text, with special tokens for what is one."""
        pieces, at = [], 0
        for found in self._cuts.finditer(text):
            pieces += [text_of(text[at : found.start()])] if found.start() > at else []
            pieces.append(f"<[{self._special[found.group()]}]>")
            at = found.end()
        pieces += [text_of(text[at:])] if at < len(text) else []
        return " ".join(pieces) or '""'

    def json(self, schema: Any) -> str:
        schema = {} if schema is True else schema
        return self.rule("%json " + text_of({**schema, "x-guidance": _JSON}))

    def text(self, without: tuple[str, ...] = (), begins_without: str = "") -> str:
        """Return a rule for any text of ordinary tokens, also for none, without what is given and with none
        of those characters first."""
        return self.rule(_text_pattern(begins_without) + self._excluding(without), "TEXT")

    def upto(self, end: str, without: tuple[str, ...] = ()) -> str:
        """Return a rule for any text and then the end, which is not in the text."""
        excluding = self._excluding(tuple(each for each in without if each != end))
        first = self._cuts.search(end)
        if first is None:
            return self.rule(f"/(?s:.*){_escaped(end)}/{excluding}", "upto[lazy]")
        # A special token is in no ordinary text, so what stands before it ends there, however often it comes.
        before, behind = end[: first.start()], end[first.start() :]
        return f"{self.rule(f'/(?s:.*){_escaped(before)}/{excluding}', 'TEXT')} {self.literal(behind)}"

    def _excluding(self, texts: tuple[str, ...]) -> str:
        """No ordinary text holds a special token."""
        return "".join(_excluded(each) for each in texts if each and not self._cuts.search(each))


def one_of(*bodies: str) -> str:
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"


def _text_pattern(begins_without: str) -> str:
    return f"/(\\s*[^{re.escape(begins_without)}\\s](?s:.*))?/" if begins_without else "/(?s:.*)/"


def _excluded(text: str) -> str:
    return f" & ~/(?s:.*){_escaped(text)}(?s:.*)/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")  # it is escaped already

"""Calls as the text that a model would have written: the other way round from the readings of a format. Pure.

Some chat templates show tools and no past calls (SmolLM3, LFM2, Granite 3.3, Hunyuan), and some models have a
template that shows them only beside tools (Hermes). There a past call is carried as content.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from services.router.parsing.json_text import text_of


class WrittenCall(Protocol):
    """`arguments`: a JSON object."""

    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


CallText = Callable[[Sequence[WrittenCall]], str]


def _json(call: WrittenCall) -> str:
    return f'{{"name": {text_of(call.name)}, "arguments": {call.arguments}}}'


def _hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n{_json(call)}\n</tool_call>" for call in calls)


def _listed(opens: str, closes: str = "") -> CallText:
    return lambda calls: f"{opens}[{', '.join(map(_json, calls))}]{closes}"


def _lfm2(calls: Sequence[WrittenCall]) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"


def _python(call: WrittenCall) -> str:
    """f(a=1, b="x")"""
    arguments = json.loads(call.arguments).items()
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments)})"


# By the name of the format: those of which a public template shows no past calls.
CALL_TEXTS: Mapping[str, CallText] = {
    "hermes": _hermes,
    "granite": _listed("<|tool_call|>"),
    "tool_calls": _listed("<tool_calls>", "</tool_calls>"),
    "phi4_mini": _listed("functools"),
    "nemotron_nano_v2": _listed("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": _lfm2,
}

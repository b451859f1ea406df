"""The formats of answers that we know, by name, and how a model's chat template tells which it is. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.router.parsing import calls, harmony
from services.router.parsing.marked import CallMarkers, Thinking

HARMONY, TEMPLATE, NONE, AUTO = "harmony", "template", "none", "auto"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """`tells`: a template with all of these writes so. `markers` may be special tokens of the tokenizer; the
    others in a model's answer are no text."""

    name: str
    tells: tuple[str, ...]
    call_markers: CallMarkers
    markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    name: str
    tells: tuple[str, ...]  # any of these
    thinking: Thinking


def _by_name(formats: Iterable[CallFormat]) -> Mapping[str, CallFormat]:
    return {each.name: each for each in formats}


_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_MARKERS = (*_DEEPSEEK, "<｜tool▁sep｜>")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")

# The first that a template tells is the one: those that say more stand before those that say less.
CALL_FORMATS = _by_name(
    [
        CallFormat("minimax_m2", _MINIMAX[:1], CallMarkers(_MINIMAX[:1], calls.minimax), _MINIMAX),
        CallFormat(
            "qwen3_coder",
            ("<function=", "<parameter="),
            CallMarkers((_CALL, "<function="), calls.qwen3_coder),
            (_CALL, _CALL_END),
        ),
        CallFormat(
            "glm45",
            ("<arg_key>", "<arg_value>"),
            CallMarkers((_CALL,), calls.glm),
            (_CALL, _CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        CallFormat("hermes", (_CALL,), CallMarkers((_CALL,), calls.hermes), (_CALL, _CALL_END)),
        CallFormat(
            "deepseek_v3",
            (_DEEPSEEK[0], "```json"),
            CallMarkers(_DEEPSEEK[:1], calls.deepseek_v3),
            _DEEPSEEK_MARKERS,
        ),
        CallFormat(
            "deepseek_v31",
            _DEEPSEEK[:1],
            CallMarkers(_DEEPSEEK[:1], calls.deepseek_v31),
            _DEEPSEEK_MARKERS,
        ),
        CallFormat(
            "mistral",
            ("[TOOL_CALLS]",),
            CallMarkers(("[TOOL_CALLS]",), calls.mistral),
            ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ),
        CallFormat(
            "llama3_json",
            ("<|start_header_id|>", '"parameters"'),
            CallMarkers(("<|python_tag|>",), calls.llama3_json, begins="{"),
            ("<|python_tag|>",),
        ),
    ]
)
THINKING_FORMATS = {
    each.name: each
    for each in (
        ThinkingFormat("think", ("<think>", "</think>"), Thinking("<think>", "</think>")),
        ThinkingFormat("mistral", ("[THINK]",), Thinking("[THINK]", "[/THINK]")),
    )
}
HARMONY_TELLS = (harmony.CHANNEL, harmony.MESSAGE)


def told_calls(chat_template: str) -> str:
    """The name of the format in which the template writes calls; none: we do not know it."""
    if _has_all(chat_template, HARMONY_TELLS):
        return HARMONY
    told = (name for name, each in CALL_FORMATS.items() if _has_all(chat_template, each.tells))
    return next(told, NONE)


def told_thinking(chat_template: str) -> str:
    if _has_all(chat_template, HARMONY_TELLS):
        return HARMONY
    formats = THINKING_FORMATS.items()
    told = (name for name, each in formats if any(sign in chat_template for sign in each.tells))
    return next(told, NONE)


def _has_all(text: str, signs: Iterable[str]) -> bool:
    return all(sign in text for sign in signs)

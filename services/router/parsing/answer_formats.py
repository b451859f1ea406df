"""This module lists the known formats of answers by name, and recognizes a format from a model's chat
template. It is pure."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from services.router.parsing import calls, harmony, tagged
from services.router.parsing.arguments import text_of
from services.router.parsing.listed import (
    FUNCTION_GEMMA,
    GEMMA,
    Literals,
    ReadCall,
    gemma_call,
    json_call,
    keyed_call,
    listed,
    python_call,
)
from services.router.parsing.marked import CallMarkers, Thinking, Wrapping

HARMONY, TEMPLATE, NONE, AUTO = "harmony", "template", "none", "auto"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A template with all of `signs` in it uses this format. `markers` may be special tokens of the
    tokenizer, or contain some; other special tokens in an answer are not text."""

    signs: tuple[str, ...]
    call_markers: CallMarkers
    markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    thinking: Thinking
    signs: tuple[str, ...]  # A template with any of these in it uses this format.
    wrapping: Wrapping

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.thinking.opens, self.thinking.closes, *self.wrapping.opens, *self.wrapping.closes)


def _listed(
    signs: tuple[str, ...],
    opens: tuple[str, ...],
    closes: tuple[str, ...] = (),
    begins: tuple[str, ...] = (),
    leads: tuple[str, ...] = (),
    must_lead: str = "",
    call: ReadCall | None = None,
) -> CallFormat:
    read = partial(listed, closes=closes, leads=leads, must_lead=must_lead, call=call)
    return CallFormat(signs, CallMarkers(opens, read, begins), (*opens, *closes, *leads))


def _gemma(opens: str, closes: str, spoken: Literals) -> CallFormat:
    read = partial(gemma_call, literals=spoken, closes=(closes,))
    return CallFormat((opens,), CallMarkers((opens,), read), (opens, closes, *spoken.quotes))


def _tagged(signs: tuple[str, ...], opens: tuple[str, ...], tags: tagged.Tags, *markers: str) -> CallFormat:
    return CallFormat(signs, CallMarkers(opens, tags.read), markers)


def _dsml(block: str) -> CallFormat:
    """Return the format, which reads both kinds of blocks, whichever the template writes."""
    opens = (*tagged.DSML_OPENS, tagged.DSML.call)
    return _tagged(("｜DSML｜", block), opens, tagged.DSML, "｜DSML｜")


_CALL, _CALL_END = "<tool_call>", "</tool_call>"
_DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
_DEEPSEEK_MARKERS = (*_DEEPSEEK, "<｜tool▁sep｜>")
_KIMI = (
    *(tagged.KIMI_SECTION, tagged.KIMI_CALL, tagged.KIMI_ARGUMENTS),
    *(tagged.KIMI_CALL_ENDS, tagged.KIMI_SECTION_ENDS),
)
_MUSE_FRAME = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
_INTERNLM = ("<|action_start|><|plugin|>", "<|action_start|> <|plugin|>")
_GIGACHAT = ("function call<|role_sep|>", "<|function_call|>")
_MINIMAX = ("<minimax:tool_call>", "</minimax:tool_call>")

# The first format whose signs a template has is used, so formats with more signs come first.
CALL_FORMATS: Mapping[str, CallFormat] = {
    "minimax_m3": CallFormat(
        (tagged.MINIMAX_M3,),
        CallMarkers((tagged.MINIMAX_M3_OPENS,), tagged.minimax_m3),
        (tagged.MINIMAX_M3, _CALL, _CALL_END),
    ),
    "seed_oss": CallFormat(
        (tagged.SEED_OPENS,),
        CallMarkers((tagged.SEED_OPENS, "<function="), tagged.seed),
        (tagged.SEED_OPENS, tagged.SEED_ENDS),
    ),
    "kimi_k2": CallFormat(_KIMI[:2], CallMarkers(_KIMI[:2], tagged.kimi_k2), _KIMI),
    "kimi_k3": _tagged(
        ("<|open|>", "<|close|>", "<|sep|>"),
        (tagged.KIMI_K3_OPENS,),
        tagged.KIMI_K3,
        *("<|open|>", "<|close|>", "<|sep|>"),
    ),
    "deepseek_v32": _dsml("function_calls>"),
    "deepseek_v4": _dsml("tool_calls>"),
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", GEMMA),
    "functiongemma": _gemma("<start_function_call>", "<end_function_call>", FUNCTION_GEMMA),
    "hy3": CallFormat((tagged.HY_OPENS,), CallMarkers((tagged.HY_OPENS,), tagged.hy), tagged.HY_MARKERS),
    "minicpm5": _tagged(("<function name=",), (tagged.MINICPM.call,), tagged.MINICPM),
    "muse": CallFormat(
        (tagged.MUSE_OPENS,),
        CallMarkers((tagged.MUSE_OPENS,), tagged.muse, begins=("to=",)),
        _MUSE_FRAME,
    ),
    "cohere": _listed(("<|START_ACTION|>",), ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
    "apertus": _listed(("<|tools_prefix|>",), ("<|tools_prefix|>",), ("<|tools_suffix|>",), call=keyed_call),
    "internlm2": _listed(("<|action_start|>", "<|plugin|>"), _INTERNLM, ("<|action_end|>",)),
    "gigachat3": _listed(("<|role_sep|>", "<|message_sep|>"), _GIGACHAT),
    "nemotron_nano_v2": _listed(("<TOOLCALL>",), ("<TOOLCALL>",), ("</TOOLCALL>",)),
    "lfm2": _listed(("List of tools: ",), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
    "granite": _listed(("<|tool_call|>",), ("<|tool_call|>", _CALL), (_CALL_END,)),
    "granite_20b_fc": _listed(("<function_call>",), ("<function_call>",)),
    "phi4_mini": _listed(("functools[",), ("functools[",), begins=("{", "[")),
    "llama4": _listed(
        ("<|header_start|>",),
        ("<|python_start|>",),
        ("<|python_end|>",),
        begins=("{", "["),
        leads=("<|python_end|>",),
    ),
    "tool_calls": _listed(("<tool_calls>",), ("<tool_calls>",), ("</tool_calls>",)),
    "minimax_m2": CallFormat(_MINIMAX[:1], CallMarkers(_MINIMAX[:1], calls.minimax), _MINIMAX),
    "qwen3_coder": CallFormat(
        ("<function=", "<parameter="),
        CallMarkers((_CALL, "<function="), calls.qwen3_coder),
        (_CALL, _CALL_END),
    ),
    "glm45": CallFormat(
        ("<arg_key>", "<arg_value>"),
        CallMarkers((_CALL,), calls.glm),
        (_CALL, _CALL_END, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    ),
    "hermes": CallFormat((_CALL,), CallMarkers((_CALL,), calls.hermes), (_CALL, _CALL_END)),
    "deepseek_v3": CallFormat(
        (_DEEPSEEK[0], "```json"),
        CallMarkers(_DEEPSEEK[:1], calls.deepseek_v3),
        _DEEPSEEK_MARKERS,
    ),
    "deepseek_v31": CallFormat(
        _DEEPSEEK[:1],
        CallMarkers(_DEEPSEEK[:1], calls.deepseek_v31),
        _DEEPSEEK_MARKERS,
    ),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        CallMarkers(("[TOOL_CALLS]",), calls.mistral),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "llama3_json": CallFormat(
        ("<|start_header_id|>", '"parameters"'),
        CallMarkers(("<|python_tag|>",), calls.llama3_json, begins=("{",)),
        ("<|python_tag|>",),
    ),
    "command_r": _listed(
        ("Action:", "```json", "<|CHATBOT_TOKEN|>"),
        ("Action:",),
        ("```",),
        must_lead="```json",
    ),
    "pythonic": _listed(("func_name1(",), (), begins=("[",), call=python_call),
    "json_list": _listed(
        ('"arguments": {"arg',),
        (),
        ("```",),
        begins=("[", "```"),
        leads=("```json", "```"),
        call=json_call,
    ),
}


def _thinking(
    opens: str,
    closes: str,
    before: tuple[str, ...] = (),
    behind: tuple[str, ...] = (),
    signs: tuple[str, ...] = (),
) -> ThinkingFormat:
    return ThinkingFormat(Thinking(opens, closes), signs or (opens,), Wrapping(before, behind))


THINKING_FORMATS: Mapping[str, ThinkingFormat] = {
    "seed": _thinking("<seed:think>", "</seed:think>"),
    "minimax_m3": _thinking("<mm:think>", "</mm:think>"),
    "hy3": _thinking("<think:opensource>", "</think:opensource>"),
    "gemma4": _thinking("<|channel>thought", "<channel|>", signs=("<|channel>",)),
    "apertus": _thinking("<|inner_prefix|>", "<|inner_suffix|>"),
    "cohere": _thinking(
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        ("<|START_RESPONSE|>", "<|START_TEXT|>"),
        ("<|END_RESPONSE|>", "<|END_TEXT|>"),
    ),
    "muse": _thinking(
        "to=self<|message|>",
        "<|eom|>",
        ("<|start|>assistant", "to=user<|message|>", "<|message|>"),
        ("<|eom|>", "<|eot|>"),
    ),
    "kimi_k3": _thinking(
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|>",
        ("<|open|>response<|sep|>",),
        ("<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "granite": _thinking("Here is my thought process:", "Here is my response:"),
    "think_answer": _thinking(
        "<think>",
        "</think>",
        ("<answer>", "<response>"),
        ("</answer>", "</response>"),
        signs=("<answer>", "<response></response>", "<|extra_0|>"),
    ),
    "think": _thinking("<think>", "</think>", signs=("<think>", "</think>")),
    "mistral": _thinking("[THINK]", "[/THINK]"),
}
TOOL_PARSERS = (AUTO, NONE, TEMPLATE, HARMONY, *CALL_FORMATS)
REASONING_PARSERS = (AUTO, NONE, TEMPLATE, HARMONY, *THINKING_FORMATS)
HARMONY_SIGNS = (harmony.CHANNEL, harmony.MESSAGE)


def likely_calls(written: str) -> Iterator[str]:
    """Yield the call formats whose signs are all in the template's text, the likeliest first."""
    if _has_all(written, HARMONY_SIGNS):
        yield HARMONY
    yield from (name for name, each in CALL_FORMATS.items() if _has_all(written, each.signs))


def likely_thinking(written: str) -> str:
    if _has_all(written, HARMONY_SIGNS):
        return HARMONY
    formats = THINKING_FORMATS.items()
    found = (name for name, each in formats if any(sign in written for sign in each.signs))
    return next(found, NONE)


def _has_all(text: str, signs: Iterable[str]) -> bool:
    return all(sign in text for sign in signs)


class WrittenCall(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def arguments(self) -> str: ...


CallText = Callable[[Sequence[WrittenCall]], str]


def _written(call: WrittenCall) -> str:
    return f'{{"name": {text_of(call.name)}, "arguments": {call.arguments}}}'


def _written_hermes(calls: Sequence[WrittenCall]) -> str:
    return "\n".join(f"<tool_call>\n{_written(call)}\n</tool_call>" for call in calls)


def _written_list(opens: str, closes: str = "") -> CallText:
    return lambda calls: f"{opens}[{', '.join(map(_written, calls))}]{closes}"


def _written_lfm2(calls: Sequence[WrittenCall]) -> str:
    return f"<|tool_call_start|>[{', '.join(map(_python, calls))}]<|tool_call_end|>"


def _python(call: WrittenCall) -> str:
    arguments = json.loads(call.arguments).items()
    return f"{call.name}({', '.join(f'{key}={value!r}' for key, value in arguments)})"


# These functions write calls as a model of the format would. Some chat templates show tools but no past calls
# (SmolLM3, LFM2, Granite 3.3, Hunyuan), and some models have one that shows past calls only beside tools
# (Hermes); there a past call becomes content.
CALL_TEXTS: Mapping[str, CallText] = {
    "hermes": _written_hermes,
    "granite": _written_list("<|tool_call|>"),
    "tool_calls": _written_list("<tool_calls>", "</tool_calls>"),
    "phi4_mini": _written_list("functools"),
    "nemotron_nano_v2": _written_list("<TOOLCALL>", "</TOOLCALL>"),
    "lfm2": _written_lfm2,
}

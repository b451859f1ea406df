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
from services.router.parsing.marked import NO_WRAPPING, CallMarkers, Thinking, Wrapping

HARMONY, TEMPLATE, NONE, AUTO = "harmony", "template", "none", "auto"


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A template with all of `signs` in it uses this format. `markers` may be special tokens of the
    tokenizer, or contain some; other special tokens in an answer are not text."""

    name: str
    signs: tuple[str, ...]
    call_markers: CallMarkers
    markers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ThinkingFormat:
    name: str
    signs: tuple[str, ...]  # A template with any of these in it uses this format.
    thinking: Thinking
    wrapping: Wrapping = NO_WRAPPING

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.thinking.opens, self.thinking.closes, *self.wrapping.opens, *self.wrapping.closes)


def _by_name(formats: Iterable[CallFormat]) -> Mapping[str, CallFormat]:
    return {each.name: each for each in formats}


def _listed(
    name: str,
    signs: tuple[str, ...],
    opens: tuple[str, ...],
    closes: tuple[str, ...] = (),
    begins: tuple[str, ...] = (),
    leads: tuple[str, ...] = (),
    must_lead: str = "",
    call: ReadCall | None = None,
) -> CallFormat:
    read = partial(listed, closes=closes, leads=leads, must_lead=must_lead, call=call)
    return CallFormat(name, signs, CallMarkers(opens, read, begins), (*opens, *closes, *leads))


def _gemma(name: str, opens: str, closes: str, spoken: Literals) -> CallFormat:
    read = partial(gemma_call, literals=spoken, closes=(closes,))
    return CallFormat(name, (opens,), CallMarkers((opens,), read), (opens, closes, *spoken.quotes))


def _tagged(
    name: str, signs: tuple[str, ...], opens: tuple[str, ...], tags: tagged.Tags, *markers: str
) -> CallFormat:
    return CallFormat(name, signs, CallMarkers(opens, tags.read), markers)


def _dsml(name: str, block: str) -> CallFormat:
    """Return the format, which reads both kinds of blocks, whichever the template writes."""
    opens = (*tagged.DSML_OPENS, tagged.DSML.call)
    return _tagged(name, ("｜DSML｜", block), opens, tagged.DSML, "｜DSML｜")


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
CALL_FORMATS = _by_name(
    [
        CallFormat(
            "minimax_m3",
            (tagged.MINIMAX_M3,),
            CallMarkers((tagged.MINIMAX_M3_OPENS,), tagged.minimax_m3),
            (tagged.MINIMAX_M3, _CALL, _CALL_END),
        ),
        CallFormat(
            "seed_oss",
            (tagged.SEED_OPENS,),
            CallMarkers((tagged.SEED_OPENS, "<function="), tagged.seed),
            (tagged.SEED_OPENS, tagged.SEED_ENDS),
        ),
        CallFormat("kimi_k2", _KIMI[:2], CallMarkers(_KIMI[:2], tagged.kimi_k2), _KIMI),
        _tagged(
            "kimi_k3",
            ("<|open|>", "<|close|>", "<|sep|>"),
            (tagged.KIMI_K3_OPENS,),
            tagged.KIMI_K3,
            *("<|open|>", "<|close|>", "<|sep|>"),
        ),
        _dsml("deepseek_v32", "function_calls>"),
        _dsml("deepseek_v4", "tool_calls>"),
        _gemma("gemma4", "<|tool_call>", "<tool_call|>", GEMMA),
        _gemma("functiongemma", "<start_function_call>", "<end_function_call>", FUNCTION_GEMMA),
        CallFormat("hy3", (tagged.HY_OPENS,), CallMarkers((tagged.HY_OPENS,), tagged.hy), tagged.HY_MARKERS),
        _tagged("minicpm5", ("<function name=",), (tagged.MINICPM.call,), tagged.MINICPM),
        CallFormat(
            "muse",
            (tagged.MUSE_OPENS,),
            CallMarkers((tagged.MUSE_OPENS,), tagged.muse, begins=("to=",)),
            _MUSE_FRAME,
        ),
        _listed("cohere", ("<|START_ACTION|>",), ("<|START_ACTION|>",), ("<|END_ACTION|>",)),
        _listed(
            "apertus", ("<|tools_prefix|>",), ("<|tools_prefix|>",), ("<|tools_suffix|>",), call=keyed_call
        ),
        _listed("internlm2", ("<|action_start|>", "<|plugin|>"), _INTERNLM, ("<|action_end|>",)),
        _listed("gigachat3", ("<|role_sep|>", "<|message_sep|>"), _GIGACHAT),
        _listed("nemotron_nano_v2", ("<TOOLCALL>",), ("<TOOLCALL>",), ("</TOOLCALL>",)),
        _listed("lfm2", ("List of tools: ",), ("<|tool_call_start|>",), ("<|tool_call_end|>",)),
        _listed("granite", ("<|tool_call|>",), ("<|tool_call|>", _CALL), (_CALL_END,)),
        _listed("granite_20b_fc", ("<function_call>",), ("<function_call>",)),
        _listed("phi4_mini", ("functools[",), ("functools[",), begins=("{", "[")),
        _listed(
            "llama4",
            ("<|header_start|>",),
            ("<|python_start|>",),
            ("<|python_end|>",),
            begins=("{", "["),
            leads=("<|python_end|>",),
        ),
        _listed("tool_calls", ("<tool_calls>",), ("<tool_calls>",), ("</tool_calls>",)),
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
            CallMarkers(("<|python_tag|>",), calls.llama3_json, begins=("{",)),
            ("<|python_tag|>",),
        ),
        _listed(
            "command_r",
            ("Action:", "```json", "<|CHATBOT_TOKEN|>"),
            ("Action:",),
            ("```",),
            must_lead="```json",
        ),
        _listed("pythonic", ("func_name1(",), (), begins=("[",), call=python_call),
        _listed(
            "json_list",
            ('"arguments": {"arg',),
            (),
            ("```",),
            begins=("[", "```"),
            leads=("```json", "```"),
            call=json_call,
        ),
    ]
)
THINKING_FORMATS = {
    each.name: each
    for each in (
        ThinkingFormat("seed", ("<seed:think>",), Thinking("<seed:think>", "</seed:think>")),
        ThinkingFormat("minimax_m3", ("<mm:think>",), Thinking("<mm:think>", "</mm:think>")),
        ThinkingFormat("hy3", ("<think:opensource>",), Thinking("<think:opensource>", "</think:opensource>")),
        ThinkingFormat("gemma4", ("<|channel>",), Thinking("<|channel>thought", "<channel|>")),
        ThinkingFormat("apertus", ("<|inner_prefix|>",), Thinking("<|inner_prefix|>", "<|inner_suffix|>")),
        ThinkingFormat(
            "cohere",
            ("<|START_THINKING|>",),
            Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
            Wrapping(("<|START_RESPONSE|>", "<|START_TEXT|>"), ("<|END_RESPONSE|>", "<|END_TEXT|>")),
        ),
        ThinkingFormat(
            "muse",
            ("to=self<|message|>",),
            Thinking("to=self<|message|>", "<|eom|>"),
            Wrapping(("<|start|>assistant", "to=user<|message|>", "<|message|>"), ("<|eom|>", "<|eot|>")),
        ),
        ThinkingFormat(
            "kimi_k3",
            ("<|open|>think<|sep|>",),
            Thinking("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
            Wrapping(("<|open|>response<|sep|>",), ("<|close|>response<|sep|>", "<|close|>message<|sep|>")),
        ),
        ThinkingFormat(
            "granite",
            ("Here is my thought process:",),
            Thinking("Here is my thought process:", "Here is my response:"),
        ),
        ThinkingFormat(
            "think_answer",
            ("<answer>", "<response></response>", "<|extra_0|>"),
            Thinking("<think>", "</think>"),
            Wrapping(("<answer>", "<response>"), ("</answer>", "</response>")),
        ),
        ThinkingFormat("think", ("<think>", "</think>"), Thinking("<think>", "</think>")),
        ThinkingFormat("mistral", ("[THINK]",), Thinking("[THINK]", "[/THINK]")),
    )
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

"""These grammars describe how models write calls: each format's own text around values of the tools' schemas.
The module is pure.

    <tool_call>\\n{"name": "f", "arguments": {the schema of f}}\\n</tool_call>\\n<tool_call>...

calls.py and marked.py read what is described here.

The rules are in llguidance's dialect of Lark, for text with a model's special tokens in it.

https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md: a special token is <[its id]>, which no
regular expression matches; %json is a schema; a [lazy] terminal ends at its first possible end.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.router.parsing.arguments import text_of
from services.router.parsing.tagged import (
    KIMI_ARGUMENTS,
    KIMI_CALL,
    KIMI_CALL_ENDS,
    KIMI_SECTION,
    KIMI_SECTION_ENDS,
)

# Templates write JSON in this way, and models are trained on it. The client's schema cannot change this.
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
        self._rules: dict[str, str] = {}  # The keys are bodies and the values names.

    def has(self, token: str) -> bool:
        return token in self._special

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in self._rules.items())])

    def rule(self, body: str, name: str = "r") -> str:
        """Return the rule's name. A name in capitals, or one with [lazy], makes a terminal."""
        head, bracket, attributes = name.partition("[")
        key = body if not bracket else body + " "  # A lazy terminal differs from others with the same body.
        numbered = self._rules.setdefault(key, f"{head}{len(self._rules)}{bracket}{attributes}")
        return numbered.partition("[")[0]

    def literal(self, text: str) -> str:
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
        """Return a rule for any text of ordinary tokens, which may be empty, without the texts `without` and
        not beginning with one of the characters `begins_without`."""
        return self.rule(_text_pattern(begins_without) + self._excluding(without), "TEXT")

    def upto(self, end: str, without: tuple[str, ...] = ()) -> str:
        """Return a rule for any text and then `end`, which is not in that text."""
        excluding = self._excluding(tuple(each for each in without if each != end))
        first = self._cuts.search(end)
        if first is None:
            return self.rule(f"/(?s:.*){_escaped(end)}/{excluding}", "upto[lazy]")
        # No ordinary text holds a special token, so the text before one ends there, however often the text
        # recurs.
        before, behind = end[: first.start()], end[first.start() :]
        return f"{self.rule(f'/(?s:.*){_escaped(before)}/{excluding}', 'TEXT')} {self.literal(behind)}"

    def _excluding(self, texts: tuple[str, ...]) -> str:
        """Leave out special tokens, as no ordinary text holds one."""
        return "".join(_excluded(each) for each in texts if each and not self._cuts.search(each))


def one_of(*bodies: str) -> str:
    return bodies[0] if len(bodies) == 1 else f"({' | '.join(bodies)})"


def _text_pattern(begins_without: str) -> str:
    return f"/(\\s*[^{re.escape(begins_without)}\\s](?s:.*))?/" if begins_without else "/(?s:.*)/"


def _excluded(text: str) -> str:
    return f" & ~/(?s:.*){_escaped(text)}(?s:.*)/"


def _escaped(text: str) -> str:
    return re.escape(text).replace("/", "\\/").replace("\\\n", "\\n")  # A line end is escaped already.


_WriteCall = Callable[[Lark, str, Any], str]  # The arguments are a tool's name and schema.
_MAX_REFERENCES = 8
_D = "｜DSML｜"
_LINE = r'"\n"?'


@dataclass(frozen=True, slots=True)
class Writing:
    """Calls are `opens`, `head`, a call, `between` before each further one, and `closes`. A parser also takes
    `also` as the opening of calls. With `begins` calls are only at the beginning of an answer, with one of
    these characters first. A model without the special token `needs` uses `older`."""

    call: _WriteCall
    opens: str
    between: str
    closes: str = ""
    also: tuple[str, ...] = ()
    begins: str = ""
    head: str = ""  # This is the body of a rule.
    needs: str = ""
    older: "Writing | None" = None

    def known_to(self, lark: Lark) -> "Writing":
        return self if self.older is None or lark.has(self.needs) else self.older

    def calls(self, lark: Lark, schemas: Mapping[str, Any], parallel: bool) -> str:
        call = one_of(*(self.call(lark, name, schema) for name, schema in schemas.items()))
        any_call = lark.rule(call, "call")
        more = f"({_lined(lark, self.between)} {any_call})*" if parallel else ""
        closes = lark.literal(self.closes) if self.closes else ""
        return _joined(self.head, any_call, more, closes)


def _json(begin: str, end: str = "}") -> _WriteCall:
    """Return a writer of JSON between texts. `begin` has NAME for the tool's name: JSON if in quotes."""
    before, behind = begin.split("NAME")

    def write(lark: Lark, name: str, schema: Any) -> str:
        written = text_of(name)[1:-1] if before.endswith('"') else name
        opens = lark.literal(f"{before}{written}{behind}")
        return _joined(opens, lark.json(schema), lark.literal(end) if end else "")

    return write


def _object(before: str = "", behind: str = "") -> _WriteCall:
    return _json(before + '{"name": "NAME", "arguments": ', "}" + behind)


def _cohere(lark: Lark, name: str, schema: Any) -> str:
    behind = f'", "tool_name": {text_of(name)}, "parameters": '
    begin = lark.literal('{"tool_call_id": "')
    return f"{begin} {_number(lark)} {lark.literal(behind)} {lark.json(schema)} {lark.literal('}')}"


def _kimi(lark: Lark, name: str, schema: Any) -> str:
    begin = f"{lark.literal(f'{KIMI_CALL}functions.{name}:')} {_number(lark)} {lark.literal(KIMI_ARGUMENTS)}"
    return f"{begin} {lark.json(schema)} {lark.literal(KIMI_CALL_ENDS)}"


def _number(lark: Lark) -> str:
    return lark.rule("/[0-9]{1,4}/", "NUMBER")


def _mistral_listed(lark: Lark, name: str, schema: Any) -> str:
    begin = f'{{"name": {text_of(name)}, "arguments": '
    id_ = lark.rule('/, "id": "[a-zA-Z0-9]{9}"/', "ID")
    return f"{lark.literal(begin)} {lark.json(schema)} {id_}? {lark.literal('}')}"


def _qwen3_coder(lark: Lark, name: str, schema: Any, closes: str = "</tool_call>") -> str:
    parameters = _parameters(lark, schema, "<parameter={}>\n", "\n</parameter>\n")
    return _joined(lark.literal(f"\n<function={name}>\n"), parameters, lark.literal(f"</function>\n{closes}"))


def _glm(lark: Lark, name: str, schema: Any) -> str:
    """GLM-4.5 and 4.6 write line ends, and later ones from 4.7 on do not."""
    parameters = _parameters(lark, schema, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>", _LINE)
    return _joined(lark.literal(name), _LINE, parameters, lark.literal("</tool_call>"))


def _minimax(lark: Lark, name: str, schema: Any) -> str:
    parameters = _parameters(lark, schema, '<parameter name="{}">', "</parameter>\n")
    return _joined(lark.literal(f'\n<invoke name="{name}">\n'), parameters, lark.literal("</invoke>"))


def _dsml(lark: Lark, name: str, schema: Any) -> str:
    begin, end = f'\n<{_D}invoke name="{name}">\n', f"</{_D}invoke>"
    tag = f'<{_D}parameter name="{{}}" string="{{text}}">'
    return _joined(
        lark.literal(begin), _parameters(lark, schema, tag, f"</{_D}parameter>\n"), lark.literal(end)
    )


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _lined(lark: Lark, text: str) -> str:
    return f" {_LINE} ".join(map(lark.literal, text.split("\n")))


def _parameters(lark: Lark, schema: Any, begin: str, end: str, behind: str = "") -> str:
    """Return an object's properties in their order, each in its tags and followed by `behind`; strings have
    no quotes."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    parts = []
    for name, property_ in properties.items():
        is_text = _texts(property_, schema, _MAX_REFERENCES) is not None
        before, between = begin.replace("{text}", "true" if is_text else "false").split("{}")
        # The client's names are plain text, even if they look like special tokens.
        ends = _lined(lark, between) if behind else lark.literal(between)
        tag = f"{lark.literal(before)} {text_of(name)} {ends}"
        part = _joined(tag, _value(lark, property_, schema, end), behind)
        parts.append(part if name in required else f"({part})?")
    return " ".join(parts)


def _value(lark: Lark, schema: Any, root: Any, end: str) -> str:
    texts = _texts(schema, root, _MAX_REFERENCES)
    if texts is None:
        own = {key: root[key] for key in ("$defs", "definitions") if key in root}
        return f"{lark.json({**(schema if isinstance(schema, dict) else {}), **own})} {lark.literal(end)}"
    if texts:
        return f"{one_of(*map(text_of, texts))} {lark.literal(end)}"
    return lark.upto(end)


def _texts(schema: Any, root: Any, references: int) -> tuple[str, ...] | None:
    """Return the plain texts that the schema allows, () for any, or None if it is no plain text."""
    if not isinstance(schema, dict):
        return None
    reference = schema.get("$ref")
    if isinstance(reference, str) and references:
        referred = root
        for part in reference.removeprefix("#/").split("/"):
            referred = referred.get(part) if isinstance(referred, dict) else None
        return _texts(referred, root, references - 1)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values and all(isinstance(value, str) for value in values):
        return tuple(values)
    declared = schema.get("type")
    takes_text = declared == "string" or (isinstance(declared, list) and "string" in declared)
    choices = [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]
    if takes_text or any(_texts(choice, root, references) is not None for choice in choices):
        return ()
    return None


_TOOL_CALL, _SEED_CALL = "<tool_call>", "<seed:tool_call>"
_INTERNLM = "<|action_start|><|plugin|>"


def _dsml_block(name: str) -> Writing:
    also = f"<{_D}tool_calls>" if name == "function_calls" else f"<{_D}function_calls>"
    return Writing(_dsml, f"<{_D}{name}>", "", f"\n</{_D}{name}>", also=(also, f"<{_D}invoke"))


def _list(opens: str, closes: str, call: _WriteCall | None = None, also: tuple[str, ...] = ()) -> Writing:
    return Writing(call or _object(), opens, ", ", f"]{closes}", also, head=text_of("["))


WRITINGS: Mapping[str, Writing] = {
    "hermes": Writing(_object("\n", "\n</tool_call>"), _TOOL_CALL, f"\n{_TOOL_CALL}"),
    "qwen3_coder": Writing(_qwen3_coder, _TOOL_CALL, f"\n{_TOOL_CALL}", also=("<function=",)),
    "glm45": Writing(_glm, _TOOL_CALL, f"\n{_TOOL_CALL}"),
    "minimax_m2": Writing(_minimax, "<minimax:tool_call>", "", "\n</minimax:tool_call>"),
    "llama3_json": Writing(
        _json('{"name": "NAME", "parameters": '), "", "; ", also=("<|python_tag|>",), begins="{"
    ),
    "mistral": Writing(
        _json("NAME[ARGS]", ""),
        "[TOOL_CALLS]",
        "[TOOL_CALLS]",
        needs="[ARGS]",
        older=Writing(_mistral_listed, "[TOOL_CALLS]", ", ", "]", head='" "? "["'),
    ),
    "deepseek_v3": Writing(
        _json("<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n", "\n```<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "\n",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v31": Writing(
        _json("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
        "<｜tool▁calls▁begin｜>",
        "",
        "<｜tool▁calls▁end｜>",
    ),
    "deepseek_v32": _dsml_block("function_calls"),
    "deepseek_v4": _dsml_block("tool_calls"),
    "seed_oss": Writing(
        partial(_qwen3_coder, closes="</seed:tool_call>"),
        _SEED_CALL,
        f"\n{_SEED_CALL}",
        also=("<function=",),
    ),
    "kimi_k2": Writing(_kimi, KIMI_SECTION, "", KIMI_SECTION_ENDS, also=(KIMI_CALL,)),
    "cohere": Writing(_cohere, "<|START_ACTION|>", ",\n    ", "\n]<|END_ACTION|>", head=text_of("[\n    ")),
    "apertus": _list("<|tools_prefix|>", "<|tools_suffix|>", _json('{"NAME": ')),
    "nemotron_nano_v2": _list("<TOOLCALL>", "</TOOLCALL>"),
    "tool_calls": _list("<tool_calls>", "</tool_calls>"),
    "granite": _list("<|tool_call|>", "", also=(_TOOL_CALL,)),
    "json_list": Writing(_object(), "", ", ", "]", begins="[`", head=text_of("[")),
    "phi4_mini": Writing(_object(), "functools[", ", ", "]", begins="[{"),
    "internlm2": Writing(
        _object("\n", "<|action_end|>"),
        _INTERNLM,
        _INTERNLM,
        also=("<|action_start|> <|plugin|>",),
    ),
    "granite_20b_fc": Writing(_object(" "), "<function_call>", "\n<function_call>"),
}

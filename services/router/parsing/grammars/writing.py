"""How models write calls, as grammars: each format's own words around what the tools' schemas allow. Pure.

    <tool_call>\\n{"name": "f", "arguments": {the schema of f}}\\n</tool_call>\\n<tool_call>...

What is read by calls.py and marked.py is written here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from services.router.parsing.grammars.lark import Lark, one_of
from services.router.parsing.json_text import text_of

_WriteCall = Callable[[Lark, str, Any], str]  # of a tool's name and schema
_MAX_REFERENCES = 8


@dataclass(frozen=True, slots=True)
class Writing:
    """Calls are `opens`, a call, `between` before each further one, and `closes`. To those who read, `also`
    opens calls, too. `begins`: with what they begin where an answer does, and nothing else opens them."""

    call: _WriteCall
    opens: str
    between: str
    closes: str = ""
    also: tuple[str, ...] = ()
    begins: str = ""

    def calls(self, lark: Lark, schemas: Mapping[str, Any], parallel: bool) -> str:
        """Behind `opens`. At least one."""
        call = one_of(*(self.call(lark, name, schema) for name, schema in schemas.items()))
        any_call = lark.rule(call, "call")
        more = f" ({lark.literal(self.between)} {any_call})*" if parallel else ""
        closes = f" {lark.literal(self.closes)}" if self.closes else ""
        return f"{any_call}{more}{closes}"


def _hermes(lark: Lark, name: str, schema: Any) -> str:
    begin = f'\n{{"name": {text_of(name)}, "arguments": '
    return f"{lark.literal(begin)} {lark.json(schema)} {lark.literal('}' + chr(10) + '</tool_call>')}"


def _llama3(lark: Lark, name: str, schema: Any) -> str:
    begin = f'{{"name": {text_of(name)}, "parameters": '
    return f"{lark.literal(begin)} {lark.json(schema)} {lark.literal('}')}"


def _mistral(lark: Lark, name: str, schema: Any) -> str:
    return f"{lark.literal(f'{name}[ARGS]')} {lark.json(schema)}"


def _deepseek_v3(lark: Lark, name: str, schema: Any) -> str:
    begin = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n"
    return f"{lark.literal(begin)} {lark.json(schema)} {lark.literal(chr(10) + '```<｜tool▁call▁end｜>')}"


def _deepseek_v31(lark: Lark, name: str, schema: Any) -> str:
    begin = f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>"
    return f"{lark.literal(begin)} {lark.json(schema)} {lark.literal('<｜tool▁call▁end｜>')}"


def _qwen3_coder(lark: Lark, name: str, schema: Any) -> str:
    parameters = _parameters(lark, schema, "<parameter={}>\n", "\n</parameter>\n")
    return _joined(
        lark.literal(f"\n<function={name}>\n"), parameters, lark.literal("</function>\n</tool_call>")
    )


def _glm(lark: Lark, name: str, schema: Any) -> str:
    parameters = _parameters(lark, schema, "<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n")
    return _joined(lark.literal(f"{name}\n"), parameters, lark.literal("</tool_call>"))


def _minimax(lark: Lark, name: str, schema: Any) -> str:
    parameters = _parameters(lark, schema, '<parameter name="{}">', "</parameter>\n")
    return _joined(lark.literal(f'\n<invoke name="{name}">\n'), parameters, lark.literal("</invoke>"))


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _parameters(lark: Lark, schema: Any, begin: str, end: str) -> str:
    """An object's properties in their order, each in its tags; strings stand there as they are."""
    properties, required = schema.get("properties") or {}, schema.get("required") or ()
    parts = []
    for name, property_ in properties.items():
        before, behind = begin.split("{}")
        # What is the client's is plain text, whatever it looks like.
        tag = f"{lark.literal(before)} {text_of(name)} {lark.literal(behind)}"
        part = f"{tag} {_value(lark, property_, schema, end)}"
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
    """None: what the schema allows is no plain text. Empty: it allows any."""
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


_TOOL_CALL = "<tool_call>"
WRITINGS: Mapping[str, Writing] = {
    "hermes": Writing(_hermes, _TOOL_CALL, f"\n{_TOOL_CALL}"),
    "qwen3_coder": Writing(_qwen3_coder, _TOOL_CALL, f"\n{_TOOL_CALL}", also=("<function=",)),
    "glm45": Writing(_glm, _TOOL_CALL, f"\n{_TOOL_CALL}"),
    "minimax_m2": Writing(_minimax, "<minimax:tool_call>", "", "\n</minimax:tool_call>"),
    "llama3_json": Writing(_llama3, "", "; ", also=("<|python_tag|>",), begins="{"),
    "mistral": Writing(_mistral, "[TOOL_CALLS]", "[TOOL_CALLS]"),
    "deepseek_v3": Writing(_deepseek_v3, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": Writing(_deepseek_v31, "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜>"),
}

"""How models write an answer, as their chat templates do; and what our parsers make of a text."""

import json
from dataclasses import dataclass, field

from services.router.parsing.choice import ParserChoice


@dataclass(frozen=True)
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict], ...] = field(default=())


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value) -> str:
    """As templates write an argument where it stands as text."""
    return value if isinstance(value, str) else dumps(value)


def think(answer, opens="<think>\n", closes="\n</think>\n\n"):
    return opens + answer.reasoning + closes if answer.reasoning else ""


def hermes(answer):
    calls = [dumps({"name": name, "arguments": arguments}) for name, arguments in answer.calls]
    return think(answer) + answer.content + "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def qwen3_coder(answer):
    def call(name, arguments):
        given = (f"<parameter={key}>\n{plain(value)}\n</parameter>\n" for key, value in arguments.items())
        return f"<tool_call>\n<function={name}>\n{''.join(given)}</function>\n</tool_call>"

    return think(answer) + answer.content + "\n".join(call(*each) for each in answer.calls)


def glm45(answer):
    def call(name, arguments):
        given = (
            f"<arg_key>{key}</arg_key>\n<arg_value>{plain(value)}</arg_value>\n"
            for key, value in arguments.items()
        )
        return f"\n<tool_call>{name}\n{''.join(given)}</tool_call>"

    return think(answer, "\n<think>", "</think>\n") + answer.content + "".join(call(*c) for c in answer.calls)


def minimax_m2(answer):
    def call(name, arguments):
        given = (f'<parameter name="{k}">{plain(value)}</parameter>\n' for k, value in arguments.items())
        return f'<invoke name="{name}">\n{"".join(given)}</invoke>\n'

    calls = "".join(call(*each) for each in answer.calls)
    wrapped = f"\n<minimax:tool_call>\n{calls}</minimax:tool_call>" if calls else ""
    return think(answer) + answer.content + wrapped


def llama3_json(answer):
    """Either content or calls."""
    calls = (dumps({"name": name, "parameters": arguments}) for name, arguments in answer.calls)
    return "; ".join(calls) if answer.calls else answer.content


def mistral(answer):
    calls = "".join(f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}" for name, arguments in answer.calls)
    return think(answer, "[THINK]", "[/THINK]") + answer.content + calls


def mistral_old(answer):
    listed = dumps([{"name": name, "arguments": arguments} for name, arguments in answer.calls])
    calls = f"[TOOL_CALLS] {listed}" if answer.calls else ""
    return think(answer, "[THINK]", "[/THINK]") + answer.content + calls


def deepseek_v3(answer):
    def call(name, arguments):
        given = f"```json\n{dumps(arguments)}\n```"
        return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n{given}<｜tool▁call▁end｜>"

    return _deepseek(answer, "\n".join(call(*each) for each in answer.calls))


def deepseek_v31(answer):
    def call(name, arguments):
        return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"

    return _deepseek(answer, "".join(call(*each) for each in answer.calls))


def _deepseek(answer, calls):
    wrapped = f"<｜tool▁calls▁begin｜>{calls}<｜tool▁calls▁end｜>" if calls else ""
    return think(answer) + answer.content + wrapped


def harmony(answer):
    messages = []
    if answer.reasoning:
        messages.append(f"<|channel|>analysis<|message|>{answer.reasoning}")
    if answer.content:
        messages.append(f"<|channel|>final<|message|>{answer.content}")
    for name, arguments in answer.calls:
        header = f"<|channel|>commentary to=functions.{name} <|constrain|>json"
        messages.append(f"{header}<|message|>{dumps(arguments)}")
    return "<|end|><|start|>assistant".join(messages)  # the last one's end is a stop token


def own(answer):
    """A tokenizer's response_template, OWN."""
    calls = (f"<call>{dumps({'name': name, 'arguments': given})}</call>" for name, given in answer.calls)
    return think(answer, "<t>", "</t>") + answer.content + "".join(calls)


OWN = {
    "start_anchor": "<assistant>",
    "fields": {
        "thinking": {"open": "<t>", "close": "</t>"},
        "tool_calls": {
            "open_pattern": r"<ca[l]l>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"optional": False},
    },
}
# By the name of the tool parser: who writes so, and the reasoning parser that goes with it.
WRITERS = [
    ("hermes", hermes, "think"),
    ("qwen3_coder", qwen3_coder, "think"),
    ("glm45", glm45, "think"),
    ("minimax_m2", minimax_m2, "think"),
    ("llama3_json", llama3_json, "none"),
    ("mistral", mistral, "mistral"),
    ("mistral", mistral_old, "mistral"),
    ("deepseek_v3", deepseek_v3, "think"),
    ("deepseek_v31", deepseek_v31, "think"),
    ("harmony", harmony, "harmony"),
    ("template", own, "template"),
]
# Those whose markers, once they open a call, tell plain arguments from their end by nothing but a tag.
PLAIN = ("qwen3_coder", "glm45", "minimax_m2")


@dataclass(frozen=True)
class Read:
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    broken: int = 0


def joined(pieces):
    """What a client makes of them: names and arguments. Only the last piece of a call ends it."""
    calls, ended = [], True
    for piece in pieces:
        if piece.name:
            calls.append((piece.name, piece.arguments))
        else:
            assert not ended
            calls[-1] = (calls[-1][0], calls[-1][1] + piece.arguments)
        ended = piece.ends
    return calls


def read(choice: ParserChoice, pieces, schemas=None, prompt_end="") -> Read:
    parser = choice.parser(schemas if schemas is not None else {}, prompt_end)
    parts = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return Read(
        "".join(part.content for part in parts),
        "".join(part.reasoning for part in parts),
        tuple(joined(call for part in parts for call in part.calls)),
        sum(part.broken for part in parts),
    )

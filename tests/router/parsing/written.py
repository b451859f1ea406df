"""Models write answers as their chat templates do, and our parsers make something of a text."""

import json
from dataclasses import dataclass, field

from services.router.parsing.parser_choice import ParserChoice, choose


@dataclass(frozen=True)
class Answer:
    content: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, dict], ...] = field(default=())


def dumps(value) -> str:
    return json.dumps(value, ensure_ascii=False)


def plain(value) -> str:
    """Write an argument as templates do where it stands as text."""
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
    """An answer is either content or calls."""
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


def listed(opens, closes, name="name", arguments="arguments"):
    """Write calls in one list of JSON objects."""

    def write(answer):
        calls = dumps([{name: called, arguments: given} for called, given in answer.calls])
        return think(answer) + answer.content + (opens + calls + closes if answer.calls else "")

    return write


def cohere(answer):
    written = listed("<|START_ACTION|>", "<|END_ACTION|>", "tool_name", "parameters")(
        Answer(calls=answer.calls)
    )
    content = f"<|START_RESPONSE|>{answer.content}<|END_RESPONSE|>" if answer.content else ""
    return think(answer, "<|START_THINKING|>", "<|END_THINKING|>") + content + written


def apertus(answer):
    calls = dumps([{name: arguments} for name, arguments in answer.calls])
    wrapped = f"<|tools_prefix|>{calls}<|tools_suffix|>" if answer.calls else ""
    return think(answer, "<|inner_prefix|>", "<|inner_suffix|>") + answer.content + wrapped


def lfm2(answer):
    """Write calls as Python has them, strings in its own quotes."""
    calls = (
        f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
        for name, arguments in answer.calls
    )
    wrapped = f"<|tool_call_start|>[{', '.join(calls)}]<|tool_call_end|>" if answer.calls else ""
    return think(answer) + answer.content + wrapped


def gemma4(answer):
    def value(given):
        return f'<|"|>{given}<|"|>' if isinstance(given, str) else dumps(given)

    def call(name, arguments):
        given = ",".join(f"{key}:{value(given)}" for key, given in arguments.items())
        return f"<|tool_call>call:{name}{{{given}}}<tool_call|>"

    thought = think(answer, "<|channel>thought\n", "\n<channel|>")
    return thought + answer.content + "".join(call(*each) for each in answer.calls)


def kimi_k2(answer):
    calls = "".join(
        f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>{dumps(given)}<|tool_call_end|>"
        for index, (name, given) in enumerate(answer.calls)
    )
    wrapped = f"<|tool_calls_section_begin|>{calls}<|tool_calls_section_end|>" if calls else ""
    return think(answer) + answer.content + wrapped


def kimi_k3(answer):
    def part(name, text, attributes=""):
        return f"<|open|>{name}{attributes}<|sep|>{text}<|close|>{name}<|sep|>"

    def argument(key, value):
        kind = "string" if isinstance(value, str) else "number"
        return part("argument", plain(value), f' key="{key}" type="{kind}"')

    calls = "".join(
        part("call", "".join(argument(*each) for each in given.items()), f' tool="{name}" index="{index}"')
        for index, (name, given) in enumerate(answer.calls, 1)
    )
    return (
        (part("think", answer.reasoning) if answer.reasoning else "")
        + (part("response", answer.content) if answer.content else "")
        + (part("tools", calls) if calls else "<|close|>message<|sep|>")
    )


def deepseek_v32(answer):
    def parameter(key, value):
        is_text = "true" if isinstance(value, str) else "false"
        return f'<｜DSML｜parameter name="{key}" string="{is_text}">{plain(value)}</｜DSML｜parameter>\n'

    def call(name, arguments):
        given = "".join(parameter(*each) for each in arguments.items())
        return f'<｜DSML｜invoke name="{name}">\n{given}</｜DSML｜invoke>\n'

    calls = "".join(call(*each) for each in answer.calls)
    wrapped = f"\n\n<｜DSML｜function_calls>\n{calls}</｜DSML｜function_calls>" if calls else ""
    return think(answer) + answer.content + wrapped


def seed_oss(answer):
    written = qwen3_coder(Answer(calls=answer.calls))
    written = written.replace("<tool_call>", "<seed:tool_call>").replace("</tool_call>", "</seed:tool_call>")
    return think(answer, "<seed:think>", "</seed:think>") + answer.content + written


def hy3(answer):
    def tag(name, text):
        return f"<{name}:opensource>{text}</{name}:opensource>\n"

    def call(name, arguments):
        given = (tag("arg_key", key) + tag("arg_value", plain(value)) for key, value in arguments.items())
        return tag("tool_call", f"{name}<tool_sep:opensource>\n{''.join(given)}")

    calls = "".join(call(*each) for each in answer.calls)
    thought = think(answer, "<think:opensource>", "</think:opensource>")
    return thought + answer.content + (tag("tool_calls", "\n" + calls) if calls else "")


def muse(answer):
    """The prompt ends with the first <|start|>assistant."""

    def parameter(key, value):
        return f'<atem:parameter name="{key}">{plain(value)}</atem:parameter>\n'

    def call(name, arguments):
        given = "".join(parameter(*each) for each in arguments.items())
        invoke = f'<atem:invoke name="{name}">\n{given}</atem:invoke>'
        return f" to={name}<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>"

    messages = [
        *([f" to=self<|message|>{answer.reasoning}"] if answer.reasoning else []),
        *([f"<|message|>{answer.content}"] if answer.content else []),
        *(call(*each) for each in answer.calls),
    ]
    return "<|eom|><|start|>assistant".join(messages)


def minimax_m3(answer):
    space = "]<]minimax[>["

    def value(given):
        return "".join(tag("item", each) for each in given) if isinstance(given, list) else plain(given)

    def tag(name, given):
        return f"{space}<{name}>{value(given)}{space}</{name}>"

    calls = "".join(
        f'{space}<invoke name="{name}">{"".join(tag(*each) for each in given.items())}{space}</invoke>\n'
        for name, given in answer.calls
    )
    wrapped = f"{space}<tool_call>\n{calls}{space}</tool_call>" if calls else ""
    return think(answer, "<mm:think>", "</mm:think>") + answer.content + wrapped


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
    """Write as a tokenizer's response_template, OWN, says."""
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
    ("tool_calls", listed("<tool_calls>", "</tool_calls>"), "think"),
    ("cohere", cohere, "cohere"),
    ("apertus", apertus, "apertus"),
    ("lfm2", lfm2, "think"),
    ("gemma4", gemma4, "gemma4"),
    ("kimi_k2", kimi_k2, "think"),
    ("kimi_k3", kimi_k3, "kimi_k3"),
    ("deepseek_v32", deepseek_v32, "think"),
    ("seed_oss", seed_oss, "seed"),
    ("hy3", hy3, "hy3"),
    ("minimax_m3", minimax_m3, "minimax_m3"),
    ("muse", muse, "muse"),
    ("harmony", harmony, "harmony"),
    ("template", own, "template"),
]
# Those whose markers, once they open a call, tell plain arguments from their end by nothing but a tag.
_TAGGED = ("gemma4", "kimi_k3", "deepseek_v32", "seed_oss", "hy3", "minimax_m3", "muse")
PLAIN = ("qwen3_coder", "glm45", "minimax_m2", *_TAGGED)
# Those whose calls come as wholes.
WHOLE = ("template", "lfm2", "gemma4")


@dataclass(frozen=True)
class Read:
    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]
    broken: int = 0


def joined(pieces):
    """Return what a client makes of them: names and arguments. Only the last piece of a call ends it."""
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


SCHEMAS = {name: {"type": "object"} for name in ("f", "get_weather", "mcp.server-tool", "g2")}


TYPED = {"f": {"properties": {"text": {"type": "string"}, "days": {"type": "integer"}}}}
DECLARED = {"f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "t": {"type": "string"}}}}


def choice_of(name, reasoning):
    return choose(name, reasoning, "", OWN if name == "template" else None)

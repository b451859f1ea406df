"""This module has the chat templates of made models, their markers, and the texts that such models like to
write.

plain     roles and contents
tools     also tools, calls and results, in the words of Hermes' template
thinking  like tools, and each answer begins within thinking, unless enable_thinking is false
"""

from collections.abc import Mapping
from dataclasses import dataclass

EOS, OPEN, CLOSE = "␄", "⟦", "⟧"


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    text: str
    markers: tuple[str, ...] = ()
    likings: Mapping[str, float] | None = None  # These logits by token make an answer's parts end soon.


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' ~ message.role) }}"
    "{% endif %}"
    f"{OPEN}{{{{ message.role }}}}:{{{{ message.content or '' }}}}{CLOSE}"
    "{% endfor %}"
    f"{{% if add_generation_prompt %}}{OPEN}assistant:{{% endif %}}"
)


def _with_tools(past_thinking: str = "", begun_thinking: str = "") -> str:
    return (
        f"{{% if tools %}}{OPEN}system:Tools:\n"
        "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
        f"Call them by <tool_call>{CLOSE}{{% endif %}}"
        "{% for message in messages %}"
        f"{OPEN}{{{{ message.role }}}}:{past_thinking}{{{{ message.content or '' }}}}"
        "{% for call in message.tool_calls or [] %}"
        "{{ '\n' if message.content or not loop.first else '' }}"
        '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": '
        "{{ call.function.arguments | tojson }}}\n"
        "</tool_call>"
        "{% endfor %}"
        f"{CLOSE}"
        "{% endfor %}"
        f"{{% if add_generation_prompt %}}{OPEN}assistant:{begun_thinking}{{% endif %}}"
    )


_THINKING = _with_tools(
    "{% if message.reasoning_content %}<think>\n{{ message.reasoning_content }}\n</think>\n\n{% endif %}",
    "<think>\n{{ '\n</think>\n\n' if enable_thinking is defined and not enable_thinking else '' }}",
)
_CALL_MARKERS = ("<tool_call>", "</tool_call>")
_LIKINGS = {'"': 7.0, "}": 3.0, "]": 3.0, EOS: 5.0}

CHAT_TEMPLATES = {
    "plain": ChatTemplate(CHAT_TEMPLATE),
    "tools": ChatTemplate(_with_tools(), _CALL_MARKERS, _LIKINGS),
    "thinking": ChatTemplate(
        _THINKING, (*_CALL_MARKERS, "<think>", "</think>"), {**_LIKINGS, "</think>": 6.0}
    ),
}

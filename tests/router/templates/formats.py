"""Families of models are talked to and answer so: each has a chat template, condensed and in our own words,
and the text that such a model writes. A tokenizer for them all is trained here, on the templates themselves.

    template    what each does with thinking, results and calls is said in its first line
    write       what the model generates after the generation prompt, its end included
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as BackendTokenizer
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
VOCAB_SIZE = 480


@dataclass(frozen=True)
class Call:
    name: str
    arguments: Mapping[str, object]

    def dumps(self, **how: object) -> str:
        return json.dumps(self.arguments, ensure_ascii=False, **how)


@dataclass(frozen=True)
class Said:
    """An answer, as its parser should tell it apart."""

    content: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()


@dataclass(frozen=True)
class Format:
    """`end`: of an answer, of one that calls tools where that differs. `special` tokens, with blanks between,
    leave no trace in clean text; `markers` do. `thinks`: it writes Said.reasoning.
    `parallel`: several calls in an answer. `own_ids`: the model's calls have ids.
    """

    name: str
    write: Callable[[Said], str]
    end: str
    special: str
    markers: str = ""
    end_of_calls: str = ""
    eos: str = ""
    bos: str = ""
    thinks: bool = False
    parallel: bool = True
    own_ids: bool = False

    @property
    def template(self) -> str:
        return (HERE / f"{self.name}.jinja").read_text(encoding="utf-8")

    def written(self, said: Said) -> str:
        """Return all that the model generates."""
        return self.write(said) + ((said.calls and self.end_of_calls) or self.end)

    def save(self, directory: Path) -> Path:
        """Save a model's directory with the tokenizer and its template."""
        backend = _tokenizer()
        backend.add_special_tokens([AddedToken(text, special=True) for text in self.special.split()])
        backend.add_tokens([AddedToken(text, special=False) for text in self.markers.split()])
        fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=self.end)
        if self.bos:
            fast.bos_token = self.bos
        fast.chat_template = self.template
        fast.save_pretrained(directory)
        eos = [fast.convert_tokens_to_ids(text) for text in (self.eos or self.end).split()]
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        (directory / "config.json").write_text(json.dumps({"vocab_size": 512}))
        return directory


def _tokenizer() -> BackendTokenizer:
    return BackendTokenizer.from_str(_trained())


@cache
def _trained() -> str:
    """Train byte-level BPE with merges, so that text which is cut otherwise has other ids."""
    backend = BackendTokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, show_progress=False)
    texts = [path.read_text(encoding="utf-8") for path in sorted(HERE.glob("*.jinja"))]
    backend.train_from_iterator(texts, trainer)
    return backend.to_str()


def _thought(said: Said, begin: str, end: str) -> str:
    return begin + said.reasoning + end if said.reasoning else ""


def _hermes(said: Said) -> str:
    calls = [
        f'<tool_call>\n{{"name": "{call.name}", "arguments": {call.dumps()}}}\n</tool_call>'
        for call in said.calls
    ]
    return _thought(said, "<think>\n", "\n</think>\n\n") + "\n".join([*filter(None, [said.content]), *calls])


def _value(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _elements(call: Call, parameter: str) -> str:
    return "".join(parameter.format(key, _value(value)) for key, value in call.arguments.items())


def _qwen3_coder(said: Said) -> str:
    parameter = "<parameter={}>\n{}\n</parameter>\n"
    calls = [
        f"<tool_call>\n<function={call.name}>\n{_elements(call, parameter)}</function>\n</tool_call>"
        for call in said.calls
    ]
    return "\n".join([*filter(None, [said.content and said.content + "\n" * bool(calls)]), *calls])


def _llama3(said: Said) -> str:
    calls = [f'{{"name": "{call.name}", "parameters": {call.dumps()}}}' for call in said.calls]
    return calls[0] if calls else said.content


def _mistral(said: Said) -> str:
    return said.content + "".join(f"[TOOL_CALLS]{call.name}[ARGS]{call.dumps()}" for call in said.calls)


def own_id(call: Call, index: int) -> str:
    """Return the id of the index-th call of an answer, as models with ids write one."""
    return hashlib.sha256(f"{index}{call.dumps()}".encode()).hexdigest()[:9]


def _mistral_small(said: Said) -> str:
    calls = [
        f"[TOOL_CALLS]{call.name}[CALL_ID]{own_id(call, index)}[ARGS]{call.dumps()}"
        for index, call in enumerate(said.calls)
    ]
    return said.content + "".join(calls)


def _mistral_nemo(said: Said) -> str:
    calls = [
        f'{{"name": "{call.name}", "arguments": {call.dumps()}, "id": "{own_id(call, index)}"}}'
        for index, call in enumerate(said.calls)
    ]
    return said.content + (f"[TOOL_CALLS][{', '.join(calls)}]" if calls else "")


def _deepseek(said: Said) -> str:
    """It writes no thinking, as its calls have none."""
    calls = [
        f"<｜tool▁call▁begin｜>{call.name}<｜tool▁sep｜>{call.dumps()}<｜tool▁call▁end｜>"
        for call in said.calls
    ]
    wrapped = f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>" if calls else ""
    return said.content + wrapped


def _gpt_oss(said: Said) -> str:
    """Content beside a call is a commentary's. The generation prompt has the first <|start|>assistant."""
    parts = []
    if said.reasoning:
        parts.append(f"<|channel|>analysis<|message|>{said.reasoning}<|end|>")
    if said.content and said.calls:
        parts.append(f"<|channel|>commentary<|message|>{said.content}<|end|>")
    if not said.calls:
        parts.append(f"<|channel|>final<|message|>{said.content}")
    for call in said.calls:
        to = f"to=functions.{call.name} <|constrain|>json"
        parts.append(f"<|channel|>commentary {to}<|message|>{call.dumps()}")
    return "<|start|>assistant".join(parts)


def _glm(said: Said) -> str:
    parameter = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    calls = [f"\n<tool_call>{call.name}\n{_elements(call, parameter)}</tool_call>" for call in said.calls]
    content = "\n" + said.content if said.content else ""
    return f"\n<think>{said.reasoning}</think>{content}{''.join(calls)}"


def _minimax(said: Said) -> str:
    """The generation prompt has <think>."""
    parameter = '<parameter name="{}">{}</parameter>\n'
    calls = [f'<invoke name="{call.name}">\n{_elements(call, parameter)}</invoke>\n' for call in said.calls]
    wrapped = f"\n<minimax:tool_call>\n{''.join(calls)}</minimax:tool_call>" if calls else ""
    return f"{said.reasoning}\n</think>\n\n{said.content}{wrapped}"


_TOOL_CALL = "<tool_call> </tool_call> <tool_response> </tool_response>"
_THINK = "<think> </think>"

_MISTRAL = (
    "<s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
    "[TOOL_CALLS] [CALL_ID] [ARGS] [TOOL_RESULTS] [TOOL_CONTENT] [/TOOL_RESULTS]"
)

_ALL = (
    Format(
        "qwen3",
        _hermes,
        end="<|im_end|>",
        special="<|im_start|> <|im_end|>",
        markers=f"{_TOOL_CALL} {_THINK}",
        thinks=True,
    ),
    Format(
        "qwen3_coder",
        _qwen3_coder,
        end="<|im_end|>",
        special="<|im_start|> <|im_end|>",
        markers=_TOOL_CALL,
    ),
    Format(
        "llama3",
        _llama3,
        end="<|eot_id|>",
        special="<|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <|python_tag|>",
        bos="<|begin_of_text|>",
        parallel=False,
    ),
    Format("mistral", _mistral, end="</s>", special=_MISTRAL, bos="<s>"),
    Format("mistral_small", _mistral_small, end="</s>", special=_MISTRAL, bos="<s>", own_ids=True),
    Format("mistral_nemo", _mistral_nemo, end="</s>", special=_MISTRAL, bos="<s>", own_ids=True),
    Format(
        "deepseek",
        _deepseek,
        end="<｜end▁of▁sentence｜>",
        special="<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜> <｜tool▁sep｜> "
        "<｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜> "
        "<｜tool▁output▁begin｜> <｜tool▁output▁end｜>",
        markers=_THINK,
        bos="<｜begin▁of▁sentence｜>",
    ),
    Format(
        "gpt_oss",
        _gpt_oss,
        end="<|return|>",
        special="<|start|> <|end|> <|message|> <|channel|> <|constrain|> <|return|> <|call|>",
        end_of_calls="<|call|>",
        eos="<|return|> <|call|>",
        thinks=True,
        parallel=False,
    ),
    Format(
        "glm",
        _glm,
        end="<|user|>",
        special="[gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>",
        markers=f"{_TOOL_CALL} {_THINK} <arg_key> </arg_key> <arg_value> </arg_value>",
        end_of_calls="<|observation|>",
        eos="<|user|> <|observation|>",
        thinks=True,
    ),
    Format(
        "minimax",
        _minimax,
        end="[e~[",
        special="]~!b[ ]~b] [e~[",
        markers=f"{_THINK} <minimax:tool_call> </minimax:tool_call>",
        thinks=True,
    ),
)
FORMATS = {each.name: each for each in _ALL if not each.own_ids}
LOOP_FORMATS = {each.name: each for each in _ALL}  # those whose calls have ids differ in nothing but loops

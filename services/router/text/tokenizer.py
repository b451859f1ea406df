"""This module loads transformers' tokenizers: text, ids, the chat template, end-of-sequence ids."""

import html
import inspect
import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jinja2 import TemplateSyntaxError

from services.model.model_config import context_tokens
from services.model.tokenizer_json import bytes_of_piece
from services.router.text.answer_ends import EndOfSequence, find_end_of_sequence
from services.router.text.answer_message import AnswerCall, CallText
from services.router.text.chat_turns import ChatTurns, Turn, with_text
from services.router.text.control_tokens import ControlTokens
from services.router.text.detokenizer import Pieces, pieces_of
from services.router.text.template_turns import EXAMPLE_TOOL, Message, TemplateTurns
from services.router.text.turn_order import arrange
from services.settings.tokenizer_file import tokenizer_of_file
from services.values.errors import ConfigError, InvalidRequest

log = logging.getLogger(__name__)

# Transformers passes these to the template, beside the arguments of the call.
_OF_TEMPLATES = frozenset({"self", "conversations", "messages"})
_NOT_CONTINUED = (
    "cannot be heeded: the model's chat template does not show the last message's content as it is"
)
SHOWS_NO_TOOLS = (
    "cannot be used: the model's chat template shows no tools; a model is needed that was trained "
    "with them, or a template that shows them (--chat-template)"
)
_NAMES_DEVELOPERS = re.compile(r"""["']developer["']""")


class Tokenizer:
    """This is the tokenizer in a model's directory. Nothing is ever downloaded.

    `chat_template` is a file with a template instead of the model's own. With `reads_controls`, a control
    token in a message's text is read as such.

    An id is *silent* when it has no text: a special token, or an id that the tokenizer lacks.

    Raises ConfigError where the directory, its tokenizer, one of its config files or the template cannot be
    read.
    """

    def __init__(self, model_path: str, chat_template: str = "", *, reads_controls: bool = False) -> None:
        directory = Path(model_path)
        self._backend = _load_backend(directory)
        if chat_template:
            _set_template(self._backend, Path(chat_template))
        configs = {name: _read_json(directory / name) for name in ("generation_config.json", "config.json")}
        self._generation_config = configs["generation_config.json"]
        self._end_of_sequence = find_end_of_sequence(configs, self._backend.eos_token_id)
        self._eos_token_ids = self._end_of_sequence.token_ids
        self._vocab_size = _stated_vocab_size(configs["config.json"]) or len(self._backend)
        self._context_tokens = _stated_context(configs["config.json"])
        self._is_audible = _audible_ids(self._backend)
        self._reserved = _OF_TEMPLATES.union(inspect.signature(self._backend.apply_chat_template).parameters)
        self._special_tokens = MappingProxyType(_special_tokens(self._backend))
        self._all_pieces = pieces_of(self._backend.backend_tokenizer) if self._backend.is_fast else None
        self._pieces = self._all_pieces and self._all_pieces.without(self._special_tokens)
        self._controls = None if reads_controls else _control_tokens(self._backend)
        developers = _NAMES_DEVELOPERS.search(str(self._backend.chat_template)) is not None
        self._plain_turns = TemplateTurns(self._apply_template, names_developers=developers)
        self._tool_turns = TemplateTurns(self._apply_template, [EXAMPLE_TOOL], names_developers=developers)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self._eos_token_ids

    @property
    def end_of_sequence(self) -> EndOfSequence:
        return self._end_of_sequence

    @property
    def generation_config(self) -> Mapping[str, Any]:
        return self._generation_config

    @property
    def vocab_size(self) -> int:
        """Return the number of ids with an embedding, by config.json, or else the tokenizer's size."""
        return self._vocab_size

    @property
    def context_tokens(self) -> int | None:
        """Return the limit of prompt and answer together, by config.json, or None where it states none; ranks
        may hold less."""
        return self._context_tokens

    def encode(self, text: str, special_tokens: bool = True) -> list[int]:
        """Return the ids. With `special_tokens` the tokenizer adds its own (a BOS), as for a plain prompt."""
        ids: list[int]
        if self._backend.is_fast:  # This does the call below without a mask and types for each id.
            [encoding] = self._backend.backend_tokenizer.encode_batch_fast(
                [text], add_special_tokens=special_tokens
            )
            ids = encoding.ids
        else:
            ids = self._backend(text, add_special_tokens=special_tokens, verbose=False).input_ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text; silent ids are dropped, and the bytes on both sides join."""
        return self._decode_raw(self.audible(token_ids))

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._decode_raw(token_ids)

    @property
    def special_tokens(self) -> Mapping[int, str]:
        return self._special_tokens

    @property
    def pieces(self) -> Pieces | None:
        return self._pieces

    @property
    def all_pieces(self) -> Pieces | None:
        return self._all_pieces

    @property
    def controls(self) -> ControlTokens | None:
        """Return what keeps control tokens in a message's text from taking effect, or None for none."""
        return self._controls

    @property
    def chat_template(self) -> str:
        return str(self._backend.chat_template or "")

    @property
    def response_template(self) -> Mapping[str, Any] | None:
        """Return the format of the model's answers that its own files state, for transformers' parser."""
        template: Mapping[str, Any] | None = getattr(self._backend, "response_template", None)
        return template

    def is_silent(self, token_id: int) -> bool:
        return not (token_id < len(self._is_audible) and self._is_audible[token_id])

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        flags, num_known = self._is_audible, len(self._is_audible)
        return [token_id for token_id in token_ids if token_id < num_known and flags[token_id]]

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it is within a text, also of a special token."""
        alone = self._decode_raw([token_id])
        # Sentencepiece-like decoders strip only the space of the first token.
        inside = self._decode_raw([token_id, token_id])[len(alone) :]
        return inside if inside.endswith(alone) else alone

    def token_bytes(self, token_id: int) -> bytes | None:
        """Return the bytes of a token whose text is not complete (U+FFFD for a part of a character), or None
        where they are not known."""
        piece = self._backend.convert_ids_to_tokens(token_id)
        return None if piece is None else bytes_of_piece(piece)

    @property
    def keeps_past_reasoning(self) -> bool:
        return self._plain_turns.keeps_past_reasoning or self._tool_turns.keeps_past_reasoning

    def shows_call_ids(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        return self._turns(tools).shows_ids

    def arranged(self, chat: ChatTurns, call_text: CallText | None = None) -> ChatTurns:
        """Return the chat as its template takes and shows it: see turn_order.py and template_turns.py. Past
        calls that the template cannot show become text, if `call_text` can write them as the model does.

        Raises InvalidRequest where the model has no chat template, or one that cannot show tools.
        """
        self._check_template()
        tools = chat.tools
        if tools and not self._tool_turns.reads_tools:
            if chat.may_call:
                raise InvalidRequest("chat.tools", SHOWS_NO_TOOLS)
            tools = ()
        template = self._turns(tools)
        turns = [
            turn if template.writes_calls or not turn.calls else _with_call_text(turn, index, call_text)
            for index, turn in enumerate(chat.turns)
        ]
        placed = arrange(template.with_own_ids(turns), template.order)
        return replace(
            chat,
            turns=[each.turn for each in placed],
            tools=[template.tool(tool) for tool in tools],
            origins=[each.origins for each in placed],
        )

    def render_template(
        self,
        turns: Sequence[Turn],
        variables: Mapping[str, Any] = MappingProxyType({}),
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation_prompt: bool = True,
        continues: bool = False,
    ) -> str:
        """Return the chat as text, up to where the assistant's next turn begins; without `generation_prompt`,
        to where the last turn ends; where it `continues`, to where the last turn's content ends. The template
        may read `variables`; `tools` are in OpenAI's format.

        Raises InvalidRequest where the model has no chat template, its template refuses these messages or
        tools, or a variable has the name of an argument of transformers.
        """
        self._check_template()
        self._check_variables(variables)
        prompts = generation_prompt and not continues
        try:
            messages = [self._turns(tools).of(turn) for turn in turns]
            return self._apply_template(messages, tools, prompts, continues, **variables)
        except Exception as error:  # A template may raise anything, and computes with the client's values.
            if continues and "continue_final_message" in str(error):  # It holds all of the chat.
                raise InvalidRequest("chat.continue_final_message", _NOT_CONTINUED) from error
            name = "chat.tools" if tools and self._takes_without_tools(turns, prompts) else "chat.messages"
            raise InvalidRequest(name, f"are refused by the model's chat template: {error}") from error

    def _takes_without_tools(self, turns: Sequence[Turn], prompts: bool) -> bool:
        try:
            messages = [self._plain_turns.of(turn) for turn in turns]
            self._apply_template(messages, generation_prompt=prompts)
        except Exception:  # A template may raise anything.
            return False
        return True

    def shown_call(self, name: str, arguments: str, schema: Mapping[str, Any]) -> tuple[str, ...]:
        """Return two texts that the chat template writes of an answer that calls this tool, without HTML
        escapes: from the question on, and from the end of the prompt on. Return nothing where the template
        shows no calls."""
        question = secrets.token_hex(16)
        call = AnswerCall(f"functions.{name}:0", name, arguments)
        turns = [
            Turn("user", question),
            Turn("assistant", "", "", (call,)),
            Turn("tool", "x", "", (), call.id, name),
        ]
        function = {"name": name, "description": "x", "parameters": schema}
        tools = [{"type": "function", "function": function}]
        try:
            prompted = self.render_template(turns[:1], tools=tools)
            answered = self.render_template(turns, tools=tools)
        except InvalidRequest:
            return ()
        pairs = zip(prompted, answered, strict=False)
        begins = next((at for at, (one, other) in enumerate(pairs) if one != other), len(prompted))
        texts = (answered[answered.rfind(question) + len(question) :], answered[begins:])
        needed = (name, *json.loads(arguments))  # Some templates name a tool only with its result.
        return tuple(html.unescape(text) for text in texts if all(each in text for each in needed))

    def _apply_template(
        self,
        messages: list[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        generation_prompt: bool = True,
        continues: bool = False,
        **variables: Any,
    ) -> str:
        text: str = self._backend.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation_prompt,
            continue_final_message=continues,
            **variables,
        )
        return text

    @property
    def shows_tools(self) -> bool:
        return self._tool_turns.reads_tools

    def _turns(self, tools: Sequence[Mapping[str, Any]]) -> TemplateTurns:
        return self._tool_turns if tools else self._plain_turns

    def _check_template(self) -> None:
        if self._backend.chat_template is None:
            raise InvalidRequest(
                "chat", "cannot be used: this model has no chat template; send text or token_ids"
            )

    def _check_variables(self, variables: Mapping[str, Any]) -> None:
        for name in variables:
            if name in self._reserved:
                raise InvalidRequest("chat.chat_template_kwargs", f"must not set {name!r}: it is set already")

    def _decode_raw(self, token_ids: Sequence[int]) -> str:
        if self._all_pieces is not None:  # A stream's text is made in the same way.
            return self._all_pieces.text_of(token_ids)
        if self._backend.is_fast:  # This is the call below in a quarter of the time.
            return str(self._backend.backend_tokenizer.decode(list(token_ids), skip_special_tokens=False))
        text: str = self._backend.decode(
            list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


class MarkerDecoder:
    """This decodes for a parser: the client's text and the special tokens that `is_marker` accepts."""

    def __init__(self, tokenizer: Tokenizer, is_marker: Callable[[str], bool]) -> None:
        self._tokenizer = tokenizer
        self._shown = frozenset(
            token_id for token_id, text in tokenizer.special_tokens.items() if is_marker(text)
        )
        pieces = tokenizer.all_pieces
        self._pieces = pieces and pieces.without(tokenizer.special_tokens.keys() - self._shown)

    @property
    def pieces(self) -> Pieces | None:
        return self._pieces

    def text_of(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.text_of(token_ids)

    def audible(self, token_ids: Sequence[int]) -> list[int]:
        is_silent, shown = self._tokenizer.is_silent, self._shown
        return [token_id for token_id in token_ids if token_id in shown or not is_silent(token_id)]


def _with_call_text(turn: Turn, index: int, call_text: CallText | None) -> Turn:
    if call_text is None:
        raise InvalidRequest(
            f"chat.messages[{index}].tool_calls", "cannot be used: the model's chat template shows none"
        )
    return with_text(turn, call_text(turn.calls))


def _load_backend(directory: Path) -> Any:
    # This import is not at the top: a router first makes sure that transformers loads without torch
    # (__main__).
    from transformers import AutoTokenizer  # noqa: PLC0415

    if not directory.is_dir():
        raise ConfigError(f"there is no model directory at {directory}")
    try:
        loaded = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        backend = tokenizer_of_file(loaded, directory)
    except Exception as error:  # Transformers raises many: OSError, ValueError, KeyError, ImportError.
        raise ConfigError(f"the model in {directory} has no tokenizer that can be loaded: {error}") from error
    if backend.is_fast:
        # A tokenizer saved with truncation would cut prompts, and changing it later would race with threads.
        backend.backend_tokenizer.no_truncation()
        backend.backend_tokenizer.no_padding()
        backend.backend_tokenizer.encode_special_tokens = backend.split_special_tokens
    return backend


def _control_tokens(backend: Any) -> ControlTokens | None:
    if not backend.is_fast or backend.split_special_tokens:  # With the latter all control tokens are text.
        return None
    controls = ControlTokens(backend.backend_tokenizer, backend.added_tokens_decoder)
    text = controls.encodes_otherwise(backend.backend_tokenizer, backend.added_tokens_decoder)
    if text:
        log.warning("control_tokens_in_messages_are_not_text probe=%r", text)
    return None if text else controls


def _set_template(backend: Any, path: Path) -> None:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"the chat template {path} cannot be read: {error}") from error
    if not text.strip():
        raise ConfigError(f"the chat template {path} is empty")
    backend.chat_template = text
    try:
        backend.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ConfigError(
            f"the chat template {path} is wrong in line {error.lineno}: {error.message}"
        ) from error
    except Exception:  # A template may raise anything, and need not accept this chat.
        pass


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{path} does not hold a JSON object")
    return config


def _stated_vocab_size(config: dict[str, Any]) -> int | None:
    text_config = config.get("text_config") or {}  # Multimodal checkpoints have it there.
    size = config.get("vocab_size", text_config.get("vocab_size"))
    return None if size is None else int(size)


def _stated_context(config: dict[str, Any]) -> int | None:
    try:
        return context_tokens(config)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _audible_ids(backend: Any) -> bytearray:
    ids = list(backend.get_vocab().values())
    audible = bytearray(max(ids, default=-1) + 1)
    for token_id in ids:
        audible[token_id] = 1
    for token_id in _special_tokens(backend):
        audible[token_id] = 0
    return audible


def _special_tokens(backend: Any) -> dict[int, str]:
    added = backend.added_tokens_decoder.items()
    return {token_id: token.content for token_id, token in added if token.special}

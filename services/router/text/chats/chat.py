"""Chats to prompt ids, with past turns as the ids that were generated.

Where a past assistant turn comes with its ids, a sentinel stands for its content while the template renders:

    <|user|>Hi<|end|><|assistant|>SENTINEL1<|end|><|user|>More<|end|><|assistant|>
    |------- encode -------------| ids     |------------- encode ----------------|
"""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Protocol

from services.router.text.chats.template_content import Content
from services.values.errors import InvalidRequest
from services.wire.isthmus.v1.generation_pb2 import ChatMessage

ROLES = ("system", "developer", "user", "assistant", "tool")
_MAX_VARIABLES_BYTES = 4096


class ChatTokenizer(Protocol):
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, special_tokens: bool = True) -> list[int]: ...

    def render_template(
        self, messages: Sequence[dict[str, Content]], variables: Mapping[str, Any]
    ) -> str: ...


def render_chat(tokenizer: ChatTokenizer, messages: Sequence[ChatMessage], variables: str = "") -> list[int]:
    """The prompt's ids, up to where the assistant's next turn begins. `variables` is Chat's
    chat_template_kwargs.

    An end-of-sequence id at the end of a turn's `token_ids` is dropped where the template writes an end
    marker of its own right after.

    Raises:
        InvalidRequest: names the message and its field, or says why the template refuses the chat.
    """
    _check_messages(messages)
    indices = [index for index, message in enumerate(messages) if message.token_ids]
    # Chance, which no message can have foreseen: nothing needs to be searched for it.
    stem = secrets.token_hex(16)
    contents = {index: f"{stem}x{index}y" for index in indices}
    rendered = tokenizer.render_template(
        [
            {"role": message.role, "content": contents.get(index, list(message.parts) or message.content)}
            for index, message in enumerate(messages)
        ],
        _read_variables(variables),
    )
    pieces = _split_at_sentinels(rendered, stem, indices)
    # The template writes the special tokens itself.
    encoded = [tokenizer.encode(piece, special_tokens=False) if piece else [] for piece in pieces]
    ids = encoded[0]
    for index, piece_ids in zip(indices, encoded[1:], strict=True):
        ids += _without_end_marker(messages[index].token_ids, piece_ids, tokenizer.eos_token_ids)
        ids += piece_ids
    return ids


def _read_variables(text: str) -> Mapping[str, Any]:
    name = "chat.chat_template_kwargs"
    if not text:
        return {}
    if len(text.encode()) > _MAX_VARIABLES_BYTES:
        raise InvalidRequest(f"{name} must be at most {_MAX_VARIABLES_BYTES} bytes of JSON")
    try:
        variables = json.loads(text)
        json.dumps(variables, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{name} must be a JSON object: {error}") from error
    if not isinstance(variables, dict):
        raise InvalidRequest(f"{name} must be a JSON object")
    return variables


def _check_messages(messages: Sequence[ChatMessage]) -> None:
    if not messages:
        raise InvalidRequest("chat.messages must hold at least one message")
    for index, message in enumerate(messages):
        name = f"chat.messages[{index}]"
        if message.role not in ROLES:
            raise InvalidRequest(f"{name}.role must be one of {', '.join(ROLES)}; got {message.role!r}")
        if message.parts and message.content:
            raise InvalidRequest(f"{name}.parts and its content must not both be set")
        if message.token_ids and message.role != "assistant":
            raise InvalidRequest(f"{name}.token_ids may only be set for an assistant's turn")


def _split_at_sentinels(rendered: str, stem: str, indices: Sequence[int]) -> list[str]:
    """What is written around the turns of those indices; in one pass, for there may be many of both."""
    texts_and_indices = re.split(f"{stem}x([0-9]+)y", rendered)
    written = [int(index) for index in texts_and_indices[1::2]]
    for index, found in zip_longest(indices, written):
        if index != found:
            raise InvalidRequest(
                f"chat.messages[{found if index is None else index}].token_ids cannot be used: the model's "
                "chat template does not write this turn exactly once and in order"
            )
    return texts_and_indices[::2]


def _without_end_marker(ids: Sequence[int], next_ids: Sequence[int], eos: tuple[int, ...]) -> Sequence[int]:
    ends_twice = ids[-1] in eos and bool(next_ids) and next_ids[0] in eos
    return ids[:-1] if ends_twice else ids

"""Some token ids end a generation; this says which, and who says so. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from services.values.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EndOfSequence:
    """`stated` are the ids of generation_config.json, as transformers' generate takes them, or of config.json
    where it states none. The tokenizer's own ends a generation too, as with vLLM and SGLang: a model tuned
    for chat often has another end than the configuration that it inherited."""

    source: str  # this file states them, or none where it is empty
    stated: tuple[int, ...]
    tokenizer: int | None

    @property
    def token_ids(self) -> tuple[int, ...]:
        own = () if self.tokenizer is None or self.tokenizer in self.stated else (self.tokenizer,)
        return (*self.stated, *own)


def find_end_of_sequence(configs: Mapping[str, Mapping[str, Any]], tokenizer: int | None) -> EndOfSequence:
    """The first of `configs`, which are by file name, that states an id is the one that counts.

    Raises:
        ConfigError: What it states is no token id.
    """
    for source, config in configs.items():
        text_config = config.get("text_config") or {}  # multimodal checkpoints keep it there
        if stated := _ids(source, config.get("eos_token_id", text_config.get("eos_token_id"))):
            return EndOfSequence(source, stated, tokenizer)
    return EndOfSequence("", (), tokenizer)


def _ids(source: str, value: Any) -> tuple[int, ...]:
    values = [] if value is None else value if isinstance(value, list) else [value]
    if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in values):
        raise ConfigError(f"eos_token_id of {source} is no token id, nor a list of them: {value!r}")
    return tuple(dict.fromkeys(values))

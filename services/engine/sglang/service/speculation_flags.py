"""This module knows which of SGLang's speculations run on which role, and reads the draft's checkpoint.

It is pure except for paths.

    algorithm                   on decode, with its radix cache    on decode, without    on prefill
    EAGLE, EAGLE3, NEXTN        yes                                yes                   yes
    DSPARK                      yes                                yes                   yes
    all others                  no                                 SGLang decides        SGLang decides

The name after aliases counts, as SGLang compares it (arg_groups/speculative_hook.py): NEXTN is EAGLE, and
both are FROZEN_KV_MTP where the draft is an assistant of Gemma 4's.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from services.model.layer_groups import text_config
from services.values.errors import ConfigError

ALGORITHM = "--speculative-algorithm"
DRAFT_PATHS = ("--speculative-draft-model-path", "--speculative-draft-model")
_STEPS, _TOP_K = "--speculative-num-steps", "--speculative-eagle-topk"
_DRAFT_TOKENS, _BLOCK = "--speculative-num-draft-tokens", "--speculative-dspark-block-size"
FLAGS = (ALGORITHM, *DRAFT_PATHS, _STEPS, _TOP_K, _DRAFT_TOKENS, _BLOCK)
# Without flags SGLang chooses at most this, for Llama (_auto_choose_speculative_params).
_USUAL = {_STEPS: 5, _TOP_K: 4, _DRAFT_TOKENS: 8, _BLOCK: 0}
_WITH_DECODE_CACHE = ("EAGLE", "EAGLE3", "DSPARK")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
_SAMPLE_BYTES = 4096
_GEMMA_4_ASSISTANTS = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")


def algorithm(values: Mapping[str, str]) -> str:
    """Return the name after aliases by the flags' values, or "" for none. Raises as `draft_config`."""
    name = values.get(ALGORITHM, "").upper()  # SGLang reads it so.
    if name not in ("NEXTN", "EAGLE"):
        return name
    assists = set(draft_config(values).get("architectures") or ()) & set(_GEMMA_4_ASSISTANTS)
    return "FROZEN_KV_MTP" if assists else "EAGLE"


def check_decode_cache(values: Mapping[str, str]) -> None:
    """Check a decode rank that keeps a radix cache. Raises ConfigError for what SGLang refuses there."""
    name = algorithm(values)
    if ALGORITHM in values and name not in _WITH_DECODE_CACHE:
        given = values[ALGORITHM]
        meant = "" if given.upper() == name else f", which is {name} with this draft"
        raise ConfigError(
            f"--engine-arg={ALGORITHM}={given}{meant}: with the decode radix cache SGLang speculates with "
            "EAGLE, EAGLE3, NEXTN and DSPARK only; take one of them, or --decode-cache=off"
        )


def draft_slots(values: Mapping[str, str], page_size: int) -> int:
    """Return the token slots, in whole pages, that a sequence keeps after its tokens; 0 means no speculation.

    It is what two steps may use, as the next is prepared while one runs (mem_cache/allocation_sizing.py).
    Raises ConfigError for a flag that is no number.
    """
    if ALGORITHM not in values:
        return 0
    steps, top_k, draft_tokens, block = (_number(values, flag) for flag in _USUAL)
    chain = steps
    if page_size > 1 and top_k > 1:  # Each branch begins within a page, and has pages of its own.
        chain = -(-(page_size - 1 + steps) // page_size) * page_size
    slots = 2 * max(chain * top_k, draft_tokens, block + 1)
    return -(-slots // page_size) * page_size + page_size


def _number(values: Mapping[str, str], flag: str) -> int:
    text = values.get(flag, str(_USUAL[flag]))
    if not text.isdecimal():
        raise ConfigError(f"--engine-arg={flag} must be a number, got {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True)
class DraftShape:
    path: Path
    num_kv_heads: int  # A latent has 1.
    head_dim: int  # This is the latent's, if it is one.
    is_latent: bool

    @classmethod
    def read(cls, values: Mapping[str, str]) -> "DraftShape | None":
        """Return the shape; None without speculation, or where the draft is a layer of the model.

        Raises as `draft_config`, and where config.json is incomplete.
        """
        path = draft_path(values)
        if path is None or ALGORITHM not in values:
            return None
        config = text_config(draft_config(values))
        try:
            if rank := int(config.get("kv_lora_rank") or 0):
                return cls(path, 1, rank + int(config["qk_rope_head_dim"]), is_latent=True)
            heads = int(config["num_attention_heads"])
            head_dim = config.get("head_dim") or int(config["hidden_size"]) // heads
            return cls(path, int(config.get("num_key_value_heads") or heads), int(head_dim), is_latent=False)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise ConfigError(f"config.json of the draft {path} says too little: {error!r}") from error

    def fingerprint(self) -> int:
        """Return 64 bits of its identity, equal for equal copies.

        They cover config.json, and of each weight file its name, its size and 4 KiB in three places. (Drafts
        come in other formats than models.) Raises ConfigError.
        """
        digest = xxh3_64()
        try:
            digest.update((self.path / "config.json").read_bytes())
            for file in sorted(self.path.iterdir()):
                if file.suffix in _WEIGHTS:
                    digest.update(b"".join(_samples(file)))
        except OSError as error:
            raise ConfigError(f"the draft {self.path} cannot be read: {error!r}") from error
        return digest.intdigest()


def _samples(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    yield f"{file.name} {size} ".encode()
    with file.open("rb") as opened:
        for start in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            opened.seek(start)
            yield opened.read(_SAMPLE_BYTES)


def draft_path(values: Mapping[str, str]) -> Path | None:
    return next((Path(values[flag]) for flag in DRAFT_PATHS if flag in values), None)


def draft_config(values: Mapping[str, str]) -> Mapping[str, Any]:
    """Return config.json of the draft's checkpoint; empty where it has none of its own.

    Raises ConfigError.
    """
    path = draft_path(values)
    if path is None:
        return {}
    try:
        config = json.loads((path / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"config.json of the draft {path} cannot be used (it must be a checkpoint directory): {error!r}"
        ) from error
    return config if isinstance(config, dict) else {}

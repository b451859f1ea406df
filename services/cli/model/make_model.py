"""`isthmus make-model` writes a tiny random checkpoint that shows any error in a KV cache.

It is made for tests, demos and benchmarks without a download: real architecture, real files, no meaning. An
ordinary random model soon repeats itself and forgets its prompt, so that a lost or misplaced page of KV has
no visible effect. Here every prompt token counts: if any one of some 200 changes, the greedy continuation
changes within a few tokens. tests/cli/model/test_make_model.py checks this.

A tokenizer maps text to ids in one of two ways:
  characters  an id is exactly one printable character: text and ids map one to one, both ways.
              A character outside the vocabulary (a line break too) becomes UNKNOWN, id 0, itself an
              ordinary character. The end of sequence, id 1, is the character EOS, declared special.
  bytes       an id is a byte of UTF-8, so that a character may take several tokens; then the
              special tokens EOS, OPEN and CLOSE. There is no unknown text.

The chat templates are those of chat_templates.py. A model with tools calls a tool only if it must
(tool_choice required), and is steered (`_steer`) so that its strings and answers end.

Greedy output never contains EOS, and sampled output hardly ever: the logit of EOS is always 0, and the
highest of hundreds of logits is near 9.
"""

import math
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils.logging import disable_progress_bar

from services.cli.model.chat_templates import CHAT_TEMPLATES, CLOSE, EOS, OPEN
from services.cli.model.checkpoint_directory import require_empty
from services.settings.flags import Bounds, load, setting
from services.values.errors import ConfigError

UNKNOWN = "□"
UNKNOWN_ID, EOS_ID = 0, 1

_MODELS: dict[str, tuple[type[PreTrainedConfig], type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
ARCHITECTURES = tuple(_MODELS)
_Architectures = Literal["llama", "qwen2", "qwen3", "mistral"]
_Tokenizers = Literal["characters", "bytes"]
_ChatTemplates = Literal["plain", "tools", "thinking"]
TOKENIZERS = get_args(_Tokenizers)

# The gains were found by a random search over models of 2 layers and hidden size 64. We changed single prompt
# tokens (4 architectures, 48 models and prompts, 32 greedy outputs). Of 1,536 changes in prompts of 200 ids
# none went unnoticed, of 960 in 400 tokens one did, of 192 in 1,000 tokens seven did. With all gains 1 every
# third change in 200 tokens went unnoticed. The first layers attend widely, so that each position holds all
# before it; the last layer attends sharply, which turns a small difference into another token. A branch must
# outweigh the residual, or the last token alone would decide. Fast rotation (a small theta) separates
# positions and breaks loops. Float32 rounding stays below 3e-5 standard deviations of the logits.
_GAIN_AT = 0.2  # The gains were chosen for this initializer_range.
_QUERY_GAIN, _LAST_QUERY_GAIN = 1.6, 7.0
_OUTPUT_GAIN, _LAST_OUTPUT_GAIN = 5.0, 12.0
_MLP_GAIN, _LAST_MLP_GAIN = 6.0, 40.0
_HEAD_GAIN = 3.0
_BIAS_GAIN = 0.05  # A large bias, common to all values, would hide what one token adds.
_ROPE_THETA = 100.0
_WINDOW = 24  # This is a number of tokens.


@dataclass(frozen=True, slots=True)
class Sizes:
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    max_context_tokens: int
    window: int
    eos_token_id: int
    rope_theta: float

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def common(self) -> dict[str, Any]:
        return dict(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=2 * self.hidden_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            max_position_embeddings=self.max_context_tokens,
            rope_parameters=self.rope,
            bos_token_id=None,
            pad_token_id=None,
            eos_token_id=self.eos_token_id,
            tie_word_embeddings=False,
            dtype=torch.float32,
        )

    @property
    def rope(self) -> dict[str, Any]:
        return {"rope_type": "default", "rope_theta": self.rope_theta}

    @property
    def layered(self) -> dict[str, Any]:
        return self.common | dict(num_hidden_layers=self.num_layers, head_dim=self.head_dim)


@dataclass(frozen=True, slots=True)
class Family:
    """This is an architecture that a caller brings, besides ARCHITECTURES.

    `config` raises transformers' own errors if it has no model of these sizes. `fill` draws every weight of a
    model from a seed; its scale is 1 by default.
    """

    config: Callable[[Sizes], PreTrainedConfig]
    num_layers: int  # This is the default number.
    fill: Callable[[PreTrainedModel, int, float], None]
    has_window: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeModelConfig:
    """Write a small random checkpoint, for tests and demos: real files, no meaning."""

    directory: Path = setting(help="where to write the checkpoint", positional=True)
    architecture: _Architectures = setting("llama", "of the model, as transformers calls it")
    tokenizer: _Tokenizers = setting("characters", "an id is a printable character, or a byte of UTF-8")
    chat_template: _ChatTemplates = setting(
        "plain", "tools: one that can call tools; thinking: and thinks first; both with --tokenizer=bytes"
    )
    hidden_size: int = setting(64, "an even multiple of the heads")
    num_layers: int = setting(2, "layers")
    num_heads: int = setting(4, "attention heads, a multiple of the KV heads")
    num_kv_heads: int = setting(2, "KV heads")
    vocab_size: int | None = setting(None, "ids; default: 512 for characters, 259 for bytes")
    max_context_tokens: int = setting(4096, "tokens of prompt and answer")
    window: int | None = setting(None, "tokens that a layer of mistral sees; default: all")
    seed: int = setting(0, "the same settings and seed give the same weights")
    initializer_range: float = setting(_GAIN_AT, "0.1 or more; less makes a milder model")
    grown_from: Path | None = setting(
        None,
        "a checkpoint of this command's, to draft for the new one, which has its layers and some behind them "
        "that add little",
    )
    extra_layers: int = setting(2, "with --grown-from: how many", bounds=Bounds(at_least=1))
    extra_gain: float = setting(
        0.5, "with --grown-from: how much they add; 0.5: 19 of 20 tokens stay, 10: half"
    )
    overwrite: bool = setting(False, "write into a directory that holds something already")


def make_model(
    directory: Path,
    architecture: str | Family = "llama",
    *,
    hidden_size: int = 64,
    num_layers: int | None = None,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vocab_size: int | None = None,
    max_context_tokens: int = 4096,
    window: int | None = None,
    tokenizer: str = "characters",
    chat_template: str = "plain",
    seed: int = 0,
    initializer_range: float = _GAIN_AT,
    changes: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint with tokenizer and chat template: safetensors, float32, untied embeddings.

    The same arguments give the same weights. `vocab_size` None means 512 for characters; for bytes it is
    always 259, and 2 or 4 more with markers. A lower `initializer_range` makes outputs depend less on the
    prompt, below 0.1 hardly at all. With one layer not every token counts. `changes` are values of the
    config, by its own names.

    Raises:
        ConfigError: The sizes do not fit together, a name is unknown, or the directory cannot be written.
    """
    tokens = _make_tokenizer(tokenizer, vocab_size, chat_template)
    tokens.model_max_length = max_context_tokens
    _require(initializer_range >= 0.1, f"initializer_range must be at least 0.1, got {initializer_range}")
    family = architecture if isinstance(architecture, Family) else None
    config = _make_config(
        architecture,
        Sizes(
            vocab_size=len(tokens),
            hidden_size=hidden_size,
            num_layers=_default(num_layers, family.num_layers if family else 2),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            max_context_tokens=max_context_tokens,
            window=_default(window, _WINDOW),
            eos_token_id=tokens.eos_token_id,
            rope_theta=_ROPE_THETA,
        ),
        window,
    )
    config.update({"initializer_range": initializer_range, **(changes or {})})
    # transformers draws weights from the global generator; we overwrite them.
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill = family.fill if family else _fill
    fill(model, seed, initializer_range / _GAIN_AT)
    if likings := CHAT_TEMPLATES[chat_template].likings:
        _require(architecture in ARCHITECTURES, f"a template with tools wants one of {ARCHITECTURES}")
        _steer(model, {tokens.convert_tokens_to_ids(token): liking for token, liking in likings.items()})
    try:
        directory.mkdir(parents=True, exist_ok=True)
        disable_progress_bar()  # The model is written in no time.
        _save(model, directory)
        tokens.save_pretrained(directory)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write to {directory}: {error}") from error


def _save(model: PreTrainedModel, directory: Path) -> None:
    """The weights may be read by whoever may read the rest: a pod has a user of its own, and safetensors
    from 0.8 on makes files for their owner alone.
    """
    model.save_pretrained(directory)
    mode = (directory / "config.json").stat().st_mode
    for weights in directory.glob("*.safetensors"):
        weights.chmod(mode)


def run(argv: list[str]) -> int:
    config = load(MakeModelConfig, argv, prog="isthmus make-model")
    if not config.overwrite:
        # save_pretrained would replace existing files silently.
        require_empty(config.directory, "--overwrite writes there all the same")
    if config.grown_from is not None:
        grow(config.grown_from, config.directory, config.extra_layers, config.extra_gain, config.seed)
        print(f"wrote to {config.directory} what {config.grown_from} can draft for")
        return 0
    settings = {member.name: getattr(config, member.name) for member in fields(config)}
    for name in _NOT_OF_A_NEW_ONE:
        del settings[name]
    make_model(**settings)
    print(f"wrote a random {config.architecture} checkpoint to {config.directory}")
    return 0


_NOT_OF_A_NEW_ONE = ("grown_from", "extra_layers", "extra_gain", "overwrite")


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _make_config(architecture: str | Family, sizes: Sizes, window: int | None) -> PreTrainedConfig:
    family = architecture if isinstance(architecture, Family) else None
    if not family:
        known = architecture in ARCHITECTURES
        _require(known, f"architecture must be one of {ARCHITECTURES}, got {architecture!r}")
    has_window = family.has_window if family else architecture == "mistral"
    _require(window is None or has_window, f"{architecture} has no window")
    hidden_size, num_heads = sizes.hidden_size, sizes.num_heads
    counts = [getattr(sizes, member.name) for member in fields(sizes)]
    _require(min(counts) >= 1, f"every size must be positive: {sizes}")
    _require(hidden_size % (2 * num_heads) == 0, f"{hidden_size=} must be an even multiple of {num_heads=}")
    _require(num_heads % sizes.num_kv_heads == 0, "num_heads must be a multiple of num_kv_heads")
    if isinstance(architecture, Family):
        try:
            return architecture.config(sizes)
        except Exception as error:  # transformers' checks of a config have no other class in common.
            raise ConfigError(f"no such model of these sizes: {error}") from error
    return _MODELS[architecture][0](**sizes.layered, sliding_window=window)


def _fill(model: PreTrainedModel, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    last_layer = f".{model.config.num_hidden_layers - 1}."
    has_query_norm = any("q_norm" in name for name, _ in model.named_parameters())
    for name, parameter in sorted(model.named_parameters()):
        weight = parameter.detach()
        gain = scale * _gain(name, is_last=last_layer in name, has_query_norm=has_query_norm)
        if "norm" in name:
            weight.fill_(gain)
        elif weight.dim() == 1:
            weight.normal_(0, gain * _BIAS_GAIN, generator=generator)
        else:
            # The embedding's fan-in is 1, because a token is looked up, not summed.
            fan_in = 1 if "embed" in name else weight.shape[1]
            weight.normal_(0, gain / math.sqrt(fan_in), generator=generator)
    model.get_output_embeddings().weight.detach()[model.config.eos_token_id] = 0


def _gain(name: str, *, is_last: bool, has_query_norm: bool) -> float:
    if "q_norm" in name or ("q_proj" in name and not has_query_norm):
        return _LAST_QUERY_GAIN if is_last else _QUERY_GAIN
    if "o_proj" in name:
        return _LAST_OUTPUT_GAIN if is_last else _OUTPUT_GAIN
    if "down_proj" in name:
        return _LAST_MLP_GAIN if is_last else _MLP_GAIN
    return _HEAD_GAIN if "lm_head" in name else 1.0


def _make_tokenizer(name: str, vocab_size: int | None, chat_template: str) -> PreTrainedTokenizerFast:
    _require(name in TOKENIZERS, f"tokenizer must be one of {TOKENIZERS}, got {name!r}")
    _require(chat_template in CHAT_TEMPLATES, f"chat_template must be one of {tuple(CHAT_TEMPLATES)}")
    template = CHAT_TEMPLATES[chat_template]
    _require(
        name == "bytes" or not template.markers,
        "a chat template with tools wants the tokenizer bytes: it has line ends",
    )
    tokenizer = _characters(vocab_size or 512) if name == "characters" else _bytes()
    tokenizer.add_tokens([AddedToken(marker, special=False) for marker in template.markers])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        chat_template=template.text,
    )
    _require(
        vocab_size in (None, len(fast)), f"a vocabulary of {name} has {len(fast)} ids, got {vocab_size=}"
    )
    return fast


def _characters(vocab_size: int) -> Tokenizer:
    _require(vocab_size >= 128, f"vocab_size must be at least 128 to hold ASCII, got {vocab_size}")
    characters = [UNKNOWN, EOS, OPEN, CLOSE]
    code_point = ord(" ")
    while len(characters) < vocab_size:
        character = chr(code_point)
        if character.isprintable() and character not in characters[:4]:
            characters.append(character)
        code_point += 1
    vocabulary = {character: token_id for token_id, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _bytes() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {symbol: token_id for token_id, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS, OPEN, CLOSE])
    return tokenizer


_CONSTANT = 8.0  # After the last norm it is about a third of the other dimensions.
_WRITES = ("o_proj.weight", "down_proj.weight")
_READS = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")
_PROBED = 64  # This is a number of tokens.


def _steer(model: PreTrainedModel, likings: Mapping[int, float]) -> None:
    """Make a model prefer some tokens and avoid others at every position, so that answers end.

    `likings` are logits to add, by token id; what arrives varies by a sixth. Logits have a standard deviation
    of 3. Only dense attention models can be steered, because weights are found by their names.

    In a random model no logit is higher than another on average, and these models have no bias. So one
    dimension of the hidden states is kept constant, and the output layer reads each token's liking there:

        embeddings, dimension 0      the same for every token
        layers                       neither read nor write it
        output, dimension 0          the token's liking, in logits
    """
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if name.endswith(_WRITES):
            weight[0, :] = 0
        elif name.endswith(_READS):
            weight[:, 0] = 0
    model.get_input_embeddings().weight.detach()[:, 0] = _CONSTANT
    output = model.get_output_embeddings().weight.detach()
    output[:, 0] = 0
    constant = _constant_at_the_end(model)
    for token_id, liking in likings.items():
        output[token_id, 0] = liking / constant


def _constant_at_the_end(model: PreTrainedModel) -> float:
    vocab_size = model.config.vocab_size
    ids = torch.randint(0, vocab_size, (1, _PROBED), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
    return float(hidden[0, :, 0].mean())


_WRITE_TO_RESIDUAL = ("o_proj.weight", "down_proj.weight")


def grow(source: Path, directory: Path, extra_layers: int, gain: float, seed: int) -> None:
    """Write the checkpoint in `source` with `extra_layers` more random layers, whose output is multiplied by
    `gain`.

    The small model predicts the tokens of the grown one; the less the new layers add, the more often it is
    right. Both have the same embeddings, head and tokenizer.

    Raises:
        ConfigError: The layers of `source` are not all alike, or the checkpoint cannot be written.
    """
    try:
        small = AutoModelForCausalLM.from_pretrained(source, local_files_only=True, dtype=torch.float32)
        grown = _with_layers(small, extra_layers)
        _fill_new(grown, small.config.num_hidden_layers, gain, seed)
        shutil.copytree(source, directory, dirs_exist_ok=True)  # This copies the tokenizer, too.
        _save(grown, directory)
    except (OSError, SafetensorError, ValueError, RuntimeError) as error:
        raise ConfigError(f"cannot grow {source} into {directory}: {error}") from error


def _with_layers(small: PreTrainedModel, extra_layers: int) -> PreTrainedModel:
    config: PreTrainedConfig = deepcopy(small.config)
    if config.model_type not in ARCHITECTURES:
        raise ValueError(f"only {', '.join(ARCHITECTURES)} grow, it is of {config.model_type}")
    config.num_hidden_layers += extra_layers
    if kinds := getattr(small.config, "layer_types", None):
        config.layer_types = [*kinds, *kinds[-1:] * extra_layers]
    with torch.random.fork_rng(devices=[]):
        grown: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    grown.load_state_dict(small.state_dict(), strict=False)
    return grown


def _fill_new(grown: PreTrainedModel, first: int, gain: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    new = tuple(f".layers.{layer}." for layer in range(first, grown.config.num_hidden_layers))
    for name, parameter in sorted(grown.named_parameters()):
        if parameter.dim() < 2 or not any(layer in name for layer in new):
            continue
        scale = gain if name.endswith(_WRITE_TO_RESIDUAL) else 1.0
        parameter.detach().normal_(0, scale / math.sqrt(parameter.shape[1]), generator=generator)

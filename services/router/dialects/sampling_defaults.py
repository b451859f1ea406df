"""A request samples by these defaults where it does not say."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from services.values.errors import ConfigError, InvalidRequest
from services.values.request import SamplingParams
from services.wire.isthmus.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A default that is None is OpenAI's, which is no constraint."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


OPENAI = SamplingDefaults()


def defaults_of(generation_config: Mapping[str, Any]) -> SamplingDefaults:
    """Return a model's own defaults, which its generation_config.json states. do_sample is not heeded, as it
    is not by vLLM and SGLang.

    Raises:
        ConfigError: one of them is no number, or out of its range.
    """
    stated = {field.name: generation_config.get(field.name) for field in fields(SamplingDefaults)}
    values = {name: value for name, value in stated.items() if value is not None}
    for name, value in values.items():
        allowed = int if name == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise _unusable(f"{name} is {value!r}")
    if values.get("top_k") == -1:
        values["top_k"] = 0  # It is other servers' way to say "all".
    try:
        SamplingParams(**values)
    except InvalidRequest as error:
        raise _unusable(str(error)) from error
    return SamplingDefaults(**values)


def fill_in(sampling: common_pb2.SamplingParams, defaults: SamplingDefaults) -> None:
    """Put what is stated into the fields that a caller over gRPC has left unset."""
    for field in fields(SamplingDefaults):
        value = getattr(defaults, field.name)
        if value is not None and not sampling.HasField(field.name):
            setattr(sampling, field.name, value)


def _unusable(problem: str) -> ConfigError:
    return ConfigError(
        f"generation_config.json cannot be sampled by: {problem}; --sampling-defaults=openai leaves it aside"
    )

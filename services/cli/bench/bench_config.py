"""These are the settings of `isthmus bench`."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.cli.client import ClientConfig
from services.settings.flags import Bounds, check_bounds, setting
from services.values.errors import ConfigError

_SOME, _SHARE = Bounds(at_least=1), Bounds(at_least=0, at_most=1)
_NOT_NEGATIVE, _ABOVE_0 = Bounds(at_least=0), Bounds(above=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchConfig(ClientConfig):
    """Send a load of random tokens to a router and tell throughput, latencies, hits and what moved.

    Prompts are a function of the seed. Definitions are those of sglang.bench_serving.
    """

    workload: Literal["random", "shared-prefix", "multi-turn", "trace"] = setting(
        "random",
        "prompts that share nothing, groups that share a prefix, conversations, or what --trace asks",
        bare="WORKLOAD",
    )
    rate: float | None = setting(
        None, "open loop: requests (or conversations) a second, a Poisson process", bounds=_ABOVE_0
    )
    concurrency: int | None = setting(
        None, "requests at a time; without --rate a closed loop of so many, by default 8", bounds=_SOME
    )
    num_prompts: int = setting(100, "requests; conversations; lines of a trace, at most", bounds=_SOME)
    input_len: int = setting(256, "tokens of a prompt; of multi-turn, of each question", bounds=_SOME)
    output_len: int = setting(64, "tokens of an answer", bounds=_SOME)
    range_ratio: float = setting(1.0, "lengths are drawn from this share of theirs upwards", bounds=_SHARE)
    num_turns: int = setting(4, "multi-turn: turns of a conversation", bounds=_SOME)
    gsp_num_groups: int = setting(8, "shared-prefix: groups", bounds=_SOME)
    gsp_prompts_per_group: int = setting(16, "shared-prefix: prompts of a group", bounds=_SOME)
    gsp_system_prompt_len: int = setting(512, "shared-prefix: tokens of a group's prefix", bounds=_SOME)
    gsp_question_len: int = setting(128, "shared-prefix: tokens of a prompt behind it", bounds=_SOME)
    gsp_output_len: int = setting(64, "shared-prefix: tokens of an answer", bounds=_SOME)
    trace: Path | None = setting(None, "JSON lines of timestamp, input_length, output_length, hash_ids")
    trace_scale: float = setting(1.0, "lengths of the trace are multiplied by it", bounds=_ABOVE_0)
    slowdown: float = setting(1.0, "the trace's time is stretched by it", bounds=_ABOVE_0)
    seed: int = setting(0, "the same seed asks the same", bounds=_NOT_NEGATIVE)
    warm_up: int = setting(1, "requests before, that are not measured", bounds=_NOT_NEGATIVE)
    reuse: bool = setting(
        False, "let prompts hit what earlier runs left; else each run is a tenant of its own"
    )
    http: str = setting("", "URL: ask the OpenAI API there instead of gRPC")
    vocab_size: int | None = setting(None, "tokens to draw from; default: found by asking", bounds=_SOME)
    timeout_s: float = setting(600.0, "give a request up after so many seconds", bounds=_ABOVE_0)
    json: Path | None = setting(None, "write the figures there")
    plot: Path | None = setting(None, "draw them there, a PNG; wants the extra isthmus[plots]")

    def __post_init__(self) -> None:
        check_bounds(self)
        if (self.workload == "trace") != (self.trace is not None):
            raise ConfigError("--workload=trace and --trace=FILE go together")
        if self.plot is not None and importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot wants matplotlib: pip install 'isthmus[plots]'")

    @property
    def is_open(self) -> bool:
        """Say whether the loop is open: a trace has times of its own, unless a concurrency alone is given."""
        return self.rate is not None or (self.workload == "trace" and self.concurrency is None)

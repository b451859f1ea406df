"""The models that are measured: what they carry, and how it weighs beside their attention."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.families import FAMILIES
from services.cli.model.make_model import make_model
from services.engine.fake import fake_state, fake_window
from services.model.layer_groups import LayerGroups, layer_groups
from services.values.kv import KvGroup

_FAKE_TOKEN_BYTES = 8
_LAYERS, _HIDDEN = 4, 128  # of a made model


@dataclass(frozen=True, slots=True)
class Model:
    """One group beside attention. `group.unit_bytes` of a window are a page's."""

    name: str
    group: KvGroup
    token_bytes: float  # of attention
    fake_carried: str = ""
    path: str = ""  # of its checkpoint; empty: the fake engine


def fake_hybrid(state_tokens: int) -> Model:
    group = fake_state(state_tokens)
    return Model(f"state of {state_tokens}", group, _FAKE_TOKEN_BYTES, f"state:{state_tokens}")


def fake_windowed(window: int, page_size: int) -> Model:
    group = replace(fake_window(window), unit_bytes=page_size * _FAKE_TOKEN_BYTES)
    return Model(f"window of {window}", group, _FAKE_TOKEN_BYTES, f"window:{window}")


@dataclass(frozen=True, slots=True)
class Made:
    """A checkpoint of one of transformers' families, to be written; float32."""

    name: str
    family: str
    window: int | None = None
    changes: Mapping[str, int] = field(default_factory=dict)  # of the config, by its own names


MADE = (
    Made("qwen3_5", "qwen3_5"),
    Made("gpt_oss", "gpt_oss", window=128),
    Made(
        "qwen3_5, wide states",
        "qwen3_5",
        changes={"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    ),
)


@contextmanager
def made(wanted: Made, page_size: int) -> Iterator[Model]:
    """There while the context is."""
    with TemporaryDirectory(prefix="isthmus-bench-") as directory:
        make_model(
            Path(directory),
            FAMILIES[wanted.family],
            hidden_size=_HIDDEN,
            num_layers=_LAYERS,
            window=wanted.window,
            max_context_tokens=16_384,
            changes=wanted.changes,
        )
        groups = layer_groups(json.loads((Path(directory) / "config.json").read_text()))
        yield Model(
            wanted.name, _carried(groups, page_size), groups.full.token_bytes("float32"), path=directory
        )


def _carried(groups: LayerGroups, page_size: int) -> KvGroup:
    if groups.recurrent is not None:
        return replace(fake_state(), unit_bytes=groups.recurrent.state_bytes("float32"))
    [window] = groups.windows
    return window.in_layout("float32", page_size)

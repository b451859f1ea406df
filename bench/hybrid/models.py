"""The models that are measured: what they carry, and how it weighs beside their attention."""

from dataclasses import dataclass, replace

from services.engine.fake import fake_state, fake_window
from services.values.kv import KvGroup

_FAKE_TOKEN_BYTES = 8


@dataclass(frozen=True, slots=True)
class Model:
    """The model has one group beside attention. `group.unit_bytes` of a window are a page's."""

    name: str
    group: KvGroup
    token_bytes: float  # of attention
    fake_carried: str


def fake_hybrid(state_tokens: int) -> Model:
    group = fake_state(state_tokens)
    return Model(f"state of {state_tokens}", group, _FAKE_TOKEN_BYTES, f"state:{state_tokens}")


def fake_windowed(window: int, page_size: int) -> Model:
    group = replace(fake_window(window), unit_bytes=page_size * _FAKE_TOKEN_BYTES)
    return Model(f"window of {window}", group, _FAKE_TOKEN_BYTES, f"window:{window}")

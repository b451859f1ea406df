"""Which models there are, as Anthropic's clients ask."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from services.router.dialects.answer import Json

_VERSION = "anthropic-version"  # a header that all of their clients send


def asks(headers: Mapping[str, str]) -> bool:
    """The path is OpenAI's, too."""
    return _VERSION in headers


def model_json(name: str, created: int) -> Json:
    """`created`: seconds since the epoch."""
    moment = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": name, "display_name": name, "created_at": moment}


def models_json(models: Sequence[Json]) -> Json:
    """All of them, on one page."""
    ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
    return {"data": list(models), "has_more": False, "first_id": None, "last_id": None, **ends}

"""Of what models write as JSON: what is no text."""

import json


def with_whole_characters(source: str) -> str:
    """The JSON, with U+FFFD where it escapes half of a surrogate pair: models write that, and nobody can pass
    it on. As it is if it has none. Raises ValueError, RecursionError."""
    if "\\u" not in source:
        return source
    text = json.dumps(json.loads(source), ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return source if whole == text else whole

"""Every log line of ours begins with its event's name, all of one style: rank_ready, lease_lost."""

import ast
import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SERVICES = Path(__file__).parents[2] / "services"
METHODS = ("debug", "info", "warning", "error", "exception", "critical", "log", "event")
NAME = re.compile(r"[a-z]+(_[a-z]+)*")
OTHERS_WORDS = ("%s", "ucx")  # the name comes with the call, or the line is UCX's own


def said(call):
    """The text of a call that logs, if it is one."""
    function = call.func
    is_method = isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name)
    if is_method and (
        function.attr not in METHODS or function.value.id not in ("log", "logger", "log_lines")
    ):
        return None
    if not is_method and not (isinstance(function, ast.Name) and function.id == "event"):
        return None
    texts = (each.value for each in call.args if isinstance(each, ast.Constant))
    return next((text for text in texts if isinstance(text, str)), None)


def events(source):
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [text.split()[0] for call in calls if (text := said(call))]


def test_an_events_name_is_of_words_with_underscores(subtests):
    of_paths = {path: events(path.read_text()) for path in SERVICES.rglob("*.py") if "wire" not in path.parts}
    for path, names in of_paths.items():
        with subtests.test("an events name is of words with underscores", path=path):
            assert [n for n in names if n not in OTHERS_WORDS and not NAME.fullmatch(n)] == []
    with subtests.test("all kinds of calls are looked at"):
        assert {"rank_ready", "lease_lost", "rank_exited", "kv_link_up"} <= {
            n for names in of_paths.values() for n in names
        }
        assert events('logger.warning("publisher.retry rank=%s", rank)') == ["publisher.retry"]

"""docker/requirements.txt names what the services import: no more, no less."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[2]
# They differ by target. nixl asks for both of its builds; nobody imports setuptools.
NIXL = {"nixl-cu12", "nixl-cu13"}
ELSEWHERE = {"torch", "setuptools", "nixl"}


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_it_is_the_closure_of_our_dependencies():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    closure, pending = set(), [(text, ()) for text in project["dependencies"]]
    while pending:
        text, extras = pending.pop()
        requirement = Requirement(text)
        applies = requirement.marker is None or any(
            requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)
        )
        name = canonical(requirement.name)
        if applies and name not in closure | NIXL:
            closure.add(name)
            needs = importlib.metadata.requires(requirement.name) or []
            pending += [(needed, tuple(requirement.extras)) for needed in needs]
    assert names("docker/requirements.txt") == closure - ELSEWHERE


def test_every_name_has_its_pin():
    assert names("docker/requirements.txt") <= names("constraints.txt")


def names(file):
    lines = (REPOSITORY / file).read_text().splitlines()
    return {canonical(line.partition("==")[0]) for line in lines if line and not line.startswith("#")}


def test_the_modules_that_images_are_tried_with_are_there():
    lines = [
        line for line in (REPOSITORY / "docker/Dockerfile").read_text().splitlines() if "import " in line
    ]
    modules = {name for line in lines for name in re.findall(r"services(?:\.\w+)+", line)}
    assert len(modules) >= 4
    assert not [name for name in modules if importlib.util.find_spec(name) is None]

"""This module tells what a host has of what is needed, and what is to be installed beside it. Only the
standard library and `packaging` are imported here: all else may be what is missing."""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

Versions = Mapping[str, Version]  # by canonical name

# Of what the parts import: what a host has that computes by torch on a GPU. All else comes as wheels.
ITS_OWN = (
    "huggingface-hub",
    "jinja2",
    "llvmlite",
    "numba",
    "numpy",
    "safetensors",
    "tokenizers",
    "torch",
    "transformers",
)


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str  # canonical
    version: Version
    path: Path


def wheels_in(folder: Path) -> list[Wheel]:
    """Raises packaging.utils.InvalidWheelFilename."""
    wheels = []
    for path in sorted(folder.glob("*.whl")):
        name, version, _, _ = parse_wheel_filename(path.name)
        wheels.append(Wheel(name, version, path))
    return wheels


def ranges_of(pyproject: str) -> dict[str, SpecifierSet]:
    """The versions that we work with, of our direct dependencies."""
    listed = tomllib.loads(pyproject)["project"]["dependencies"]
    return {canonicalize_name(r.name): r.specifier for r in map(Requirement, listed)}


def to_install(wheels: Sequence[Wheel], has: Versions, ranges: Mapping[str, SpecifierSet]) -> list[Wheel]:
    """Those that the host has not, or in a version that will not do."""
    return [wheel for wheel in wheels if not _will_do(wheel, has.get(wheel.name), ranges)]


def _will_do(wheel: Wheel, version: Version | None, ranges: Mapping[str, SpecifierSet]) -> bool:
    if version is None:
        return False
    if (own := ranges.get(wheel.name)) is not None:
        return own.contains(version, prereleases=True)
    return version >= wheel.version


def lacking(names: Sequence[str], has: Versions, ranges: Mapping[str, SpecifierSet]) -> list[str]:
    """Return those of `names` and of our direct dependencies that are missing or in a version that will not
    do."""
    wanted = {canonicalize_name(name): ranges.get(canonicalize_name(name), SpecifierSet()) for name in names}
    return [
        f"{name}{own}" + (f" (is {has[name]})" if name in has else "")
        for name, own in wanted.items()
        if name not in has or not own.contains(has[name], prereleases=True)
    ]

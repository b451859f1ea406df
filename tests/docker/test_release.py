"""These tests look at a release's version and notes; `make release` tries the rest itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[2] / ".ci" / "release"
CHANGELOG = """# Changelog

## [Unreleased]

- is new

## [0.2.0] - 2027-01-01

- was new

## [0.1.0] - 2026-12-01

- was first
"""


@pytest.fixture
def release(tmp_path):
    """Run the script; return its exit code and what it says."""
    (tmp_path / ".ci").mkdir()
    script = shutil.copy(SCRIPT, tmp_path / ".ci")
    (tmp_path / "CHANGELOG.md").write_text(CHANGELOG)
    author = ("-c", "user.name=A", "-c", "user.email=a@b.c")
    for command in (["init", "--quiet"], ["add", "."], [*author, "commit", "--quiet", "--message=A change"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)

    def said(version, what="notes"):
        run = subprocess.run([script, version, what], capture_output=True, text=True)
        return run.returncode, run.stdout.strip(), run.stderr.strip()

    return said


def test_notes_are_the_versions_own_and_what_is_unreleased_before_it_has_any(release):
    assert release("0.2.0") == (0, "- was new", "")
    assert release("0.1.0") == (0, "- was first", "")
    assert release("0.3.0-rc.1") == (0, "- is new", "")


def test_a_version_is_one_that_python_and_helm_both_know(release):
    for version in ("", "v0.2.0", "0.2", "0.02.0", "0.2.0rc1", "0.2.0-rc", "0.2.0+local"):
        code, said, why = release(version)
        assert (code, said) == (2, "") and f"got '{version}'" in why
    spelt = {
        "0.3.0": "0.3.0",
        "0.3.0-rc.1": "0.3.0rc1",
        "0.3.0-alpha.10": "0.3.0a10",
        "0.3.0-beta.0": "0.3.0b0",
    }
    assert {version: release(version, "python-version")[1] for version in spelt} == spelt

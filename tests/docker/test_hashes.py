"""Files of pins and of hashes say the same, and what others publish is not named by a tag."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

REPOSITORY = Path(__file__).parents[2]
MADE_OF = {
    **{f"{path.stem}.txt": path.name for path in REPOSITORY.glob("constraints*.txt")},
    "docker-requirements.txt": "docker/requirements.txt",
    "docker-requirements-cuda.txt": "docker/requirements-cuda.txt",
}
ENTRY = re.compile(r"^(\S+)==(\S+)(?: ; [^\\]*)?((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", re.MULTILINE)


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file):
    """Return versions by name, None where the file has the name alone."""
    lines = [line.partition("#")[0].strip() for line in (REPOSITORY / file).read_text().splitlines()]
    named = [line.partition("==") for line in lines if line]
    return {canonical(name): version or None for name, _, version in named if name != "torch"}


def hashed(file):
    text = (REPOSITORY / "hashes" / file).read_text()
    assert len(ENTRY.findall(text)) == len(re.findall(r"^\w", text, re.MULTILINE)), "a pin has no hash"
    return {canonical(name): version for name, version, _ in ENTRY.findall(text)}


def test_each_file_of_pins_has_its_hashes():
    assert {path.name for path in (REPOSITORY / "hashes").glob("*.txt")} == set(MADE_OF)


def test_hashes_are_of_the_versions_that_are_pinned(subtests):
    """Run `make hashes` after a change of pins."""
    for file in MADE_OF:
        with subtests.test(file):
            versions = pins("constraints.txt")
            wanted = {name: version or versions[name] for name, version in pins(MADE_OF[file]).items()}
            assert hashed(file) == wanted


def test_actions_are_named_by_commit_and_images_by_digest():
    workflows = list((REPOSITORY / ".github" / "workflows").glob("*.yml"))
    uses = [use for file in workflows for use in re.findall(r"uses: (.+)", file.read_text())]
    assert uses and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", use) for use in uses), uses
    images = dict(
        re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", (REPOSITORY / "docker/Dockerfile").read_text(), re.M)
    )
    by_tag = {name for name, image in images.items() if not re.search(r"@sha256:[0-9a-f]{64}$", image)}
    assert by_tag == {"SGLANG_IMAGE"}  # SECURITY.md says so

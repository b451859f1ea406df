"""The documents say what is true of the tree: files, links, packages; what is read whole stays short."""

import ast
import re
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
SERVICES = REPOSITORY / "services"
DOCUMENTS = sorted([*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").glob("*.md")])
GENERATED = ("wire/etcd", "wire/isthmus", "wire/isthmus/v1")
MOST_WORDS = {"docs/design.md": 3_700, "README.md": 1_500}
STAND_INS = "engine/sglang/cpu_stand_ins"  # for packages of others

ROOMS = [path.parent.name for path in SERVICES.glob("*/__init__.py")]
_TOPS = ["services", "tests", "docs", "bench", "charts", "proto", "docker", r"\.ci", r"\.github", *ROOMS]
# services/kv/ticket.py, and kv/ticket.py for short; not nixl/conn.py, which is somebody else's, nor a rank.
_PATH = re.compile(rf"(?<![\w./:-])(?:{'|'.join(_TOPS)})/(?!\d)[\w./-]*[\w/]")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def relative(path):
    return path.relative_to(REPOSITORY).as_posix()


def is_there(path):
    return (REPOSITORY / path).exists() or (SERVICES / path).exists()


def anchors(document):
    """Return the headings' anchors as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", _FENCED.sub("", document.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links(document):
    found = _LINK.findall(_FENCED.sub("", document.read_text()))
    return [link for link in found if not link.startswith(("http://", "https://"))]


def test_files_that_are_named_exist_and_links_lead_somewhere(subtests):
    for document in DOCUMENTS:
        with subtests.test(relative(document)):
            missing = sorted({path for path in _PATH.findall(document.read_text()) if not is_there(path)})
            assert not missing
            for link in links(document):
                name, _, anchor = link.partition("#")
                target = (document.parent / name) if name else document
                assert target.exists(), link
                if anchor:
                    assert anchor in anchors(target), link


def test_what_is_read_whole_is_short(subtests):
    for name in MOST_WORDS:
        with subtests.test(name):
            assert len((REPOSITORY / name).read_text().split()) <= MOST_WORDS[name]


def sentences():
    """Yield each package with what its __init__.py says."""
    for init in SERVICES.rglob("__init__.py"):
        package = init.parent.relative_to(SERVICES).as_posix()
        if package not in GENERATED and not package.startswith(STAND_INS):
            said = " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split())
            yield relative(init.parent), said.removeprefix("This package ")


def test_the_map_has_a_line_for_every_package():
    lines = (REPOSITORY / "docs" / "architecture.md").read_text().splitlines()
    on_the_map = {line for line in lines if line.startswith("| `services")}
    assert on_the_map == {f"| `{package}` | {sentence} |" for package, sentence in sentences()}

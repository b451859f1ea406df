"""The page's files as they lie: self-contained, without markup that a text could become, and packaged."""

import hashlib
import json
import re
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

import services
from services.router.http.page import STATIC, page_files

pytestmark = pytest.mark.long

ROOT = Path(services.__file__).parents[1]
VENDOR = STATIC / "vendor"
OWN = [path for path in STATIC.rglob("*") if path.is_file() and VENDOR not in path.parents]
SCRIPTS = [path for path in OWN if path.suffix == ".js"]
NAMESPACE = "http://www.w3.org/2000/svg"  # of SVG: a name, which nobody asks for


def test_nothing_comes_from_elsewhere():
    texts = [path for path in OWN if path.suffix != ".ico"]
    assert len(texts) > len(SCRIPTS) > 20
    for path in texts:
        text = path.read_text().replace(NAMESPACE, "")
        assert not re.search(r"https?:|wss?:|[\"'(]//|@import|url\(", text), path


def test_the_markup_has_no_scripts_and_no_styles():
    text = (STATIC / "index.html").read_text()
    assert not re.search(r"<style|style=|\son\w+=|javascript:", text)
    assert re.findall(r"<script[^>]*>([^<]*)</script>", text) == ["", ""]


def test_text_never_becomes_markup():
    sinks = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    for path in SCRIPTS:
        assert not re.search(sinks, path.read_text()), path


def test_scripts_import_files_that_are_there():
    for path in SCRIPTS:
        text = path.read_text()
        names = re.findall(r"""(?:from|import) "([^"]+)";""", text)
        assert all(name.startswith(".") and (path.parent / name).resolve().is_file() for name in names), path
        all_imports = re.findall(r"^import |^} from ", text, re.M)
        assert len(names) == len(all_imports) or path.name == "theme.js", path


def test_pure_scripts_ask_nobody():
    """core/ is values in, values out: no network, no document, no clock, no chance."""
    impure = (
        r"fetch\(|document|window|Date\.|Math\.random|setTimeout|setInterval|Storage|\.\./(io|parts|vendor)"
    )
    for path in (STATIC / "core").iterdir():
        assert not re.search(impure, path.read_text()), path


def test_what_is_vendored_is_what_was_published():
    (listed,) = WheelBuilder(str(ROOT)).config.sbom_files
    components = json.loads((ROOT / listed).read_text())["components"]
    files = {file["name"]: file["hashes"] for each in components for file in each.get("components", [])}
    scripts = [path for path in VENDOR.iterdir() if path.suffix == ".js"]
    assert files == {path.name: [{"alg": "SHA-256", "content": digest(path)}] for path in scripts}
    licences = {f"{each['name']}-LICENSE.txt" for each in components}
    assert licences == {path.name for path in VENDOR.iterdir()} - files.keys()
    assert all("icense" in (VENDOR / name).read_text() for name in licences)


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_wheel_has_them():
    packed = {Path(file.path) for file in WheelBuilder(str(ROOT)).recurse_included_files()}
    assert {path for path in STATIC.rglob("*") if path.is_file()} <= packed


def test_the_page_is_small():
    assert sum(len(file.content) for file in page_files().values()) < 150_000


def test_what_drives_a_browser_is_pinned_as_the_services_are():
    ours, theirs = pins("constraints.txt"), pins("constraints-page.txt")
    assert {name: version for name, version in theirs.items() if ours.get(name, version) != version} == {}


def pins(file):
    lines = (ROOT / file).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))

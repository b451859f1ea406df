"""Write services/wire/ from proto/: message classes, type stubs and gRPC stubs.

protoc writes absolute imports (`from isthmus.v1 import common_pb2`), which would make `isthmus` a
second importable package; they are rewritten to relative ones. `--check` writes nothing and exits
with 1 when what is committed differs from what would be written.
"""

import argparse
import filecmp
import re
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

PROTO = Path(__file__).parent
WIRE = PROTO.parent / "services" / "wire"
SOURCES = sorted(str(p.relative_to(PROTO)) for p in PROTO.rglob("*.proto"))
_ABSOLUTE = re.compile(r"^from (isthmus\.v1|etcd) import (\w+)", re.MULTILINE)
# protoc's second way to call a service, whose functions open a channel by themselves, is used by nobody.
_EXPERIMENTAL = re.compile(r"\n+ # This class is part of an EXPERIMENTAL.*?(?=\n\n\nclass |\Z)", re.DOTALL)
_WELL_KNOWN = Path(grpc_tools.__file__).parent / "_proto"


def generate(target: Path) -> None:
    """Fill `target` with the packages isthmus.v1 and etcd."""
    arguments = ["protoc", f"-I{PROTO}", f"-I{_WELL_KNOWN}", f"--python_out={target}"]
    arguments += [f"--pyi_out={target}", f"--grpc_python_out={target}", *SOURCES]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for path in target.rglob("*_pb2*.py*"):
        # Files of one package import only each other, so the package itself is `.`.
        path.write_text(_ABSOLUTE.sub(r"from . import \2", path.read_text()))
    for path in target.rglob("*_pb2_grpc.py"):
        if "Stub" in (text := path.read_text()):
            path.write_text(_EXPERIMENTAL.sub("", text).rstrip() + "\n")
        else:
            path.unlink()  # Its .proto declares no service.
    for folder in ("isthmus", "isthmus/v1", "etcd"):
        (target / folder / "__init__.py").write_text("")


def differences(fresh: Path) -> list[str]:
    names = {p.relative_to(fresh) for p in fresh.rglob("*.py*")}
    committed = {
        p.relative_to(WIRE)
        for package in ("isthmus", "etcd")
        for p in (WIRE / package).rglob("*.py*")
        if "__pycache__" not in p.parts
    }
    changed = [n for n in names & committed if not filecmp.cmp(fresh / n, WIRE / n, shallow=False)]
    return sorted(str(n) for n in (names ^ committed) | set(changed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    with tempfile.TemporaryDirectory() as folder:
        fresh = Path(folder)
        generate(fresh)
        if check:
            if changed := differences(fresh):
                sys.exit("generated code is stale, run `make proto`: " + ", ".join(changed))
            return
        for package in ("isthmus", "etcd"):
            shutil.rmtree(WIRE / package, ignore_errors=True)
            shutil.copytree(fresh / package, WIRE / package)


if __name__ == "__main__":
    main()

"""Fill a folder with the wheels that a GPU host without a network needs: `make gpu-wheels WHEELS=DIR`.

    python -m bench.gpu.wheels DIR [--python 3.12] [--cuda 13]

They are for that host's Python, not for this one. NIXL's wheel is made smaller on the way: half of it are
kernels for experts (nixl_ep), built anew for each version of torch, which we do not use.
"""

import argparse
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
LIMIT_BYTES = 60_000_000
# Oldest first would do as well: pip takes the best one. It matches each name exactly.
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)] + [
    "manylinux2014_x86_64",
    "manylinux1_x86_64",
]


def nixl_build(cuda: int) -> str:
    """The distribution that holds NIXL's libraries for that CUDA; `nixl` itself only chooses among them."""
    return f"nixl-cu{cuda}"


def pinned(name: str) -> str:
    """`name==version`, as in constraints.txt; every build of NIXL has nixl's version. Raises KeyError."""
    pins = dict(line.split("==") for line in _lines(ROOT / "constraints.txt"))
    versions = {_canonical(own): version for own, version in pins.items()}
    return f"{name}=={versions['nixl' if name.startswith('nixl-cu') else _canonical(name)]}"


def needed_by_host() -> list[str]:
    """Names of the distributions, beside those that every GPU host has and NIXL's build for its CUDA."""
    return list(_lines(REQUIREMENTS))


def download(folder: Path, python: str, cuda: int) -> None:
    """Download with pip from wherever it is set up to look. Raises CalledProcessError where one cannot be
    had."""
    platforms = [f"--platform={platform}" for platform in _PLATFORMS]
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"),
            *("--only-binary=:all:", f"--python-version={python}", "--implementation=cp", *platforms),
            *("--dest", str(folder), *map(pinned, [*needed_by_host(), nixl_build(cuda)])),
        ],
        check=True,
    )


def slim(wheel: Path, unwanted: str) -> None:
    """Write `wheel` anew without what lies under the top folders that begin with `unwanted`."""
    smaller = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as target:
        for member in source.infolist():
            if not member.filename.startswith(unwanted):
                target.writestr(member, _kept(source, member, unwanted))
    smaller.replace(wheel)


def _kept(source: zipfile.ZipFile, member: zipfile.ZipInfo, unwanted: str) -> bytes:
    content = source.read(member)
    if not member.filename.endswith(".dist-info/RECORD"):
        return content
    lines = content.decode().splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(unwanted)).encode()


def _lines(path: Path) -> Iterator[str]:
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            yield line


def _canonical(name: str) -> str:
    """PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where to; what lies there already stays")
    parser.add_argument("--python", default="3.12", help="version of the host's Python (3.12)")
    parser.add_argument("--cuda", type=int, choices=(12, 13), default=13, help="that its torch is for (13)")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    download(arguments.folder, arguments.python, arguments.cuda)
    unwanted = "nixl_ep_"
    for wheel in arguments.folder.glob("nixl_cu*.whl"):
        slim(wheel, unwanted)
    sizes = {wheel.name: wheel.stat().st_size for wheel in arguments.folder.glob("*.whl")}
    for name, size in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{size / 1e6:7.2f} MB  {name}")
    total = sum(sizes.values())
    print(
        f"{total / 1e6:7.2f} MB  in {len(sizes)} wheels for Python {arguments.python}, CUDA {arguments.cuda}"
    )
    if total > LIMIT_BYTES:
        sys.exit(f"more than {LIMIT_BYTES / 1e6:.0f} MB")


if __name__ == "__main__":
    main()

"""Write the chart's dashboards with the Grafana Foundation SDK.

Run by an environment that has constraints-observe.txt (`make dashboards`). `--check` writes nothing and
exits with 1 when what is committed differs from what would be written.
"""

import argparse
import sys
from pathlib import Path

from cache import cache
from engines import engines
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from overview import overview

TARGET = Path(__file__).parents[1] / "isthmus" / "dashboards"
BOARDS = {"overview": overview, "cache-and-routing": cache, "engines": engines}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    fresh = {
        TARGET / f"{name}.json": JSONEncoder(sort_keys=True, indent=1).encode(make()) + "\n"
        for name, make in BOARDS.items()
    }
    if not check:
        TARGET.mkdir(exist_ok=True)
        for path, text in fresh.items():
            path.write_text(text)
    elif stale := [
        path.name for path, text in fresh.items() if not path.exists() or path.read_text() != text
    ]:
        sys.exit("stale, run `make dashboards`: " + ", ".join(stale))


if __name__ == "__main__":
    main()

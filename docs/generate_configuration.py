"""Write docs/configuration.md and, in the chart, the schema's flags and sglang-flags.json, from the code.

`--check` writes nothing and exits with 1 when what is committed differs from what would be written.
"""

import argparse
import inspect
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.commands import COMMANDS, config_of
from services.cli.router_client import ClientConfig
from services.engine.sglang.service.sglang_settings import (
    REFUSED_FAMILIES,
    REFUSED_FLAGS,
    REFUSED_ON_DECODE,
    REFUSED_SIZES,
)
from services.rank.rank_config import RankConfig
from services.router.router_config import RouterConfig
from services.settings.cluster_config import ClusterConfig
from services.settings.flags import Bounds, FlagDescription, describe

REPOSITORY = Path(__file__).parent.parent
REFERENCE = REPOSITORY / "docs" / "configuration.md"
SCHEMA = REPOSITORY / "charts" / "isthmus" / "values.schema.json"
SGLANG_FLAGS = REPOSITORY / "charts" / "isthmus" / "sglang-flags.json"

# Settings that the chart makes from values of its own: flag -> where it comes from there.
CHART_VALUES = {
    "model": "model.path",
    "etcd": "etcd",
    "etcd-ca": "etcd.tls",
    "etcd-cert": "etcd.tls",
    "etcd-key": "etcd.tls",
    "etcd-user": "etcd.external",
    "etcd-password-file": "etcd.external",
    "tls-ca": "tls",
    "tls-cert": "tls",
    "tls-key": "tls",
    "tls-mutual": "tls.mutual",
    "tls-server-name": "tls.serverName",
    "tls-peer-name": "tls.peerName",
    "tls-client-ca": "tls.clientCaConfigMap",
    "host": "set",
    "port": "set",
    "http-port": "set",
    "metrics-port": "set",
    "health-port": "set",
    "otlp-endpoint": "tracing.endpoint",
    "api-key-file": "router.apiKeysSecret",
    "tenants": "router.tenantsSecret",
    "models": "router.models",
    "name": "set",
    "worker": "set",
    "rank-index": "set",
    "kv-tier": "tiers",
    "kv-tier-fd": "set",
    "advertise-host": "set",
    "restart-timeout-s": "startupSeconds",
    "dp-size": "dpSize",
    "engine": "engine",
    "device": "gpus",
    "transport": "none",  # pods share no memory
    "fake-step-s": "none",
    "fake-prompt-token-s": "none",
}
# What all services must agree on, so the chart takes it for all of them only.
SHARED = ("cluster", "index-block", "model-name")
# Commands of many flags are listed; the flags of others are told by `--help` alone.
LISTED = ("up", "bench", "size", "drain")
# Made from another service's value.
ROUTER_CHART_VALUES = {"chunk-size": "prefill.flags"}

_HEAD = """\
# Configuration

Written by `docs/generate_configuration.py` from the code; `make lint` fails when it is out of date.

Services and commands take flags as `--name=value`. Here a flag stands with its default, or with a word such
as TEXT if it has none; of choices, which `|` divides, the first is the default, unless the text says
otherwise. What stands in capitals is given by itself: `isthmus make-model /tmp/model`. `...` marks what may
be given several times. `--name=` is none, `--name` alone is true. `--help` prints the same, and the flags of
commands that are not listed here ([the command line](command-line.md)).

The chart takes flags without the dashes: those of all services under `flags`, the others under
`router.flags`, `prefill.flags` and `decode.flags`. If a value of the chart stands in brackets behind a flag,
the chart makes the flag from that value; *set* means that it sets the flag itself, *none* that the flag is of
no use in pods. `values.schema.json` refuses such flags, and those that do not exist.
"""


@dataclass(frozen=True, slots=True)
class Section:
    title: str
    text: str
    flags: tuple[FlagDescription, ...]
    chart_values: dict[str, str] | None  # None: the chart has nothing to do with it


def sections() -> list[Section]:
    common = describe(ClusterConfig)
    router, rank = _without(describe(RouterConfig), common), _without(describe(RankConfig), common)
    chart = {**{name: "flags" for name in SHARED}, **CHART_VALUES}
    router_chart = {**chart, **ROUTER_CHART_VALUES}
    found = [
        Section("Every service", "Routers and workers have these flags.", tuple(common), chart),
        Section("Router", "`python -m services.router`", router, router_chart),
        Section(
            "Prefill and decode workers",
            "`python -m services.prefill`, `python -m services.decode`",
            rank,
            chart,
        ),
    ]
    asking = describe(ClientConfig)
    names = ", ".join(f"`{command}`" for command in COMMANDS if issubclass(config_of(command), ClientConfig))
    intro = f"The commands {names} have these flags beside their own."
    found.append(Section("Commands that ask a router", intro, tuple(asking), None))
    for command in LISTED:
        cls = config_of(command)
        flags = describe(cls)
        text = inspect.cleandoc(str(cls.__doc__))
        if issubclass(cls, ClusterConfig):
            flags, text = list(_without(flags, common)), f"{text} It has those of every service, too."
        if issubclass(cls, ClientConfig):
            flags = list(_without(flags, asking))
        found.append(Section(f"`isthmus {command}`", text, tuple(flags), None))
    return found


def _without(flags: list[FlagDescription], common: list[FlagDescription]) -> tuple[FlagDescription, ...]:
    return tuple(flag for flag in flags if flag not in common)


def reference() -> str:
    parts = [_HEAD]
    for section in sections():
        parts.append(f"\n## {section.title}\n\n{section.text}\n\n{_table(section)}\n")
    return "".join(parts)


def _table(section: Section) -> str:
    chart = section.chart_values is not None
    rows = ["| flag (chart) | meaning |" if chart else "| flag | meaning |", "|---|---|"]
    for flag in section.flags:
        name = flag.name if flag.positional else f"--{flag.name}={_cell(_shown(flag))}"
        names = f"`{flag.bare}` or `{name}`" if flag.bare else f"`{name}`"
        value = (section.chart_values or {}).get(flag.name, "")
        names += " ..." if flag.repeated else ""
        names += f" ({value if value in ('set', 'none') else f'`{value}`'})" if value else ""
        names += ", required" if flag.default is None else ""
        rows.append(f"| {names} | {_cell(flag.help)} |")
    return "\n".join(rows)


def _shown(flag: FlagDescription) -> str:
    """Return the default, or what a value looks like; of choices, the default first unless several are."""
    default = flag.default or ()
    if flag.choices and len(default) == 1:
        return "|".join([*default, *(choice for choice in flag.choices if choice not in default)])
    return ",".join(default) or flag.hint


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def schema(committed: dict[str, Any]) -> dict[str, Any]:
    """The chart's schema with today's flags in its definitions."""
    common, rank, router = describe(ClusterConfig), describe(RankConfig), describe(RouterConfig)
    refused = {*CHART_VALUES, *SHARED}
    flags = {
        "commonFlags": [flag for flag in common if flag.name not in CHART_VALUES],
        "rankFlags": [flag for flag in rank if flag.name not in refused],
        "routerFlags": [f for f in router if f.name not in refused and f.name not in ROUTER_CHART_VALUES],
    }
    definitions = {**committed["definitions"], **{name: _flags_schema(of) for name, of in flags.items()}}
    return {**committed, "definitions": definitions}


def _flags_schema(flags: list[FlagDescription]) -> dict[str, Any]:
    properties = {flag.name: _flag_schema(flag) for flag in flags}
    return {"type": "object", "additionalProperties": False, "properties": properties}


_TYPES = {"N": "integer", "NUMBER": "number", "TEXT": "string", "PATH": "string"}


def _flag_schema(flag: FlagDescription) -> dict[str, Any]:
    """A null is no flag: Helm keeps it where it takes back what a file of values before it had set."""
    if flag.choices == ("true", "false"):
        one: dict[str, Any] = {"type": "boolean"}
    elif flag.choices:
        one = {"enum": list(flag.choices)}
    else:
        one = {"type": _TYPES[flag.hint], **_bounds_schema(flag.bounds)}
    if flag.repeated:
        one = {"type": "array", "items": one}
    if "enum" in one:
        return {"description": flag.help, "enum": [*one["enum"], None]}
    return {"description": flag.help, **one, "type": [one["type"], "null"]}


def _bounds_schema(bounds: Bounds) -> dict[str, Any]:
    """What the services refuse, the schema does."""
    pattern = None if bounds.pattern is None else f"^({bounds.pattern})$"
    found = {
        "minimum": bounds.at_least,
        "maximum": bounds.at_most,
        "exclusiveMinimum": bounds.above,
        "pattern": pattern,
    }
    return {name: value for name, value in found.items() if value is not None}


def outputs() -> dict[Path, str]:
    committed = json.loads(SCHEMA.read_text())
    return {REFERENCE: reference(), SCHEMA: _json(schema(committed)), SGLANG_FLAGS: _json(sglang_flags())}


def sglang_flags() -> dict[str, dict[str, str]]:
    """Those of SGLang's that the service refuses, each with why."""
    return {
        "flags": REFUSED_FLAGS,
        "families": REFUSED_FAMILIES,
        "onDecode": REFUSED_ON_DECODE,
        "onlyAtOne": REFUSED_SIZES,
    }


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = [path for path, text in outputs().items() if not path.exists() or path.read_text() != text]
    if check and stale:
        names = ", ".join(str(path.relative_to(REPOSITORY)) for path in stale)
        sys.exit(f"out of date: {names}; run docs/generate_configuration.py")
    for path in stale:
        path.write_text(outputs()[path])


if __name__ == "__main__":
    main()

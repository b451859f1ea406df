"""This module lists the commands, and writes the text for one that does not exist."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from services.settings.flags import nearest


@dataclass(frozen=True, slots=True)
class Command:
    group: str
    package: str  # This is where its module is, below services.cli.
    meaning: str


_HERE, _ASK, _LOOK = "A cluster on this machine", "Ask a router", "Look at a cluster"
_MODELS, _OPERATE, _SHELL = "Models", "Operate", "This command"
COMMANDS = {
    "up": Command(_HERE, ".local", "start one; Ctrl-C stops it"),
    "demo": Command(_HERE, ".local", "watch a conversation go through one"),
    "chat": Command(_ASK, "", "talk to a model; /stats and /explain tell what its turns cost"),
    "generate": Command(_ASK, "", "send a prompt and stream the answer"),
    "top": Command(_LOOK, ".look", "ranks and requests, live"),
    "explain": Command(_LOOK, ".look", "where a prompt would go, and why"),
    "index": Command(_LOOK, ".look", "what every rank holds"),
    "check": Command(_LOOK, ".look", "is KV found again? `check DIR`: which engine serves it?"),
    "usage": Command(_LOOK, ".look", "what each tenant has used of a router"),
    "plan": Command(_LOOK, ".look", "how many ranks of each role the load needs"),
    "health": Command(_LOOK, ".look", "ask a service on this machine how it is"),
    "bench": Command(_LOOK, ".bench", "throughput, latencies and hits under a load"),
    "size": Command(_MODELS, ".look", "how much KV a model's conversations need"),
    "fetch-model": Command(_MODELS, ".model", "get a small real model, or convert a GGUF file"),
    "make-model": Command(_MODELS, ".model", "write a small random checkpoint"),
    "drain": Command(_OPERATE, "", "take ranks out of service in peace, or put them back"),
    "role": Command(_OPERATE, "", "have ranks go on in their other role: prefill or decode"),
    "lora": Command(_OPERATE, "", "load and unload LoRA adapters on running ranks, and list them"),
    "tier": Command(_OPERATE, "", "look at the files below KV pools: ls, check, rm"),
    "completion": Command(_SHELL, "", "let bash, zsh or fish complete it"),
}
_TITLE = "isthmus: LLM serving in which prefill and decode run apart"


def module_of(name: str) -> ModuleType:
    """Import the command's module only now: it may import torch, and `isthmus help` must answer at once."""
    return importlib.import_module(f"services.cli{COMMANDS[name].package}.{name.replace('-', '_')}")


def config_of(name: str) -> Any:
    return getattr(module_of(name), f"{name.title().replace('-', '')}Config")


def listed() -> str:
    return "\n".join([_TITLE, "", "usage: isthmus COMMAND [--help]", "       isthmus --version", *_groups()])


def unknown(name: str) -> str:
    return (
        f"isthmus: there is no command {name!r}{nearest(name, [*COMMANDS, 'help'])} (isthmus help lists them)"
    )


def _groups() -> Iterator[str]:
    for group in dict.fromkeys(command.group for command in COMMANDS.values()):
        yield f"\n{group}"
        yield from (f"  {name:<12}{each.meaning}" for name, each in COMMANDS.items() if each.group == group)

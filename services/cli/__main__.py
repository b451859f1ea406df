"""The command `isthmus`."""

import importlib
import os
import sys
from types import ModuleType

from services.observe import build_info, json_lines, log_lines
from services.values.errors import ConfigError, IsthmusError

# Name -> the room of its module, and what it does.
COMMANDS = {
    "up": (".local", "start a whole cluster on this machine"),
    "demo": (".local", "watch a conversation go through a cluster on this machine"),
    "generate": ("", "send a prompt to a router and stream the answer"),
    "explain": (".look", "show where a prompt would go and why"),
    "index": (".look", "show what every rank holds"),
    "drain": ("", "take ranks out of service in peace, or put them back"),
    "check": (".look", "fail unless a conversation's second turn finds its KV again"),
    "size": (".look", "tell how much KV a model's conversations need"),
    "health": (".look", "ask a service on this machine how it is"),
    "make-model": (".model", "write a small random checkpoint"),
}


# As a shell tells of a program that SIGPIPE ended, and as `head` leaves other programs.
_PIPE_CLOSED = 141


def main() -> None:
    name, arguments = (sys.argv[1], sys.argv[2:]) if len(sys.argv) > 1 else ("", [])
    if name in COMMANDS:
        _set_up_logging(arguments)
    try:
        code = _run(name, arguments) if name in COMMANDS else _tell(name)
        sys.stdout.flush()
        sys.exit(code)
    except BrokenPipeError:
        _stop_writing()
        sys.exit(_PIPE_CLOSED)
    except ConfigError as error:
        print(f"isthmus {name}: {error}", file=sys.stderr)
        sys.exit(78)
    except IsthmusError as error:
        print(f"isthmus {name}: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _stop_writing() -> None:
    """Whoever read our output has gone (`| head`); what Python still holds of it must not fail at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _set_up_logging(arguments: list[str]) -> None:
    log_format = "json" if json_lines.FLAG in arguments else "text"
    log_lines.setup_logging("isthmus", "warning", log_format)
    if log_format == "json":
        json_lines.lay_pipe("isthmus", descriptors=(2,))  # what a command has to say is on the other one


def _tell(name: str) -> int:
    """What can be asked of the command itself."""
    if name == "--version":
        print(f"isthmus {build_info.versions()['version']}")
        return 0
    wanted_help = name in ("", "-h", "--help", "help")
    print(_usage(), file=sys.stdout if wanted_help else sys.stderr)
    return 0 if wanted_help else 2


def _run(name: str, arguments: list[str]) -> int:
    code: int = module_of(name).run(arguments)
    return code


def module_of(name: str) -> ModuleType:
    """A command's libraries (torch, for one) are loaded only when it is used: help answers at once."""
    room, _ = COMMANDS[name]
    return importlib.import_module(f"services.cli{room}.{name.replace('-', '_')}")


def _usage() -> str:
    lines = ["usage: isthmus COMMAND [--help]", "       isthmus --version", ""]
    lines += [f"  {name:<12}{meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

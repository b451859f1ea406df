"""This module runs the command `isthmus`."""

import os
import signal
import sys
from collections.abc import Sequence

from services.cli.commands import COMMANDS, listed, module_of, unknown
from services.observe import build_info, json_lines, log_lines
from services.process.signals import ending_as_first_process
from services.values.errors import ConfigError, IsthmusError

# A shell reports this code for a program that SIGPIPE ended, as `| head` ends other programs.
_PIPE_CLOSED = 141


def main() -> None:
    ending_as_first_process(signal.SIGTERM)
    name, arguments = _parse_words(sys.argv[1:])
    if name in COMMANDS:
        _set_up_logging(arguments)
    try:
        code = _run(name, arguments) if name in COMMANDS else _print_text(name)
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


def _parse_words(words: Sequence[str]) -> tuple[str, list[str]]:
    name, arguments = (words[0], [*words[1:]]) if words else ("", [])
    return (arguments[0], ["--help"]) if name == "help" and arguments else (name, arguments)


def _stop_writing() -> None:
    """Point our output at /dev/null: else Python's flush at exit fails when the reader is gone (`| head`)."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(nowhere, stream.fileno())


def _set_up_logging(arguments: list[str]) -> None:
    log_format = "json" if json_lines.FLAG in arguments else "text"
    log_lines.setup_logging("isthmus", "warning", log_format)
    if log_format == "json":
        json_lines.lay_pipe("isthmus", descriptors=(2,))  # The command's own output goes to descriptor 1.


def _print_text(name: str) -> int:
    if name == "--version":
        print(f"isthmus {build_info.versions()['version']}")
        return 0
    if name in ("", "-h", "--help", "help"):
        print(listed())
        return 0
    print(unknown(name), file=sys.stderr)
    return 2


def _run(name: str, arguments: list[str]) -> int:
    code: int = module_of(name).run(arguments)
    return code


if __name__ == "__main__":
    main()

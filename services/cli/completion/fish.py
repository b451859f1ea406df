"""Completion for fish: a line for each word (complete(1) of fish)."""

from collections.abc import Iterable, Iterator, Sequence

from services.cli.completion.words import CommandWords, Flag

_FIRST = "complete -c isthmus -n __fish_use_subcommand -f"


def script(commands: Sequence[CommandWords], others: Iterable[str]) -> str:
    """`others`: first words that are no commands of their own."""
    lines = [f"{_FIRST} -a {each.name} -d {_quoted(each.meaning)}" for each in commands]
    lines += [f"{_FIRST} -a {_quoted(name)}" for name in others]
    names = _quoted(" ".join(each.name for each in commands))
    lines.append(f"complete -c isthmus -n '__fish_seen_subcommand_from help' -f -a {names}")
    for command in commands:
        lines += _lines(command)
    return "\n".join([*lines, ""])


def _lines(command: CommandWords) -> Iterator[str]:
    head = f"complete -c isthmus -n '__fish_seen_subcommand_from {command.name}'"
    if not command.takes_path:
        yield f"{head} -f"
    if command.choices:
        yield f"{head} -a {_quoted(' '.join(command.choices))}"
    for flag in command.flags:
        yield f"{head} -l {flag.name.removeprefix('--')}{_argument(flag)} -d {_quoted(flag.meaning)}"


def _argument(flag: Flag) -> str:
    if flag.stands_alone:
        return ""
    if flag.choices:
        return f" -x -a {_quoted(' '.join(flag.choices))}"
    return " -r -F" if flag.takes_path else " -x"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"

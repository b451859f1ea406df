"""Completion for zsh: _arguments of each command (zshcompsys(1))."""

from collections.abc import Iterable, Sequence

from services.cli.completion.words import CommandWords, Flag

_SPECIAL = str.maketrans({"'": "'\\''", "[": "\\[", "]": "\\]", ":": "\\:"})


def script(commands: Sequence[CommandWords], others: Iterable[str]) -> str:
    """`others`: first words that are no commands of their own."""
    listed = [f"'{each.name}:{_quoted(each.meaning)}'" for each in commands] + [
        f"'{name}'" for name in others
    ]
    names = " ".join(each.name for each in commands)
    return "\n".join(
        [
            "#compdef isthmus",
            "_isthmus() {",
            "  local -a commands",
            f"  commands=({' '.join(listed)})",
            "  if (( CURRENT == 2 )); then",
            "    _describe command commands",
            "    return",
            "  fi",
            "  local name=$words[2]",
            "  shift words; (( CURRENT-- ))",
            "  case $name in",
            *(_case(command) for command in commands),
            f"    help) _values command {names} ;;",
            "  esac",
            "}",
            # In a folder of $fpath the file is the function, and is run for the first word that is completed.
            'if [[ $funcstack[1] == _isthmus ]]; then _isthmus "$@"; else compdef _isthmus isthmus; fi',
            "",
        ]
    )


def _case(command: CommandWords) -> str:
    about = ["'*:file:_files'"] if command.takes_path else []
    about += [f"'1:value:({' '.join(command.choices)})'"] if command.choices else []
    specs = " ".join([*map(_spec, command.flags), "'--help[show all flags]'", *about])
    return f"    {command.name}) _arguments {specs} ;;"


def _spec(flag: Flag) -> str:
    meaning = f"[{_quoted(flag.meaning)}]"
    if flag.stands_alone:
        return f"'{flag.name}{meaning}'"
    values = f"({' '.join(flag.choices)})" if flag.choices else "_files" if flag.takes_path else " "
    return f"'{flag.name}={meaning}:value:{values}'"


def _quoted(text: str) -> str:
    return text.translate(_SPECIAL)

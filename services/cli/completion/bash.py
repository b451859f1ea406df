"""Completion for bash: one function, with everything it needs to know in it.

bash cuts words at `=`, so `--page=o` comes as three: `--page`, `=` and `o`.
"""

from collections.abc import Iterable, Sequence

from services.cli.completion.words import CommandWords

_HEAD = """\
# isthmus completion bash
_isthmus() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} flag=
    [[ $cur == = ]] && flag=$prev cur=
    [[ $prev == = ]] && flag=${COMP_WORDS[COMP_CWORD-2]}
    [[ $prev == --* && $cur != --* && $cur != = ]] && flag=${flag:-$prev}
    local flags= values= files=
    COMPREPLY=()
    if (( COMP_CWORD == 1 )); then
        COMPREPLY=($(compgen -W '%(commands)s' -- "$cur"))
        return
    fi
    case ${COMP_WORDS[1]} in
"""
_TAIL = """\
    esac
    if [[ -n $values ]]; then
        COMPREPLY=($(compgen -W "$values" -- "$cur"))
    elif [[ -n $flag && -z $files ]]; then
        COMPREPLY=()
    elif [[ -n $flag || ( $cur != -* && -n $files ) ]]; then
        local IFS=$'\n' # a name may have blanks
        COMPREPLY=($(compgen -f -- "$cur"))
        compopt -o filenames 2>/dev/null
    elif [[ -z $cur || $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "$cur"))
        [[ ${COMPREPLY-} == *= ]] && compopt -o nospace 2>/dev/null
    fi
}
complete -F _isthmus isthmus
"""


def script(commands: Sequence[CommandWords], others: Iterable[str]) -> str:
    """`others`: first words that are no commands of their own."""
    names = " ".join([*(command.name for command in commands), *others])
    cases = "".join(_case(command) for command in commands)
    listed = " ".join(command.name for command in commands)
    help_case = f"    help)\n        values='{listed}' ;;\n"
    return _HEAD % {"commands": names} + cases + help_case + _TAIL


def _case(command: CommandWords) -> str:
    flags = " ".join(f"{flag.name}" if flag.stands_alone else f"{flag.name}=" for flag in command.flags)
    lines = [f"    {command.name})", f"        flags='{flags} --help'"]
    if command.choices:
        lines.append(f"        [[ -z $flag && $cur != -* ]] && values='{' '.join(command.choices)}'")
    if command.takes_path:
        lines.append("        [[ -z $flag ]] && files=1")
    cases = [
        f"            {flag.name}) values='{' '.join(flag.choices)}' ;;"
        for flag in command.flags
        if flag.choices
    ]
    paths = "|".join(flag.name for flag in command.flags if flag.takes_path)
    if paths:
        cases.append(f"            {paths}) files=1 ;;")
    if cases:
        lines += ["        case $flag in", *cases, "        esac"]
    return "\n".join([*lines, "        ;;"]) + "\n"

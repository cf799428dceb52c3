"""The command that prints a script for the shell, after which it completes commands, options and folders."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from functools import partial

from asyncckpt.cli.answers import Commands
from asyncckpt.cli.findings import ExitCode

SHELLS = ("bash", "zsh")
# zsh runs functions that were written for bash.
_ZSH = "autoload -U +X compinit bashcompinit && compinit -u && bashcompinit\n"
_SCRIPT = """\
_asyncckpt() {
    local word="${COMP_WORDS[COMP_CWORD]}" command="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "${COMP_WORDS[i]}" in -*) ;; *) command="${COMP_WORDS[i]}"; break ;; esac
    done
    case "$command" in
%s
    esac
    case "$command/$word" in
        /*|*/-*) COMPREPLY=($(compgen -W "$words" -- "$word")) ;;
        *) local IFS=$'\\n'; COMPREPLY=($(compgen -d -- "$word")) ;;
    esac
}
complete -o filenames -F _asyncckpt asyncckpt
"""


def add_command(commands: Commands, parsers: Callable[[], Mapping[str, ArgumentParser]]) -> None:
    made = commands.add(
        "completion",
        partial(completion, parsers=parsers),
        "print a script for the shell that completes commands, options and folders",
        'Put `eval "$(asyncckpt completion bash)"` into ~/.bashrc, or the same with zsh into ~/.zshrc.',
        directory=False,
    )
    made.add_argument("shell", choices=SHELLS)


def completion(wanted: Namespace, *, parsers: Callable[[], Mapping[str, ArgumentParser]]) -> ExitCode:
    print((_ZSH if wanted.shell == "zsh" else "") + script(parsers()), end="")
    return ExitCode.OK


def script(parsers: Mapping[str, ArgumentParser]) -> str:
    cases = [f'        "") words="{" ".join(parsers)} --help --version" ;;']
    for name, parser in parsers.items():
        options = [text for action in parser._actions for text in action.option_strings if text.startswith("--")]
        cases.append(f'        {name}) words="{" ".join(options)}" ;;')
    return _SCRIPT % "\n".join(cases)

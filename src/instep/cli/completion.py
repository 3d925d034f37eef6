"""Completion of words for bash and zsh, written from the parsers of the commands.

What an argument completes to follows from its choices, and from the name that the help gives it.
All words are in the script, so a press of Tab starts no Python. Way in: `script`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from instep.cli.parsing import Parser, actions_of, commands_of

FOLDERS = ("RUN", "RUNS", "OTHER", "DIR", "FOLDER")
FILES = ("FILE", "RUN|FILE", "JOB", "TARGET")
"""What the help calls arguments that are folders, and those that are files."""


class Values(NamedTuple):
    """What an argument can be."""

    words: tuple[str, ...] = ()
    files: str = ""
    """`files`, `folders`, or nothing."""
    goes_on: bool = False
    """Whether something follows a word without a space."""


class Arguments(NamedTuple):
    """Of a command."""

    text: str
    options: dict[str, tuple[str, Values | None]]
    """Help and values of each; None if it takes none."""
    places: list[Values]
    """Of the arguments that have a place."""


def script(shell: str, parser: Parser) -> str:
    """What a shell is to read at its start: `bash` or `zsh`."""
    return "\n".join({"bash": _bash, "zsh": _zsh}[shell](dict(_commands("", parser)))) + "\n"


def _commands(name: str, parser: Parser) -> Iterator[tuple[str, Arguments]]:
    """Every command by its name, such as `run` or `netlab up`; the program's is empty."""
    of = Arguments(parser.description or "", {}, [])
    for action in actions_of(parser):
        if action.option_strings:
            values = None if action.nargs == 0 else _values(action)
            text = (action.help or "").partition(" (default")[0]
            of.options.update(dict.fromkeys(action.option_strings, (text, values)))
        else:
            of.places.append(_values(action))
    yield name, of
    for inner, own in commands_of(parser).items():
        yield from _commands(f"{name} {inner}".strip(), own)


def _values(action: argparse.Action) -> Values:
    name = str(action.metavar or action.dest).upper()
    if action.choices:
        return Values((*action.choices,))
    if name == "LAUNCHER":
        from instep.launch import LAUNCHERS

        return Values((*LAUNCHERS,))
    if name == "KIND":
        from instep.client.first import KINDS

        return Values((*KINDS,))
    if name.startswith("SECTION.KEY="):
        from instep.job.sentences import every_key

        return Values(("arguments.", *(f"{key}=" for key in every_key())), goes_on=True)
    if name in FOLDERS:
        return Values(files="folders")
    return Values(files="files" if name.partition(".")[0] in FILES else "")


_BASH = """\
# Completion for bash:  source <(instep completion bash)
_instep() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} command= option= place=0 i word words= files= goes_on=
  for ((i = 1; i < COMP_CWORD; i++)); do
    word=${{COMP_WORDS[i]}}
    if [[ $option ]]; then option=; continue; fi
    if [[ $word == -* ]]; then
      case "$command $word" in
        {taking}) option=$word ;;
      esac
      continue
    fi
    case "${{command:+$command }}$word" in
      {commands}) command=${{command:+$command }}$word place=0 ;;
      *) ((place += 1)) ;;
    esac
  done
  case "$command ${{option:-$place}}" in
{values}
  esac
  if [[ ! $option && $current == -* ]]; then
    files= goes_on=
    case "$command" in
{options}
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
  case $files in
    files) COMPREPLY+=($(compgen -f -- "$current")) ;;
    folders) COMPREPLY+=($(compgen -d -- "$current")) ;;
  esac
  [[ $files ]] && compopt -o filenames 2>/dev/null
  [[ $goes_on ]] && compopt -o nospace 2>/dev/null
  return 0
}}
complete -F _instep instep"""


def _bash(commands: Mapping[str, Arguments]) -> Iterator[str]:
    taking, values = list[str](), dict[Values, list[str]]()
    for name, of in commands.items():
        mine = [(option, takes) for option, (_, takes) in of.options.items() if takes is not None]
        taking += [f'"{name} {option}"' for option, _ in mine]
        for where, each in [*mine, *((str(n), each) for n, each in enumerate(of.places))]:
            if each != Values():
                values.setdefault(each, []).append(f'"{name} {where}"')
    yield _BASH.format(
        taking="|".join(taking),
        commands="|".join(f'"{name}"' for name in commands if name),
        values="\n".join(
            f'    {"|".join(places)}) words="{" ".join(each.words)}" files={each.files}'
            f" goes_on={'yes' if each.goes_on else ''} ;;"
            for each, places in values.items()
        ),
        options="\n".join(
            f'      "{name}") words="{" ".join(of.options)}" ;;' for name, of in commands.items()
        ),
    )


def _zsh(commands: Mapping[str, Arguments]) -> Iterator[str]:
    yield "#compdef instep"
    yield "# Completion for zsh, after compinit:  source <(instep completion zsh)"
    for name in commands:
        yield from _zsh_function(name, commands)
    yield "compdef _instep instep"


def _zsh_function(name: str, commands: Mapping[str, Arguments]) -> Iterator[str]:
    of, inner = commands[name], [each for each in commands if each.rpartition(" ")[0] == name]
    inner = [each for each in inner if each]
    yield f"{_function(name)}() {{"
    yield "  local state line"
    parts = [
        f"'{option}[{_plain(text)}]{_zsh_values(values)}'"
        for option, (text, values) in of.options.items()
    ]
    if inner:
        parts += ["'1: :->command'", "'*:: :->rest'"]
    else:
        parts += [f"'{n}{_zsh_values(each)}'" for n, each in enumerate(of.places, 1)]
    yield "  _arguments -C " + " ".join(parts)
    if inner:
        told = " ".join(
            f"'{each.rpartition(' ')[2]}:{_plain(commands[each].text)}'" for each in inner
        )
        yield "  case $state in"
        yield f"    command) local -a known=({told}); _describe command known ;;"
        yield "    rest) case $words[1] in"
        for each in inner:
            yield f"      {each.rpartition(' ')[2]}) {_function(each)} ;;"
        yield "    esac ;;"
        yield "  esac"
    yield "}"


def _function(name: str) -> str:
    return "_".join(["_instep", *name.replace("-", "_").split()])


def _plain(text: str) -> str:
    """Without what means something to zsh within these quotes and brackets."""
    kept = text.replace("%%", "%").replace("%(default)s", "")
    return "".join({"'": "", "[": "(", "]": ")", ":": ";", "`": ""}.get(c, c) for c in kept)


def _zsh_values(values: Values | None) -> str:
    if values is None:
        return ""
    if values.words:
        how = f'compadd -S "" -- {" ".join(values.words)}' if values.goes_on else ""
        return f": :{{ {how} }}" if how else f": :({' '.join(values.words)})"
    return ": :" + {"files": "_files", "folders": "_files -/", "": " "}[values.files]

"""Completion of the command `tinyforge` in bash, zsh and fish: commands, flags, and the values of flags.

    source <(tinyforge completion bash)        or zsh
    tinyforge completion fish | source

A script is printed once and asks no Python afterwards: it holds every command's flags and their choices; names of runs
and of files are looked up by the shell.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SHELLS = ("bash", "zsh", "fish")
# Flags whose value is a trained model: a run, a file, or the name of a model that comes with the repository.
CHECKPOINTS = {"--checkpoint", "--base", "--teacher", "--draft"}


@dataclass
class Words:
    """What one command takes. inner: its subcommands. flags: each flag's choices; None for a flag without a value,
    empty for any value, which is completed as a file. arguments: choices of its positional arguments."""

    inner: list[str] = field(default_factory=list)
    flags: dict[str, list[str] | None] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


def words_of(
    name: str, parser: argparse.ArgumentParser, known: Mapping[str, Sequence[str]] | None = None
) -> dict[str, Words]:
    """The words of a command, and of each of its subcommands by its full name. known: names that a flag, or an argument
    by its metavar, accepts among others, so that its parser cannot list them."""
    known = known or {}
    found = Words()
    table = {name: found}
    for action in parser._actions:
        choices = action.choices
        if isinstance(choices, Mapping):
            found.inner += list(choices)
            for word, inner in choices.items():
                table |= words_of(f"{name} {word}", inner, known)
        elif action.option_strings:
            flags = [flag for flag in action.option_strings if flag.startswith("--")]
            for flag in flags:
                values = [str(choice) for choice in choices or known.get(flag, ())]
                found.flags[flag] = None if action.nargs == 0 else values
        else:
            found.arguments += [str(choice) for choice in choices or known.get(str(action.metavar or action.dest), ())]
    return table


def script(shell: str, table: Mapping[str, Words], models: Sequence[str], summaries: Mapping[str, str]) -> str:
    """What `tinyforge completion` prints. table: by command. models: the names of models that come along."""
    if shell == "fish":
        return _fish(table, models, summaries)
    head = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return head + _bash(table, models)


def _bash(table: Mapping[str, Words], models: Sequence[str]) -> str:
    """The command is the longest row of the table that the words begin with; a flag before the cursor decides next."""
    values, files, names = [], [], []
    for name, words in table.items():
        names.append(f"    '{name}') words='{' '.join([*words.inner, *words.arguments, *words.flags])}' ;;")
        for flag, choices in words.flags.items():
            if choices:
                values.append(f"    '{name} {flag}') words='{' '.join(choices)}' ;;")
            elif choices is not None and flag not in CHECKPOINTS:
                files.append(f"'{name} {flag}'")
    first = " ".join(dict.fromkeys(name.split()[0] for name in table))
    outer = {" ".join(name.split()[:-1]) for name in table if " " in name} - set(table)
    stages = [
        f"    '{name}') words='{' '.join(n.split()[-1] for n in table if n.startswith(name + ' '))}' ;;"
        for name in sorted(outer)
    ]
    known = " | ".join(f"'{name}'" for name in [*table, *sorted(outer)])
    checkpoints = " | ".join(f"*' {flag}'" for flag in sorted(CHECKPOINTS))
    newline = "\n"
    return f"""_tinyforge() {{
  local cursor="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" name= words= i
  if [ "$cursor" = = ]; then cursor=
  elif [ "$before" = = ]; then before="${{COMP_WORDS[COMP_CWORD-2]}}"
  fi
  for ((i = 1; i < COMP_CWORD; i++)); do
    case "${{name:+$name }}${{COMP_WORDS[i]}}" in
    {known}) name="${{name:+$name }}${{COMP_WORDS[i]}}" ;;
    *) break ;;
    esac
  done
  COMPREPLY=()
  case "$name $before" in
{newline.join(values)}
    {" | ".join(files)}) return ;;
    {checkpoints}) words="{" ".join(models)} $(ls -d runs/*/ runs/*/*/ 2>/dev/null | sed 's:/$::')"
      local IFS=$'\\n'  # a name may have spaces
      COMPREPLY=($(compgen -W "${{words// /$IFS}}" -- "$cursor"; compgen -f -- "$cursor"))
      compopt -o filenames 2>/dev/null
      return ;;
    *) case "$name" in
    '') words='{first}' ;;
{newline.join(stages + names)}
    esac ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$cursor"))
}}
complete -o default -o bashdefault -F _tinyforge tinyforge"""


def _fish(table: Mapping[str, Words], models: Sequence[str], summaries: Mapping[str, str]) -> str:
    lines = [
        "complete -c tinyforge -n __fish_use_subcommand -f",
        "complete -c tinyforge -n __fish_use_subcommand -f -a data -d 'sources, corpora, shards'",
    ]
    checkpoints = f"{' '.join(models)} (string trim -r -c / -- runs/*/)"
    for name, words in table.items():
        *outer, last = name.split()
        seen = [f"__fish_seen_subcommand_from {word}" for word in outer]
        under = "; and ".join([*seen, f"not __fish_seen_subcommand_from {last}"]) if outer else "__fish_use_subcommand"
        about = f' -d "{summaries[name]}"' if name in summaries else ""
        lines.append(f"complete -c tinyforge -n '{under}' -f -a {last}{about}")
        here = "; and ".join([*seen, f"__fish_seen_subcommand_from {last}"])
        for word in words.arguments:
            lines.append(f"complete -c tinyforge -n '{here}' -a {word}")
        for flag, choices in words.flags.items():
            value = "" if choices is None else " -r"
            if flag in CHECKPOINTS:
                value = f" -r -a '{checkpoints}'"
            elif choices:
                value = f" -x -a '{' '.join(choices)}'"
            lines.append(f"complete -c tinyforge -n '{here}' -l {flag[2:]}{value}")
    return "\n".join(lines)

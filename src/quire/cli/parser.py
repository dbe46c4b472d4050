"""The argument parser of all commands: argparse, made strict and quiet.

No abbreviations; an unknown flag is named together with the nearest known one; every mistake is a `ConfigError`, which
`main` prints as one line. Nothing here knows any option.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import Any, NoReturn

from quire.errors import ConfigError

MAX_SHOWN = 200


def printable(text: str) -> str:
    """Return `text` fit for one line of a terminal: no control characters, at most 200 characters."""
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def nearest(word: str, known: Sequence[str]) -> str:
    """Return "; did you mean X?" for the known word nearest to `word`, or nothing."""
    found = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {found[0]}?" if found else ""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` instead of printing usage and leaving."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        kwargs.setdefault("formatter_class", _Formatter)
        super().__init__(**kwargs)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with argparse's message."""
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; refuse what is not known right here, where the known flags are known too."""
        parsed, rest = super().parse_known_args(args, namespace)
        for word in rest:
            flag = word.partition("=")[0]
            if flag.startswith("-") and flag != "--":
                hint = nearest(flag, list(self._option_string_actions))
                raise ConfigError(f"unknown option {printable(flag)}{hint}", param=printable(flag.lstrip("-")))
        if rest:
            raise ConfigError(f"unexpected argument {printable(rest[0])!r}")
        return parsed, rest


class _StoreOnce(argparse.Action):
    """argparse's "store", which would otherwise silently take the last of several values."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest, self.default) is not self.default:
            raise argparse.ArgumentError(self, "given more than once")
        setattr(namespace, self.dest, values)


class _Formatter(argparse.HelpFormatter):
    """Help with room for long flags; shows `--x, --no-x` as `--[no-]x`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        if len(names) > 1 and names[-1].startswith("--no-"):
            return ", ".join([*names[:-2], "--[no-]" + names[-2].removeprefix("--")])
        return super()._format_action_invocation(action)

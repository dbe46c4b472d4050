"""From declared options to command-line flags and YAML keys, and back to checked values.

A `Flag` is one option as a terminal user meets it. Flags are made from option dataclasses (`flags_of`) and from the
fields of `SamplingParams` (`cli.offline`). A `Command` has flags and positional arguments, and the function that
carries it out. Bounds and choices are not repeated here: each flag calls the check of the option it was made from.

`Parser` is argparse, made strict and quiet: it knows no abbreviations, names an unknown flag together with the nearest
known one, and raises every mistake as a `ConfigError`, which `main` prints as one line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from quire.errors import ConfigError, QuireError, echo
from quire.options import (
    Option,
    OptionField,
    base_type,
    check_option,
    nearest,
    option_fields,
    parse_count,
    unknown_option,
)

MAX_SHOWN = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option as the command line and YAML know it.

    Attributes:
        name: the spelling with underscores. group: heading in the help. kind: bool, int, float, str or dict.
        repeat: whether the flag may be given several times and makes a list.
        details: help text, bounds and how the value is written. check: typed value -> typed value; raises `QuireError`.
    """

    name: str
    group: str
    kind: type
    details: Option
    check: Callable[[Any], Any]
    default: Any = None
    repeat: bool = False

    @property
    def option(self) -> str:
        """The command-line spelling, `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """The default as help and docs show it; empty where the help text says it or there is none."""
        if self.default is None or self.default in ([], {}) or "default:" in self.details.help:
            return ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)

    @property
    def metavar(self) -> str:
        """The word that stands for the value in help and docs."""
        names = {int: "N", float: "X", str: "TEXT", dict: "JSON"}
        choices = self.details.choices
        return self.details.metavar or ("{" + ",".join(choices) + "}" if choices else names[self.kind])


def flags_of(groups: tuple[type, ...]) -> list[Flag]:
    """Return the flags of these option dataclasses, in order of declaration."""
    return [_option_flag(item) for item in option_fields(groups)]


def _option_flag(item: OptionField) -> Flag:
    kind, repeat = base_type(item.type)
    return Flag(
        name=item.name,
        group=(item.group.__doc__ or "Options").splitlines()[0].rstrip("."),
        kind=kind,
        details=item.option,
        check=lambda value: check_option(item, value),
        default=item.default,
        repeat=repeat,
    )


def printable(text: str) -> str:
    """Return `text` fit for one line of a terminal: no control characters, at most 200 characters."""
    if not text.isprintable():
        text = ascii(text)[1:-1]
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `ConfigError` instead of printing usage and leaving."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=_Formatter, **kwargs)
        self.takes_rest: str | None = None  # the attribute that words after flags are added to

    def error(self, message: str) -> NoReturn:
        """Raise `ConfigError` with argparse's message."""
        raise ConfigError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse; refuse unknown arguments here, where the known flags are known too."""
        parsed, rest = super().parse_known_args(args, namespace)
        end = rest.index("--") if "--" in rest else len(rest)
        for word in rest[:end]:
            flag = word.partition("=")[0]
            if flag.startswith("-"):
                hint = nearest(flag, list(self._option_string_actions))
                raise ConfigError(f"unknown option {printable(flag)}{hint}", param=printable(flag.lstrip("-")))
        if rest and self.takes_rest is not None:
            # argparse ends a list of words at the first flag.
            getattr(parsed, self.takes_rest).extend(rest[:end] + rest[end + 1 :])
        elif rest:
            raise ConfigError(f"unexpected argument {printable(rest[0])!r}")
        return parsed, []


class _Formatter(argparse.HelpFormatter):
    """Help with room for long flags; shows `--x, --no-x` as `--[no-]x`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        names = action.option_strings
        if len(names) > 1 and names[-1].startswith("--no-"):
            return ", ".join([*names[:-2], "--[no-]" + names[-2].removeprefix("--")])
        return super()._format_action_invocation(action)


class _Store(argparse.Action):
    """Store a value; refuse a second one unless the flag makes a list. Flags that were not given are not set."""

    def __init__(self, flag: Flag, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values == [] and self.flag.kind is not bool:
            # argparse drops the value of `--flag=--`.
            raise argparse.ArgumentError(self, "'--' is not allowed")
        if self.flag.repeat:
            given = [item for value in values for item in value] if self.flag.details.many else values
            setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *given])
            return
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, "given more than once")
        if self.flag.kind is bool:
            values = not (option_string or "").startswith("--no-")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag], short: Mapping[str, str] | None = None) -> None:
    """Add `flags` to `parser`, under one heading per group; `short` maps names to one-letter spellings."""
    headings: dict[str, Any] = {"": parser}
    for flag in flags:
        if flag.group not in headings:
            headings[flag.group] = parser.add_argument_group(flag.group)
        spellings = [flag.option]
        letter = (short or {}).get(flag.name, flag.details.short)
        if letter is not None:
            spellings.insert(0, letter)
        text = flag.details.help + (f" (default: {flag.shown_default})" if flag.shown_default else "")
        common = {"dest": flag.name, "flag": flag, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if flag.kind is bool:
            spellings.append("--no-" + flag.option.removeprefix("--"))
            headings[flag.group].add_argument(*spellings, action=_Store, nargs=0, **common)
        else:
            common |= {"type": _converter(flag), "metavar": flag.metavar, "nargs": "+" if flag.details.many else None}
            headings[flag.group].add_argument(*spellings, action=_Store, **common)


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument of a command; `name` is the option that it sets.

    Attributes:
        many: whether it takes all the words that are left, as a list; only the last argument may.
    """

    name: str
    help: str
    required: bool = False
    many: bool = False

    @property
    def usage(self) -> str:
        """How the usage line shows it."""
        word = self.name.upper() + " ..." * self.many
        return word if self.required else f"[{word}]"


CONFIG = Flag(
    name="config",
    group="",
    kind=str,
    details=Option(help="YAML file of options; flags override it", metavar="FILE"),
    check=lambda path: path,
)
MODEL = Argument("model", "model folder, Hugging Face id, or quire-demo (default); the same as --model")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command: what its command line looks like, and the function that carries it out.

    Attributes:
        run: takes the values that were given, by name, and returns the exit code.
        usage: what follows the name of the command in its help, before the positional arguments.
        short: names of options to one-letter spellings. config_file: whether it takes `--config FILE`.
    """

    run: Callable[[dict[str, Any]], int]
    flags: Sequence[Flag]
    description: str
    usage: str = "[OPTIONS]"
    short: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[Argument] = (MODEL,)
    config_file: bool = True

    def add_parser(self, subparsers: Any, prog: str, summary: str) -> None:
        """Register the command as the last word of `prog`, such as "quire bench latency"."""
        usage = " ".join([prog, self.usage, *(item.usage for item in self.arguments)])
        parser: Parser = subparsers.add_parser(
            prog.split()[-1], usage=usage, help=summary, description=self.description
        )
        for item in self.arguments:
            nargs = "*" if item.many else None if item.required else "?"
            name = f"{item.name}_argument"
            parser.add_argument(name, nargs=nargs, metavar=item.name.upper(), help=item.help)
            if item.many:
                parser.takes_rest = name
        add_flags(parser, [CONFIG, *self.flags] if self.config_file else self.flags, self.short)
        add_debug_flag(parser)

    def main(self, args: argparse.Namespace) -> int:
        """Run the command as parsed; return the exit code."""
        return self.run(given_values(args, self.flags, self.arguments))


def add_debug_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--debug`, which `main` looks for by itself."""
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show tracebacks of errors")


def _converter(flag: Flag) -> Callable[[str], Any]:
    """Return the function that turns the text after a flag into a checked value, with argparse's kind of error."""

    def convert(text: str) -> Any:
        try:
            return checked(flag, parse_text(flag, text))
        except QuireError as error:
            raise argparse.ArgumentTypeError(error.message) from None

    return convert


def parse_text(flag: Flag, text: str) -> Any:
    """Return what `text` means for this flag, bounds not yet checked. Raises `ConfigError` if it means nothing."""
    try:
        if flag.kind is dict:
            return json.loads(text)
        if flag.kind in (int, float) and not flag.details.size:
            value = parse_count(text) if flag.kind is int else float(text)
            return [value] if flag.repeat else value
    except ValueError:
        what = {int: "an integer", float: "a number", dict: "a JSON object"}[flag.kind]
        raise ConfigError(f"{echo(text)} is not {what}", param=flag.name) from None
    return [text] if flag.repeat else text


def checked(flag: Flag, value: Any) -> Any:
    """Check a typed value; the error does not begin with the name, because the caller adds where the value is."""
    try:
        return flag.check(value)
    except QuireError as error:
        raise ConfigError(error.message.removeprefix(f"{flag.name}: "), param=flag.name) from None


def given_values(
    args: argparse.Namespace, flags: Sequence[Flag], arguments: Sequence[Argument] = (MODEL,)
) -> dict[str, Any]:
    """Return name -> value of every option that was given, on the command line or else in the `--config` file.

    Raises:
        ConfigError: the file cannot be read, has an unknown or repeated key, or a bad value.
    """
    path = getattr(args, "config", None)
    values = read_yaml(Path(path), flags) if path else {}
    values.update({flag.name: getattr(args, flag.name) for flag in flags if hasattr(args, flag.name)})
    for item in arguments:
        value = getattr(args, f"{item.name}_argument", None)
        if value is not None and value != []:
            if hasattr(args, item.name):
                word = f"{item.name.upper()} and as --{item.name}"
                raise ConfigError(f"the {item.name} is given twice, as {word}", param=item.name)
            values[item.name] = value
    for flag in flags:
        if flag.details.no_effect and values.get(flag.name):
            print(f"{flag.option}: {flag.details.help}", file=sys.stderr)
    return values


def read_yaml(path: Path, flags: Sequence[Flag]) -> dict[str, Any]:
    """Read option values from a YAML file whose keys are option names, with dashes or underscores.

    Raises:
        ConfigError: names the file and the key.
    """
    loaded = load_yaml(path, "config")
    if not isinstance(loaded, dict | None):
        raise ConfigError(f"{path} must hold a mapping of option names to values", param="config")
    return check_mapping(loaded or {}, flags, str(path))


def check_mapping(mapping: Mapping[Any, Any], flags: Sequence[Flag], where: str) -> dict[str, Any]:
    """Return the checked values of a mapping whose keys are option names.

    Raises `ConfigError` naming `where` it stands, and the key.
    """
    known = {flag.name: flag for flag in flags}
    values: dict[str, Any] = {}
    for key, value in mapping.items():
        name = str(key).replace("-", "_")
        if name not in known:
            raise ConfigError(f"{where}: {unknown_option(printable(name), list(known)).message}", param=name)
        if name in values:
            raise ConfigError(f"{where}: {name} is given twice", param=name)
        try:
            values[name] = checked(known[name], value)
        except QuireError as error:
            raise ConfigError(f"{where}: {name}: {error.message}", param=name) from None
    return values


def load_yaml(path: Path, option: str) -> Any:
    """Return what a YAML file holds, None if it is empty; in mappings no key may stand twice.

    Raises:
        ConfigError: it cannot be read; `option` is the one that names it.
    """
    import yaml

    class UniqueKeys(yaml.SafeLoader):  # type: ignore[misc]
        """The safe loader, which would otherwise silently take the last of two equal keys."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            for key in keys:
                if keys.count(key) > 1:
                    raise ConfigError(f"{path}: {printable(str(key))} is given twice")
            return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]

    try:
        return yaml.load(path.read_text("utf-8"), Loader=UniqueKeys)
    except OSError as error:
        raise ConfigError(f"--{option}: cannot read {path}: {error.strerror}", param=option) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}", param=option) from None

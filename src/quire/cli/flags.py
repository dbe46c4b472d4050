"""From declared options to command-line flags and YAML keys, and back to checked values.

A `Flag` is one option as a terminal user meets it. Flags are made from the config dataclasses (`flags_of`) and from the
fields of `SamplingParams` (`cli.sampling`); a command adds them to its parser with `add_flags` and reads them back with
`given_values`. Bounds and choices are not repeated here: each flag calls the check of the option it was made from.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.cli.parser import printable
from quire.errors import ConfigError, QuireError, echo
from quire.options import OptionField, check_option, option_fields, unknown_option


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One option as the command line and YAML know it.

    Attributes:
        name: the spelling with underscores. group: heading in the help. kind: bool, int, float, str or dict.
        repeat: whether the flag may be given several times and makes a list. size: whether "4GiB" is understood.
        allowed: bounds in words, for the docs. check: typed value -> typed value; raises `QuireError`.
    """

    name: str
    group: str
    kind: type
    help: str
    check: Callable[[Any], Any]
    default: Any = None
    repeat: bool = False
    size: bool = False
    secret: bool = False
    choices: tuple[str, ...] | None = None
    metavar: str | None = None
    allowed: str = ""

    @property
    def option(self) -> str:
        """The command-line spelling, `--max-num-seqs`."""
        return "--" + self.name.replace("_", "-")

    @property
    def shown_default(self) -> str:
        """The default as help and docs show it; empty where the help text says it or there is none."""
        if self.default is None or self.default in ([], {}) or "default:" in self.help:
            return ""
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)

    @property
    def shown_metavar(self) -> str:
        """The word that stands for the value in help and docs."""
        names = {int: "N", float: "X", str: "TEXT", dict: "JSON"}
        return self.metavar or ("{" + ",".join(self.choices) + "}" if self.choices else names[self.kind])


def base_type(annotation: Any) -> tuple[type, bool]:
    """Reduce a field's annotation to (element type, repeated): `list[str] | None` is (str, True)."""
    if isinstance(annotation, types.UnionType):
        parts = [part for part in typing.get_args(annotation) if part is not types.NoneType]
        lists = [part for part in parts if typing.get_origin(part) is list]
        return base_type((lists or parts)[0])
    if typing.get_origin(annotation) is list:
        return typing.get_args(annotation)[0], True
    return typing.get_origin(annotation) or annotation, False


def flags_of(groups: tuple[type, ...]) -> list[Flag]:
    """Return the flags of these option dataclasses, in order of declaration."""
    return [_option_flag(item) for item in option_fields(groups)]


def _option_flag(item: OptionField) -> Flag:
    kind, repeat = base_type(item.type)
    details = item.option
    bounds = [f">= {details.low}"] if details.low is not None else []
    bounds += [f"<= {details.high}"] if details.high is not None else []
    return Flag(
        name=item.name,
        group=(item.group.__doc__ or "Options").splitlines()[0].rstrip("."),
        kind=kind,
        help=details.help,
        check=lambda value: check_option(item, value),
        default=item.default,
        repeat=repeat,
        size=details.size,
        secret=details.secret,
        choices=details.choices,
        metavar=details.metavar,
        allowed=", ".join(details.choices) if details.choices else ", ".join(bounds),
    )


class _Store(argparse.Action):
    """Store a value; refuse a second one unless the flag makes a list. Flags that were not given leave no trace."""

    def __init__(self, flag: Flag, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.flag = flag

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values == [] and self.flag.kind is not bool:
            # argparse drops the value of `--flag=--`.
            raise argparse.ArgumentError(self, "'--' is not allowed")
        if self.flag.repeat:
            setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values])
            return
        if hasattr(namespace, self.dest):
            raise argparse.ArgumentError(self, "given more than once")
        if self.flag.kind is bool:
            values = not (option_string or "").startswith("--no-")
        setattr(namespace, self.dest, values)


def add_flags(parser: argparse.ArgumentParser, flags: Sequence[Flag], short: Mapping[str, str] | None = None) -> None:
    """Add `flags` to `parser`, under one heading per group; `short` maps names to one-letter spellings."""
    headings: dict[str, Any] = {}
    for flag in flags:
        if flag.group not in headings:
            headings[flag.group] = parser.add_argument_group(flag.group)
        spellings = [flag.option]
        if short and flag.name in short:
            spellings.insert(0, short[flag.name])
        text = flag.help + (f" (default: {flag.shown_default})" if flag.shown_default else "")
        common = {"dest": flag.name, "flag": flag, "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if flag.kind is bool:
            headings[flag.group].add_argument(
                *spellings, "--no-" + flag.option.removeprefix("--"), action=_Store, nargs=0, **common
            )
        else:
            headings[flag.group].add_argument(
                *spellings, action=_Store, type=_converter(flag), metavar=flag.shown_metavar, **common
            )


MODEL_HELP = "model folder, Hugging Face id, or quire-demo (default); the same as --model"


def add_command(
    subparsers: Any,
    name: str,
    flags: Sequence[Flag],
    *,
    usage: str,
    help: str,
    description: str,
    short: Mapping[str, str] | None = None,
    model: bool = True,
    config_file: bool = True,
) -> argparse.ArgumentParser:
    """Register a command with its flags, and with the arguments that commands share.

    Args:
        usage: what follows "quire NAME ". short: see `add_flags`.
        model: whether it takes an optional MODEL. config_file: whether it takes `--config FILE`.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name, usage=f"quire {usage}", help=help, description=description
    )
    if model:
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=MODEL_HELP)
    if config_file:
        parser.add_argument("--config", metavar="FILE", help="YAML file of options; flags override it")
    add_flags(parser, flags, short)
    return parser


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
        if flag.kind in (int, float) and not flag.size:
            value = flag.kind(text)
            return [value] if flag.repeat else value
    except ValueError:
        what = {int: "an integer", float: "a number", dict: "a JSON object"}[flag.kind]
        raise ConfigError(f"{echo(text)} is not {what}", param=flag.name) from None
    return [text] if flag.repeat else text


def checked(flag: Flag, value: Any) -> Any:
    """Check a typed value; the error does not repeat the name, because the caller says where the value stood."""
    try:
        return flag.check(value)
    except QuireError as error:
        raise ConfigError(error.message.removeprefix(f"{flag.name}: "), param=flag.name) from None


def given_values(args: argparse.Namespace, flags: Sequence[Flag]) -> dict[str, Any]:
    """Return name -> value of every flag that was given, on the command line or else in the `--config` file.

    Raises:
        ConfigError: the file cannot be read, has an unknown or repeated key, or a bad value.
    """
    path = getattr(args, "config", None)
    values = read_yaml(Path(path), flags) if path else {}
    values.update({flag.name: getattr(args, flag.name) for flag in flags if hasattr(args, flag.name)})
    model = getattr(args, "model_argument", None)
    if model is not None:
        if hasattr(args, "model"):
            raise ConfigError("the model is given twice, as MODEL and as --model", param="model")
        values["model"] = model
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
            raise ConfigError(f"{where}: {name} stands there twice", param=name)
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
                    raise ConfigError(f"{path}: {printable(str(key))} stands there twice")
            return super().construct_mapping(node, deep=deep)  # type: ignore[no-any-return]

    try:
        loaded = yaml.load(path.read_text("utf-8"), Loader=UniqueKeys)
    except OSError as error:
        raise ConfigError(f"--{option}: cannot read {path}: {error.strerror}", param=option) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(error).split())}", param=option) from None
    return loaded

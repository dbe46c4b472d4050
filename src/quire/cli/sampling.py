"""Sampling flags of `generate` and `chat`, made from the fields of `SamplingParams`.

Types, defaults, bounds and help are those of the class.
"""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from quire.cli.flags import Flag, base_type
from quire.options import Option
from quire.sampling_params import OPTIONS, SamplingParams

# The engine has a --seed as well, so that of sampling is spelled differently.
SPELLING = {"seed": "sampling_seed"}


def sampling_flags(*, exclude: tuple[str, ...] = (), defaults: Mapping[str, Any] | None = None) -> list[Flag]:
    """Return one flag per documented field of `SamplingParams` but those in `exclude`.

    `defaults` replaces the defaults that help shows; it changes nothing by itself.
    """
    hints = typing.get_type_hints(SamplingParams)
    shown = {item.name: item.default for item in msgspec.structs.fields(SamplingParams)} | dict(defaults or {})
    flags = []
    for name, option in OPTIONS.items():
        if not option.help or name in exclude:
            continue
        kind, repeat = base_type(hints[name])
        flags.append(
            Flag(
                name=SPELLING.get(name, name),
                group="Sampling",
                kind=kind,
                repeat=repeat,
                details=Option(help=option.help),
                check=_field_check(name),
                default=shown[name],
            )
        )
    return flags


def _field_check(name: str) -> Callable[[Any], Any]:
    """Return a check of one field by itself.

    `max_tokens` is left open, because `min_tokens` alone is compared with it; what the field needs beside it is there.
    """
    beside = dict.fromkeys(OPTIONS[name].needs[:1], 1)

    def check(value: Any) -> Any:
        SamplingParams(**{"max_tokens": None, **beside, name: value})
        return value

    return check


def sampling_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Pick the sampling fields out of `given_values`, in the spelling of `SamplingParams`.

    Who gives --seed wants the run to be repeatable, so it serves for sampling too unless that has a seed of its own.
    """
    fields = {SPELLING.get(name, name): name for name, option in OPTIONS.items() if option.help}
    chosen = {fields[name]: value for name, value in values.items() if name in fields}
    return {"seed": values["seed"], **chosen} if "seed" in values else chosen

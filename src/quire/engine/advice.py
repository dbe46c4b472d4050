"""Command lines that an error message can end with: the user's options, with a few options changed.

Only engine options appear; where the server listens, and its keys, are not repeated.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from quire.config import CONFIG_GROUPS, EngineConfig
from quire.options import OptionField, option_fields

MIB = 2**20
UNITS = (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def command_line(requested: EngineConfig, changes: Mapping[str, Any], command: str = "serve") -> str:
    """Return the `quire` command of `requested`, not yet resolved, with `changes` made."""
    values = {**requested.to_kwargs(), **changes}
    words = ["quire", command, str(values["model"])]
    for item in option_fields(CONFIG_GROUPS):
        if item.name != "model" and values[item.name] != item.default and not item.option.secret:
            words += _words(item, values[item.name])
    return shlex.join(words)


def _words(item: OptionField, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [item.flag if value else "--no-" + item.flag.removeprefix("--")]
    if isinstance(value, list):
        return [word for entry in value for word in (item.flag, entry)]
    if isinstance(value, dict):
        return [item.flag, json.dumps(value)]
    if item.option.size and value and value % MIB == 0:
        return [item.flag, f"{value // MIB}MiB"]
    return [item.flag, str(value)]


def size_text(size: float) -> str:
    """Return bytes as people read them: "1.5 GiB", "300 bytes"."""
    for unit, scale in UNITS:
        if abs(size) >= scale:
            return f"{size / scale:.3g} {unit}" if abs(size) < 999.5 * scale else f"{size / scale:.0f} {unit}"
    return f"{size:.0f} bytes"

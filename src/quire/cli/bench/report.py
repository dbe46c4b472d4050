"""How benchmarks show and store their results: an aligned table, and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

WIDTH = 42


def print_table(title: str, rows: Mapping[str, float | int | str | None]) -> None:
    """Print one "name  value" line per row; floats with two decimals, missing values as a dash."""
    print(title)
    for name, value in rows.items():
        text = "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value}"
        print(f"  {name:<{WIDTH}} {text}")


def write_json(path: Path, result: Mapping[str, Any], option: str) -> None:
    """Write a result; the error names `option`, by which the path was given."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {str(path)!r}: {error.strerror}", param=option) from None

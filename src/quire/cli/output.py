"""What commands write: lines to a file or standard output, whole files, aligned tables, progress bars."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from quire.errors import ConfigError

NAME_WIDTH = 42


@contextlib.contextmanager
def open_output(path: str | None) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes one line to the file of `--output`, or to standard output.

    Each line is flushed, so that a reader sees results as they come. Raises `ConfigError` if it cannot be opened.
    """
    with contextlib.ExitStack() as stack:
        try:
            file: IO[bytes] = sys.stdout.buffer if path is None else stack.enter_context(open(path, "wb"))
        except OSError as error:
            raise ConfigError(f"output: cannot write {path!r}: {error.strerror}", param="output") from None

        def write(line: bytes) -> None:
            file.write(line + b"\n")
            file.flush()

        yield write


def write_text(path: str | Path, text: str, option: str) -> None:
    """Write a file, and the folders it is in. Raises `ConfigError` naming `option`, by which the path was given."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"{option}: cannot write {str(path)!r}: {error.strerror}", param=option) from None


def write_json(path: str | Path, result: Mapping[str, Any], option: str) -> None:
    """Write a result as JSON; errors as for `write_text`."""
    write_text(path, json.dumps(result, indent=1) + "\n", option)


def print_table(title: str, rows: Mapping[str, float | int | str | None]) -> None:
    """Print one "name  value" line per row; floats with two decimals, missing values as a dash."""
    print(title)
    for name, value in rows.items():
        text = "-" if value is None else f"{value:,.2f}" if isinstance(value, float) else f"{value}"
        print(f"  {name:<{NAME_WIDTH}} {text}")


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, disabled: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar on standard error if that is a terminal; yield the function to call after each of `total` parts."""
    if disabled or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(label, total=total)
        yield lambda: progress.advance(bar)

"""What the parts of the GPU benchmark leave behind: tables, which become Markdown for people and JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(slots=True)
class Table:
    """A heading, names of columns, rows of text, and the same as numbers in `values` (one object for each row)."""

    title: str
    columns: Sequence[str]
    rows: list[Sequence[str]] = field(default_factory=list)
    values: list[dict[str, object]] = field(default_factory=list)
    note: str = ""

    def add(self, *cells: str, **values: object) -> None:
        """Add a row, and print it, so that a run that is cut short has said something."""
        self.rows.append(cells)
        self.values.append(values or dict(zip(self.columns, cells, strict=True)))
        print(" | ".join(cells), flush=True)

    def markdown(self) -> str:
        """Return it as Markdown."""
        lines = [f"## {self.title}", ""]
        if self.rows:
            lines += [f"| {' | '.join(self.columns)} |", f"|---|{'---:|' * (len(self.columns) - 1)}"]
            lines += [f"| {' | '.join(row)} |" for row in self.rows]
        if self.note:
            lines += ["", self.note]
        return "\n".join(lines) + "\n"


def save(tables: Sequence[Table], file: Path) -> None:
    """Write tables where the part that collects all of them looks."""
    file.write_text(json.dumps([asdict(table) for table in tables], indent=1))


def load(file: Path) -> list[Table]:
    """Read what `save` wrote; nothing if the part did not get that far."""
    return [Table(**table) for table in json.loads(file.read_text())] if file.is_file() else []

"""How much of a mapped file is in memory (Linux)."""

from __future__ import annotations

from pathlib import Path


def resident(path: Path) -> int:
    """Return how many bytes of a file this process has mapped and in memory."""
    found, mine = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if not name.endswith(":"):
            mine = line.endswith(str(path))
        elif mine and name == "Rss:":
            found += int(rest.split()[0]) * 1024
    return found

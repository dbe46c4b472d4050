"""Which tile sizes, warps and stages a kernel runs with: measured once for a chip and stored, never tried when serving.

`chips/NAME.json` holds, for each kernel and key (what its speed depends on), the choice that was fastest when
`benchmarks/gpu/tune.py` ran on that chip. Where it says nothing, the kernel's own default holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

CHIPS = Path(__file__).with_name("chips")
KernelConfig = dict[str, int]


def chip_file(name: str) -> Path:
    """Return where the configurations for a chip of this name, such as "NVIDIA H200", are stored."""
    return CHIPS / (name.lower().replace(" ", "-").replace("/", "-") + ".json")


class TunedConfigs:
    """The stored configurations of one chip: kernel -> key -> configuration."""

    def __init__(self, table: Mapping[str, Mapping[str, Mapping[str, int]]] | None = None) -> None:
        self._table = table or {}

    @classmethod
    def of_chip(cls, name: str) -> TunedConfigs:
        """Read what is stored for a chip; nothing for one that was never tuned."""
        file = chip_file(name)
        return cls(json.loads(file.read_text())["choices"]) if file.is_file() else cls()

    def get(self, kernel: str, key: str, default: KernelConfig) -> KernelConfig:
        """Return the stored configuration of a kernel and key if it has the parameters of `default`, else `default`."""
        stored = self._table.get(kernel, {}).get(key)
        return dict(stored) if stored is not None and stored.keys() == default.keys() else default

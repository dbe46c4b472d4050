"""Checkpoints of the cases, each written once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parity.harness import write_case


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return a function from the name of a case to the folder of its checkpoint."""
    folders: dict[str, Path] = {}

    def get(case: str) -> Path:
        if case not in folders:
            folders[case] = write_case(tmp_path_factory.mktemp(case), case)
        return folders[case]

    return get

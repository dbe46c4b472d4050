"""The scripts that measure on a GPU run, as toys in the interpreter, so that they do when there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks/gpu/run.py"


@pytest.mark.slow
def test_every_part_leaves_its_tables(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(tmp_path), "--parts", "limits,engine,peers,cold"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert all(how.startswith("done") for how in report["ended"].values())
    titles = {table["title"]: len(table["rows"]) for tables in report["tables"].values() for table in tables}
    assert min(titles[name] for name in ("Decode steps", "Prompts", "Throughput", "Cold start")) > 0
    assert "toys" in (tmp_path / "report.md").read_text()

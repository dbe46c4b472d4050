"""The scripts that measure on a GPU run, as toys in the interpreter, so that they do when there is one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[3] / "benchmarks/gpu/run.py"
TOPICS = ("attention", "blocks", "experts", "latent", "linear", "lora", "rows", "sampling")
TABLES = {  # of each part, with the rows that a toy run leaves at least
    "limits": {"Limits of no GPU": 4},
    "correctness": {"Correctness": 1},
    "kernels": {f"Kernels: {topic}": 6 for topic in TOPICS},
    "engine": {"Decode steps": 8, "Prompts": 2, "Throughput": 1},
    "peers": {"Beside transformers": 3},
    "cold": {"Cold start": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("part", TABLES)
def test_a_part_leaves_its_tables(tmp_path: Path, part: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2] / "src")}
    command = [sys.executable, str(SCRIPT), "--small", "--out", str(tmp_path), "--parts", part]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["ended"][part].startswith("done")
    rows = {table["title"]: len(table["rows"]) for table in report["tables"][part]}
    assert all(rows[title] >= least for title, least in TABLES[part].items()), rows
    assert "failed: " not in json.dumps([row for row in report["tables"][part] if part != "peers"])
    assert "toys" in (tmp_path / "report.md").read_text()

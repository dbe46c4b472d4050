"""Twenty thousand requests made from the server's own description, right ones and wrong ones, held against it.

Needs the extra `robustness`. QUIRE_FUZZ_EXAMPLES is the number of examples for each operation; the count of requests is
printed. Not checked is `positive_data_acceptance`: what fields exclude each other no description of this kind can say.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.server import serve

pytest.importorskip("schemathesis", reason="needs the extra robustness")

EXAMPLES = int(os.environ.get("QUIRE_FUZZ_EXAMPLES", "500"))
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = ("--api-key", "secret", "--enable-debug-endpoints", "--request-timeout", "10", "--max-model-len", "256")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_request_made_from_the_description_is_answered_otherwise(tmp_path: Path) -> None:
    with serve(tmp_path / "log", *OPTIONS, "--num-gpu-blocks-override", "256") as server:
        engine = server.children()
        command = [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{server.url}/openapi.json"),
            *("--phases", "examples,coverage,fuzzing,stateful", "--mode", "all", "--seed", "1"),
            *("--checks", "all", "--exclude-checks", "positive_data_acceptance", "--continue-on-failure"),
            *("--header", "Authorization: Bearer secret", "--max-examples", str(EXAMPLES), "--request-timeout", "30"),
            *("--suppress-health-check", "all", "--warnings", "off", "--no-color"),
        ]
        environment = dict(
            os.environ, SCHEMATHESIS_HOOKS="tests.robustness.fuzz_checks", PYTHONPATH=f"{ROOT}:{ROOT}/src"
        )
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1700)
        print(done.stdout[-3000:])
        count = re.search(r"(\d+) generated", done.stdout)
        assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
        assert count and int(count[1]) > 10 * EXAMPLES
        assert server.children() == engine, "the engine was restarted"
        assert "Traceback" not in (tmp_path / "log").read_text()

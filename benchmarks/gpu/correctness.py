"""Whether the kernels are right on this GPU: the tests of the kernels and of whole models, and memory checkers.

The tests are those that run in Triton's interpreter elsewhere, here on the device, with those that need one. They are
shared out among processes: kernels are compiled side by side then, and one that breaks its CUDA context takes only the
tests of its own process with it. Nothing of pytest is needed but itself.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from report import Table
from running import run_limited

ROOT = Path(__file__).resolve().parents[2]
ELSEWHERE = ("_compiled.py", "test_benchmark_scripts.py", "test_kernel_checks.py", "test_compile_ahead.py")  # no GPU's
SMALL = ["tests/kernels/gpu/test_host_blocks.py"]
GROUPS = {  # what is run, and seconds for all of it
    "kernels": (["tests/kernels/gpu/test_*.py"], 210.0),
    "models and engine": (["tests/e2e/test_gpu_*.py", "tests/parity/test_gpu*.py"], 230.0),
}
TOGETHER = 12  # tests of a process
MAX_PROCESSES = 14
MAX_SHOWN = 40  # failures
SANITIZED = ("tests/kernels/gpu/test_rows.py", "tests/kernels/gpu/test_attention.py")
SANITIZER_SECONDS = 90.0
SETTINGS = """[pytest]
pythonpath = {root}/src {root}
addopts = --import-mode=importlib -p no:cacheprovider
xfail_strict = true
markers =
    slow: here they all run
    gpu: needs an NVIDIA GPU
    soak: not here
    browser: not here
"""


@dataclass(frozen=True, slots=True)
class Said:
    """How a process of tests ended: its exit code, None if it was stopped; what it printed."""

    code: int | None
    text: str

    @property
    def counts(self) -> Counter[str]:
        """Tests by how they ended, from the last line."""
        last = (self.text.strip().splitlines() or [""])[-1]
        found = re.findall(r"(\d+) (passed|failed|skipped|error|xfailed)", last)
        return Counter({what: int(number) for number, what in found})

    @property
    def failures(self) -> list[str]:
        """A line for each test that failed, or what else there is to say."""
        lines = [line for line in self.text.splitlines() if line.startswith(("FAILED", "ERROR"))]
        if self.code in (0, 1, 5):  # 5: nothing was left to run
            return lines
        how = "stopped" if self.code is None else f"exit code {self.code}"
        return [*lines, f"{how}: {(self.text.strip().splitlines() or [''])[-1]}"]


def check(folder: Path, *, small: bool = False, only: str = "", keep: Callable[[list[Table]], None]) -> list[Table]:
    """Return what pytest and compute-sanitizer said; what they printed goes to files in `folder`, tables to `keep`."""
    table, failed = Table("Correctness", ("what", "result", "seconds")), Table("Failures", ("what", "how"))
    tables = [table, failed]
    with tempfile.TemporaryDirectory() as settings:
        pytest = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            str(Path(settings) / "pytest.ini"),
            "--rootdir",
            str(ROOT),
        ]
        (Path(settings) / "pytest.ini").write_text(SETTINGS.format(root=ROOT))
        pytest += ["-m", "not slow"] if small else []
        for name, (patterns, seconds) in {"a few": (SMALL, 200.0)}.items() if small else GROUPS.items():
            if only in name:
                _group(name, _files(patterns), seconds, pytest, folder, table, failed)
                keep(tables)
        for path in SANITIZED if not small and not only else ():
            _sanitize(path, pytest, folder, table)
            keep(tables)
    return tables


def _files(patterns: Sequence[str]) -> list[str]:
    """Return the files that patterns name, without those whose tests are for machines without a GPU."""
    found = [str(file.relative_to(ROOT)) for pattern in patterns for file in sorted(ROOT.glob(pattern))]
    return [name for name in found if not name.endswith(ELSEWHERE)]


def _group(
    name: str, files: list[str], seconds: float, pytest: list[str], folder: Path, table: Table, failed: Table
) -> None:
    """Run the tests of some files and add to the tables."""
    started = time.perf_counter()
    listed = run_limited([*pytest, "--collect-only", *files], seconds, cwd=ROOT)
    (folder / f"{name} - list.log").write_text(listed.text)
    tests = [line for line in listed.text.splitlines() if "::" in line and not line.startswith(("ERROR", " "))]
    failed_lists = [line for line in listed.text.splitlines() if line.startswith("ERROR")]
    shares = [tests[first : first + TOGETHER] for first in range(0, len(tests), TOGETHER)]

    def run(number: int) -> Said | None:
        left = seconds - (time.perf_counter() - started)
        if left < 1.0:
            return None
        done = run_limited(
            [*pytest, "-rfE", *shares[number]], left, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "2"}
        )
        (folder / f"{name} {number}.log").write_text(done.text)
        return Said(done.code, done.text)

    with ThreadPoolExecutor(max(1, min(MAX_PROCESSES, (os.cpu_count() or 2) - 2))) as pool:
        said = list(pool.map(run, range(len(shares))))
    counts = sum((one.counts for one in said if one is not None), Counter[str]())
    counts["not run"] = len(tests) - sum(counts.values())
    failures = [*failed_lists, *(line for one in said if one is not None for line in one.failures)]
    words = ", ".join(f"{number} {what}" for what, number in counts.items() if number) or "no tests"
    table.add(name, words, f"{time.perf_counter() - started:.0f}", **{"what": name, **counts})
    for line in failures[:MAX_SHOWN]:
        failed.add(name, line[:300].replace("|", "/"))
    if len(failures) > MAX_SHOWN:
        failed.add(name, f"and {len(failures) - MAX_SHOWN} more: see the files beside the report")


def _sanitize(path: str, pytest: list[str], folder: Path, table: Table) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        table.add(f"compute-sanitizer {path}", "not installed", "")
        return
    checked = [tool, "--tool", "memcheck", "--target-processes", "all", "--error-exitcode", "9"]
    # Of memory that torch keeps for later the tool does not know who has which part.
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    started = time.perf_counter()
    command = [*checked, *pytest, "-x", "-m", "not slow and not gpu", path]
    done = run_limited(command, SANITIZER_SECONDS, cwd=ROOT, env=environment)
    (folder / f"sanitizer {Path(path).stem}.log").write_text(done.text)
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", done.text)
    how = "stopped" if done.code is None else f"exit code {done.code}"
    said = f"{how}, {max(map(int, errors), default=0)} errors" if errors else how
    table.add(f"compute-sanitizer {path}", said, f"{time.perf_counter() - started:.0f}")


if __name__ == "__main__":
    subprocess.run([sys.executable, str(ROOT / "benchmarks/gpu/run.py"), "--parts", "correctness", *sys.argv[1:]])

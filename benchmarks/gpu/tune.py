"""Tries the candidates of every kernel that has some, and stores the fastest (`kernels/gpu/tuned_configs.py`).

    PYTHONPATH=src python benchmarks/gpu/tune.py [--only attention] [--out FOLDER]

It needs a GPU. The file goes to `src/quire/kernels/gpu/chips`, or to the folder given; it says with which versions.
"""

from __future__ import annotations

import argparse
import json
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the cases' modules are found from there

import torch
import triton
from case import Case
from kernel_times import cases, new_backend, topics
from measure import seconds

from quire.kernels.gpu.compile_ahead import CompileAhead
from quire.kernels.gpu.tuned_configs import CHIPS, TunedConfigs, chip_file


def best_choice(case: Case, backend: object) -> tuple[dict[str, int], float, float]:
    """Return the fastest candidate, its time, and that of the slowest that ran [seconds]."""
    assert case.tuning is not None
    times = []
    choices = [TunedConfigs({case.tuning.kernel: {case.tuning.key: candidate}}) for candidate in case.tuning.candidates]
    with CompileAhead():  # compiled side by side
        for backend.tuned_configs in choices:  # type: ignore[attr-defined]
            with suppress(Exception):  # boundary: it is told again below
                case.run(0)
    for candidate, backend.tuned_configs in zip(case.tuning.candidates, choices, strict=True):  # type: ignore[attr-defined]
        try:
            times.append((seconds(case.run, recorded=case.recorded), dict(candidate)))
        except Exception as error:  # boundary: too much shared memory, say; the others may do
            print(f"  {candidate}: {type(error).__name__}")
            torch.cuda.synchronize()
    backend.tuned_configs = TunedConfigs()  # type: ignore[attr-defined]
    times.sort(key=lambda pair: pair[0])
    return times[0][1], times[0][0], times[-1][0]


def main() -> None:
    """Tune, print, store."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="topics with this in their name")
    parser.add_argument("--out", type=Path, default=CHIPS, help="folder for the file")
    args = parser.parse_args()
    chip = torch.cuda.get_device_name()
    file = args.out / chip_file(chip).name
    stored = json.loads(file.read_text())["choices"] if file.is_file() else {}
    made_with = f"torch {torch.__version__}, triton {triton.__version__}"
    args.out.mkdir(parents=True, exist_ok=True)
    for topic in topics():
        if args.only not in topic:
            continue
        backend = new_backend()
        for case in cases(topic, backend):
            if case.tuning is None:
                continue
            choice, fastest, slowest = best_choice(case, backend)
            stored.setdefault(case.tuning.kernel, {})[case.tuning.key] = choice
            print(f"{case.name}: {choice}, {fastest * 1e6:.1f} us (slowest {slowest * 1e6:.1f})", flush=True)
            file.write_text(json.dumps({"chip": chip, "made_with": made_with, "choices": stored}, indent=1) + "\n")
    print(f"stored in {file}")


if __name__ == "__main__":
    main()

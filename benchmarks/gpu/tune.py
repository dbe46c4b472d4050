"""Tries the candidates of every kernel that has some, and stores the fastest (`kernels/gpu/tuned_configs.py`).

    PYTHONPATH=src python benchmarks/gpu/tune.py [--only attention] [--out FOLDER]

Several cases may share a key, such as decodes of one model with short and long contexts: its choice is the candidate
whose times, each over that of the default in the same case, have the smallest geometric mean. One that is not faster
than the default by MIN_GAIN is not stored. It needs a GPU. The file goes to `src/quire/kernels/gpu/chips`, or to the
folder given; it says with which versions it was made, and is written after each case.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
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

ROUNDS = 3  # of a measurement; many candidates share the noise
MIN_GAIN = 0.02

Ratios = dict[str, list[float]]  # by candidate, as JSON: its times over those of the default, one for each case


def ratios_of(case: Case, backend: object) -> dict[str, float]:
    """Return the time of each candidate that runs over that of the default, by candidate."""
    assert case.tuning is not None
    choices = [TunedConfigs({case.tuning.kernel: {case.tuning.key: candidate}}) for candidate in case.tuning.candidates]
    with CompileAhead():  # compiled side by side
        for backend.tuned_configs in choices:  # type: ignore[attr-defined]
            with suppress(Exception):  # boundary: whoever measures it sees it again
                case.run(0)
    backend.tuned_configs = TunedConfigs()  # type: ignore[attr-defined]
    default = seconds(case.run, recorded=case.recorded)
    ratios = {}
    for candidate, backend.tuned_configs in zip(case.tuning.candidates, choices, strict=True):  # type: ignore[attr-defined]
        try:
            ratios[json.dumps(candidate)] = seconds(case.run, recorded=case.recorded, rounds=ROUNDS) / default
        except Exception as error:  # boundary: too much shared memory, say; the others may do
            print(f"  {candidate}: {type(error).__name__}")
            torch.cuda.synchronize()
    backend.tuned_configs = TunedConfigs()  # type: ignore[attr-defined]
    best = min(ratios, key=ratios.__getitem__, default="none")
    print(f"{case.name}: default {default * 1e6:.1f} us, best {best} x {ratios.get(best, 1.0):.2f}", flush=True)
    return ratios


def best_choice(ratios: Ratios) -> tuple[dict[str, int], float] | None:
    """Return the candidate with the smallest geometric mean of ratios, of those that ran in all cases, and that mean.

    None if no candidate is faster than the default.
    """
    num_cases = max(map(len, ratios.values()), default=0)
    means = {
        candidate: math.exp(sum(map(math.log, found)) / num_cases)
        for candidate, found in ratios.items()
        if len(found) == num_cases
    }
    best = min(means, key=means.__getitem__, default=None)
    return None if best is None or means[best] > 1 - MIN_GAIN else (json.loads(best), means[best])


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
    found: dict[tuple[str, str], Ratios] = defaultdict(lambda: defaultdict(list))
    for topic in topics():
        if args.only not in topic:
            continue
        backend = new_backend()
        for case in cases(topic, backend):
            if case.tuning is None:
                continue
            kernel, key = case.tuning.kernel, case.tuning.key
            for candidate, ratio in ratios_of(case, backend).items():
                found[kernel, key][candidate].append(ratio)
            choices = stored.setdefault(kernel, {})
            choices.pop(key, None)
            if (best := best_choice(found[kernel, key])) is not None:
                choices[key] = best[0]
            file.write_text(json.dumps({"chip": chip, "made_with": made_with, "choices": stored}, indent=1) + "\n")
    for (kernel, key), ratios in found.items():
        best = best_choice(ratios)
        print(f"{kernel} {key}: {'default' if best is None else f'{best[0]} x {best[1]:.2f}'}")
    print(f"stored in {file}")


if __name__ == "__main__":
    main()

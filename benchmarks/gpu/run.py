"""Everything that is to be shown on a GPU, in one command: correctness, kernels, steps, peers, cold starts.

    PYTHONPATH=src python benchmarks/gpu/run.py --out results [--parts limits,correctness,kernels,engine,peers,cold]

It runs from the source tree on a machine without network: weights are made up on the device. Each part is a process
of its own with a time limit, so that one which fails or hangs does not take the others with it; the limits of the
device are measured first, and all figures are compared with those. `report.md` and `report.json` in the folder of
`--out` say what came out, also of a run that was cut short. Without a GPU, `--small` runs toys in Triton's
interpreter, which shows that the scripts work and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src"), str(ROOT), str(ROOT / "benchmarks")]
PARTS = ("limits", "correctness", "kernels", "engine", "peers", "cold")
LIMITS_FILE = "measured-limits.json"


def run_part(part: str, args: argparse.Namespace) -> None:
    """Do one part in this process and save its tables as they grow."""
    from measure import Limits, measure_limits
    from report import Table, save

    file = args.out / LIMITS_FILE
    if part == "limits" or not file.is_file():
        (measure_limits(256, 2**24) if args.small else measure_limits()).save(file)
    limits = Limits.load(file)

    def keep(tables: list[Table]) -> None:
        """Save what there is, so that a part which is stopped has said something."""
        save(tables, args.out / f"{part}.json")

    if part == "limits":
        table = Table(f"Limits of {limits.device}", ("what", "measured"))
        for way, rate in limits.transfers.items():
            table.add(f"memory, {way}", f"{rate / 1e12:.3f} TB/s")
        for unit, rate in limits.flops.items():
            table.add(f"products of {unit}", f"{rate / 1e12:.0f} T/s")
        table.add("one launch in a graph", f"{limits.launch * 1e6:.2f} us")
        keep([table])
    elif part == "correctness":
        from correctness import check

        keep(check(args.out, small=args.small, only=args.only, keep=keep))
    elif part == "kernels":
        from kernel_times import measure_kernels

        keep(measure_kernels(limits, args.only, small=args.small, keep=keep))
    elif part == "engine":
        from engine_steps import measure_engine

        keep(measure_engine(limits, small=args.small, only=args.only, keep=keep))
    elif part == "peers":
        from beside_transformers import measure_peers

        keep(measure_peers(small=args.small, keep=keep))
    elif part == "cold":
        from cold_start import measure_cold

        keep(measure_cold(small=args.small, keep=keep))


def environment() -> dict[str, str]:
    """Return the environment of the parts: ours, and Triton's interpreter where there is no GPU."""
    from quire.kernels.gpu.probe import find_gpus

    paths = os.pathsep.join(sys.path[:4])
    made = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [paths, os.environ.get("PYTHONPATH", "")]))}
    return made if find_gpus() else {**made, "TRITON_INTERPRET": "1"}


def main() -> None:
    """Run the parts one after the other and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the report")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--only", default="", help="kernels, engine: cases with this in their name")
    parser.add_argument("--part-seconds", type=float, default=540.0, help="time limit of each part")
    parser.add_argument("--small", action="store_true", help="toys, to test the scripts without a GPU")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.part:
        run_part(args.part, args)
        return
    from running import run_limited

    command = [sys.executable, str(Path(__file__)), "--out", str(args.out), "--only", args.only]
    command += ["--small"] if args.small else []
    ended = {}
    for part in args.parts.split(","):
        started = time.perf_counter()
        code = run_limited([*command, "--part", part], args.part_seconds, env=environment(), shown=True).code
        how = f"stopped after {args.part_seconds:.0f} s" if code is None else f"failed with {code}" if code else "done"
        ended[part] = f"{how} ({time.perf_counter() - started:.0f} s)"
        print(f"--- {part}: {ended[part]}", flush=True)
        write_report(args.out, ended)
    if any("done" not in how for how in ended.values()):
        sys.exit(1)


def write_report(folder: Path, ended: dict[str, str]) -> None:
    """Put together what the parts have saved."""
    import torch
    import triton
    from common import commit_line, machine_line
    from report import load

    tables = {part: load(folder / f"{part}.json") for part in ended}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU: toys in Triton's interpreter"
    lines = [
        f"# GPU benchmark, {time.strftime('%Y-%m-%d')}",
        "",
        f"{gpu}; {machine_line()}; torch {torch.__version__}, triton {triton.__version__}; commit {commit_line()}",
        "",
        *(f"- {part}: {how}" for part, how in ended.items()),
        "",
    ]
    for part in ended:
        lines += [table.markdown() for table in tables[part]]
    (folder / "report.md").write_text("\n".join(lines))
    data = {"gpu": gpu, "ended": ended, "tables": {part: [asdict(t) for t in made] for part, made in tables.items()}}
    (folder / "report.json").write_text(json.dumps(data, indent=1))


if __name__ == "__main__":
    main()

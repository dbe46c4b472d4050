"""How far the simulator is from the machine it was calibrated on: calibrate, simulate loads, run them, compare.

Each load is replayed twice by the same code: in virtual time over the fitted cost model, and in real time over the real
model, with requests added when they arrive. Loads are a burst, and Poisson arrivals at shares of the rate that the
simulator says the machine can take. The machine must do nothing else.

    python benchmarks/simulate_accuracy.py [--model quire-demo] [--calibrate-seconds 60] [--seconds 20]
"""

from __future__ import annotations

import argparse
import gc
import time
from typing import Any

from common import print_header, print_table

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.resolve import load_info
from quire.simulate.calibrate import calibrate, calibration_table
from quire.simulate.cost import FittedCost
from quire.simulate.driver import RunLog, drive
from quire.simulate.report import summarize
from quire.simulate.run import simulate
from quire.simulate.trace import Synthetic, TraceRequest, draw

FIGURES = (  # name, factor to what is shown, path into the summary
    ("output tokens/s", 1.0, ("output_throughput",)),
    ("mean TTFT ms", 1e3, ("ttft", "mean")),
    ("p99 TTFT ms", 1e3, ("ttft", "p99")),
    ("mean TPOT ms", 1e3, ("tpot", "mean")),
    ("p99 TPOT ms", 1e3, ("tpot", "p99")),
    ("mean E2E ms", 1e3, ("e2e", "mean")),
)


class WallClock:
    """Real time, from the moment of construction."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def __call__(self) -> float:
        """Return seconds since construction."""
        return time.perf_counter() - self._start

    def wait_until(self, when: float) -> None:
        """Sleep until `when`."""
        left = when - self()
        if left > 0:
            time.sleep(left)


def main() -> None:
    """Calibrate, then compare load after load."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--calibrate-seconds", type=float, default=60.0)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load, about")
    parser.add_argument("--prompt", type=int, help="mean tokens of a prompt; default: a quarter of the context, 512")
    parser.add_argument("--output", type=int, default=64, help="mean tokens of an output")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8], help="shares of the rate of a burst")
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--kv-cache", default="512MiB", help="memory of the KV cache")
    args = parser.parse_args()
    print_header("Simulated against real")
    config = EngineConfig.from_kwargs(
        model=args.model, dtype=args.dtype, max_num_seqs=args.max_num_seqs, kv_cache_memory_bytes=args.kv_cache
    )
    found = calibrate(config, seconds=args.calibrate_seconds)
    print("```\n" + calibration_table(found) + "\n```\n")
    info = load_info(config)
    prompt = args.prompt or min(512, info.max_model_len // 4)
    load = Synthetic("burst", num=200, prompt=prompt, output=args.output, spread=0.5)
    rate = virtual(config, info, draw([load]), found.cost)["request_throughput"]
    loads = {"burst": Synthetic("burst", **lengths(load, max(8, round(rate * args.seconds))))}
    for share in args.loads:
        count = max(8, round(rate * share * args.seconds))
        loads[f"{share:.0%} of a burst's rate"] = Synthetic("poisson", rate=rate * share, **lengths(load, count))
    rows = []
    for name, wanted in loads.items():
        requests = draw([wanted])
        predicted = virtual(config, info, requests, found.cost)
        measured = real(config, info, requests)
        rows += compared(f"{name}, {len(requests)} requests", predicted, measured)
    print_table(("load", "figure", "simulated", "measured", "error"), rows)


def lengths(load: Synthetic, count: int) -> dict[str, Any]:
    """Return what all loads share; each draws its own lengths."""
    return {"num": count, "prompt": load.prompt, "output": load.output, "spread": load.spread, "seed": count}


def virtual(config: EngineConfig, info: ModelInfo, requests: list[TraceRequest], cost: FittedCost) -> dict[str, Any]:
    """Replay in virtual time."""
    return summarize(simulate(config, info, requests, cost, cost.memory).log)


def real(config: EngineConfig, info: ModelInfo, requests: list[TraceRequest]) -> dict[str, Any]:
    """Replay on the model, in a fresh engine."""
    prompts = {request.number: request.prompt_token_ids(info.vocab_size) for request in requests}
    core = EngineCore(config, info=info)
    try:
        clock = WallClock()
        core.clock = clock
        gc.collect()
        log: RunLog = drive(core, requests, clock, lambda request: prompts[request.number])
    finally:
        core.close()
    return summarize(log)


def compared(name: str, predicted: dict[str, Any], measured: dict[str, Any]) -> list[list[str]]:
    """Return the table's rows of one load."""
    rows = []
    for words, factor, path in FIGURES:
        pair = []
        for result in (predicted, measured):
            value: Any = result
            for key in path:
                value = value[key]
            pair.append(value * factor)
        rows.append([name, words, *(f"{value:.2f}" for value in pair), f"{pair[0] / pair[1] - 1:+.1%}"])
        name = ""
    return rows


if __name__ == "__main__":
    main()

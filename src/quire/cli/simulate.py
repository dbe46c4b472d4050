"""`quire simulate`: replay a trace against the engine's scheduler in virtual time, or measure a machine for that.

What is printed depends on trace and options alone; how long the simulation itself took goes to standard error.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import OFFLINE_GROUPS, LogOptions, engine_config, options_from
from quire.cli.output import write_json, write_text
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.options import option

if TYPE_CHECKING:
    from quire.simulate.trace import TraceRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Simulation"""

    trace: str | None = option(
        None, "JSON lines of requests: a Mooncake trace, or prompt_tokens, output_tokens and arrival.", metavar="FILE"
    )
    synthetic: list[str] = option(
        [],
        "Synthetic load, such as poisson:rate=4,num=1000,prompt=512,output=128; kinds: poisson, uniform, burst; more "
        "keys: start, spread, prefix, groups, priority, tenant, background, seed. May be repeated; loads are merged.",
        metavar="LOAD",
    )
    time_scale: float = option(1.0, "Factor on the times of a trace; 0.5 doubles the load.", low=1e-6, high=1e6)
    limit: int | None = option(None, "Replay only the first requests of a trace.", low=1)
    cost_model: str | None = option(
        None,
        "How long steps take: a file written by --calibrate, or roofline:bandwidth=GB/s,gflops=GFLOP/s,memory=GiB "
        "(further names: overhead, host, link, disk, params) with the sizes of MODEL.",
        metavar="FILE|ROOFLINE",
    )
    slo_ttft: float | None = option(None, "SLO for the time to first token, in milliseconds.", low=0.0, metavar="MS")
    slo_tpot: float | None = option(None, "SLO for the time per output token, in milliseconds.", low=0.0, metavar="MS")
    waste: bool = option(False, "Also report KV slots wasted by contiguous, power-of-two and paged buffers.")
    json: bool = option(False, "Print the report as JSON.")
    output: str | None = option(None, "CSV file with one line per request.", metavar="FILE")
    calibrate: bool = option(False, "Measure MODEL on this machine and fit a cost model, instead of simulating.")
    calibrate_seconds: float = option(60.0, "Approximate duration of --calibrate.", low=0.0, high=86400.0)
    save: str | None = option(None, "File for the cost model that --calibrate fits.", metavar="FILE")


FLAGS = [*flags_of((SimulateOptions,)), *flags_of(OFFLINE_GROUPS)]


def run(values: dict[str, Any]) -> int:
    """Simulate or calibrate, and print the report."""
    options: SimulateOptions = options_from(SimulateOptions, values)
    config = engine_config(values)
    _check(options)
    logs.setup(options_from(LogOptions, values).log_level)
    return _calibrate(options, config) if options.calibrate else _simulate(options, config)


def _check(options: SimulateOptions) -> None:
    """Raise `ConfigError` for options that contradict or lack each other."""
    if options.calibrate:
        if options.trace is not None or options.synthetic or options.cost_model is not None:
            raise ConfigError("calibrate contradicts trace, synthetic and cost_model", param="calibrate")
        return
    if options.save is not None:
        raise ConfigError("save needs calibrate", param="save")
    if (options.trace is None) == (not options.synthetic):
        raise ConfigError("there is nothing to replay: give either --trace FILE or --synthetic LOAD", param="trace")
    if options.cost_model is None:
        raise ConfigError(
            "cost_model: say how long steps take: --cost-model FILE (quire simulate --calibrate --save FILE makes one) "
            "or --cost-model roofline:bandwidth=...,gflops=...,memory=...",
            param="cost_model",
        )


def _simulate(options: SimulateOptions, config: EngineConfig) -> int:
    from quire.engine.resolve import load_info
    from quire.simulate.report import as_csv, summarize_run, table
    from quire.simulate.run import long_enough, make_cost, simulate
    from quire.simulate.waste import WasteMeter, waste_report, waste_table

    requests = _requests(options)
    info = long_enough(load_info(config), config, requests)
    cost, memory = make_cost(str(options.cost_model), config, info)
    meter = WasteMeter(requests) if options.waste else None
    started = time.perf_counter()
    gc.disable()  # what a replay makes it drops by itself; walking hundreds of thousands of blocks finds nothing
    try:
        found = simulate(config, info, requests, cost, memory, meter)
    finally:
        gc.enable()
    print(f"simulated in {time.perf_counter() - started:.1f} s", file=sys.stderr)
    limits = {
        name: None if value is None else value / 1e3
        for name, value in (("slo_ttft", options.slo_ttft), ("slo_tpot", options.slo_tpot))
    }
    result = summarize_run(found, **limits)
    if meter is not None:
        result["waste"] = waste_report(meter.slots)
    if options.output is not None:
        write_text(options.output, as_csv(found.log.records), "output")
    if options.json:
        print(json.dumps(result, indent=1))
        return 0
    print(table(result))
    if meter is not None:
        print("\n" + waste_table(result["waste"]))
    return 0


def _requests(options: SimulateOptions) -> list[TraceRequest]:
    from quire.simulate.trace import draw, parse_synthetic, read_trace

    if options.trace is not None:
        return read_trace(options.trace, time_scale=options.time_scale, limit=options.limit)
    return draw([parse_synthetic(text) for text in options.synthetic])[: options.limit]


def _calibrate(options: SimulateOptions, config: EngineConfig) -> int:
    import platform

    from quire.simulate.calibrate import calibrate, calibration_table

    machine = f"{platform.machine()}, {platform.system()}"
    found = calibrate(config, seconds=options.calibrate_seconds, machine=machine)
    if options.save is not None:
        write_json(options.save, msgspec.to_builtins(found.cost), "save")
    print(calibration_table(found))
    return 0


COMMAND = Command(
    run=run, flags=FLAGS, description="Replay a trace against the scheduler and the block manager in virtual time."
)

"""`quire bench latency`: how long one batch of equal requests takes, from the call to its last token.

All requests arrive together and the batch runs alone; the prompts are new in each iteration, so that the prefix cache
(off unless asked for) cannot help across iterations.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import OFFLINE_GROUPS, LogOptions, engine_config, open_llm, options_from
from quire.cli.output import print_table, write_json
from quire.options import option
from quire.sampling_params import SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from quire.frontend.llm import LLM

PERCENTILES = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyOptions:
    """Latency benchmark"""

    input_len: int = option(32, "Tokens per prompt.", low=1, metavar="TOKENS")
    output_len: int = option(128, "Tokens generated per request.", low=1, metavar="TOKENS")
    batch_size: int = option(8, "Requests in the batch.", low=1)
    n: int = option(1, "Completions per request.", low=1, high=128)
    num_iters_warmup: int = option(10, "Iterations before measuring.", low=0)
    num_iters: int = option(30, "Iterations measured.", low=1)
    output_json: str | None = option(None, "File for the result.", metavar="FILE")
    disable_detokenize: bool = option(False, "Do not detokenize outputs.")


FLAGS = [*flags_of((LatencyOptions,)), *flags_of(OFFLINE_GROUPS)]


def run(values: dict[str, Any]) -> int:
    """Run the benchmark and print its result."""
    options: LatencyOptions = options_from(LatencyOptions, values)
    config = engine_config({"enable_prefix_caching": False, **values})
    logs.setup(options_from(LogOptions, values).log_level)
    import numpy as np

    rng = np.random.default_rng(config.model.seed)
    with open_llm(config) as llm:
        for _ in range(options.num_iters_warmup):
            run_batch(llm, options, rng)
        latencies = [run_batch(llm, options, rng) for _ in range(options.num_iters)]
    mean, deviation = float(np.mean(latencies)), float(np.std(latencies))
    percentiles = {str(name): float(np.percentile(latencies, name)) for name in PERCENTILES}
    shown = {"mean": mean, "standard deviation": deviation}
    shown |= {f"{name}th percentile": value for name, value in percentiles.items()}
    print_table(
        f"Latency of {options.batch_size} requests, {options.input_len} tokens in, {options.output_len} out",
        {f"{name} (ms)": value * 1e3 for name, value in shown.items()},
    )
    if options.output_json is not None:
        result = {"avg_latency": mean, "std_latency": deviation, "latencies": latencies, "percentiles": percentiles}
        write_json(options.output_json, result, "output_json")
    return 0


def run_batch(llm: LLM, options: LatencyOptions, rng: np.random.Generator) -> float:
    """Run one batch of fresh random prompts; return the seconds it took."""
    shape = (options.batch_size, options.input_len)
    prompts = [{"prompt_token_ids": ids} for ids in rng.integers(0, llm.vocab_size, shape).tolist()]
    params = SamplingParams(
        n=options.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=options.output_len,
        detokenize=not options.disable_detokenize,
    )
    started = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - started


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Measure the time that one batch of requests takes in the offline engine.",
    arguments=(),
)

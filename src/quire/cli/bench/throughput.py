"""`quire bench throughput`: tokens per second of the offline engine when all requests are there from the start."""

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

    from quire.cli.bench.dataset import Sample
    from quire.frontend.llm import LLM

WARMUP_TOKENS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputOptions:
    """Throughput benchmark"""

    num_prompts: int = option(1000, "Requests.", low=1)
    input_len: int | None = option(
        None, "Tokens per random prompt; default: 1024, or as many as the context allows.", low=1, metavar="TOKENS"
    )
    output_len: int = option(128, "Tokens generated per request.", low=1, metavar="TOKENS")
    random_range_ratio: float = option(
        0.0, "Maximum relative deviation of lengths from input-len and output-len.", low=0.0, high=1.0
    )
    random_prefix_len: int = option(
        0, "Tokens of a prefix that all prompts share, in addition to input-len.", low=0, metavar="TOKENS"
    )
    dataset_path: str | None = option(
        None, 'JSON lines with "prompt" (and "output_tokens"), instead of random prompts.', metavar="FILE"
    )
    n: int = option(1, "Completions per request.", low=1, high=128)
    output_json: str | None = option(None, "File for the result.", metavar="FILE")
    disable_detokenize: bool = option(False, "Do not detokenize outputs.")


FLAGS = [*flags_of((ThroughputOptions,)), *flags_of(OFFLINE_GROUPS)]


def run(values: dict[str, Any]) -> int:
    """Run the benchmark and print its result."""
    options: ThroughputOptions = options_from(ThroughputOptions, values)
    config = engine_config(values)
    logs.setup(options_from(LogOptions, values).log_level)
    import numpy as np

    with open_llm(config) as llm:
        samples = make_samples(llm, options, np.random.default_rng(config.model.seed))
        warm_up(llm, samples)
        elapsed, num_output_tokens = run_samples(llm, samples, options)
    num_input_tokens = sum(len(sample.prompt_token_ids) for sample in samples)
    total = num_input_tokens + num_output_tokens
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(samples),
        "total_num_tokens": total,
        "requests_per_second": len(samples) / elapsed,
        "tokens_per_second": total / elapsed,
    }
    print_table(
        f"Throughput of {len(samples)} requests",
        {
            "elapsed (s)": elapsed,
            "requests per second": result["requests_per_second"],
            "tokens per second, prompt and output": result["tokens_per_second"],
            "output tokens per second": num_output_tokens / elapsed,
            "prompt tokens": num_input_tokens,
            "output tokens": num_output_tokens,
        },
    )
    if options.output_json is not None:
        write_json(options.output_json, result, "output_json")
    return 0


def make_samples(llm: LLM, options: ThroughputOptions, rng: np.random.Generator) -> list[Sample]:
    """Make the requests that `options` describe."""
    from quire.cli.bench.dataset import file_samples, fitting_input_len, random_samples

    if options.dataset_path is None:
        return random_samples(
            rng,
            options.num_prompts,
            vocab_size=llm.vocab_size,
            input_len=fitting_input_len(
                options.input_len, llm.max_model_len, options.output_len, options.random_prefix_len
            ),
            output_len=options.output_len,
            range_ratio=options.random_range_ratio,
            prefix_len=options.random_prefix_len,
        )
    tokenizer = llm.get_tokenizer()
    return file_samples(options.dataset_path, options.num_prompts, tokenizer=tokenizer, output_len=options.output_len)


def warm_up(llm: LLM, samples: list[Sample]) -> None:
    """Run a few tokens, so that nothing is compiled or loaded while time is taken, and forget their prefixes."""
    params = SamplingParams(max_tokens=WARMUP_TOKENS, ignore_eos=True)
    llm.generate([{"prompt_token_ids": samples[0].prompt_token_ids}], params, use_tqdm=False)
    llm.reset_prefix_cache()


def run_samples(llm: LLM, samples: list[Sample], options: ThroughputOptions) -> tuple[float, int]:
    """Generate all of them; return seconds and the number of tokens generated."""
    prompts = [{"prompt_token_ids": sample.prompt_token_ids} for sample in samples]
    params = [
        SamplingParams(
            n=options.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=sample.output_len,
            detokenize=not options.disable_detokenize,
        )
        for sample in samples
    ]
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    elapsed = time.perf_counter() - started
    return elapsed, sum(len(item.token_ids) for output in outputs for item in output.outputs)


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Measure the offline engine with all requests there from the start.",
    arguments=(),
)

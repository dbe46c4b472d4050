"""`quire bench serve`: measures a running server under an open load, at a given rate of arrivals.

Requests are sent at times drawn beforehand, not when earlier ones complete, so that a slow server gets the same load as
a fast one. Results have the keys of `vllm bench serve`.
"""

from __future__ import annotations

import asyncio
import datetime
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import LogOptions, options_from
from quire.cli.output import print_table, progress_bar, write_json
from quire.errors import ConfigError, QuireError
from quire.options import option

if TYPE_CHECKING:
    from quire.cli.bench.dataset import Sample
    from quire.cli.bench.http1 import HttpClient
    from quire.cli.bench.load import LoadRequest, RequestResult
    from quire.tokenizer.tokenizer import Tokenizer

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}
RETRY_SECONDS = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetOptions:
    """Server under test"""

    backend: str = option("openai", "API to use: completions or chat.", choices=tuple(ENDPOINTS))
    base_url: str | None = option(None, "Address such as http://127.0.0.1:8000, instead of host and port.")
    host: str = option("127.0.0.1", "Host of the server.")
    port: int = option(8000, "Port of the server.", low=1, high=65535)
    endpoint: str | None = option(None, "Path of the API; default: the usual one of the backend.")
    api_key: str | None = option(None, "Key of the server.", secret=True)
    model: str | None = option(None, "Model name in requests; default: the first model of the server.")
    tokenizer: str | None = option(None, "Folder or id of the tokenizer for prompts; default: the model's.")
    ready_check_timeout_sec: int = option(600, "Seconds to wait for the server to respond; 0: do not wait.", low=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """Load"""

    num_prompts: int = option(1000, "Requests.", low=1)
    request_rate: float = option(float("inf"), "Requests per second; inf sends all at once.", low=1e-6)
    burstiness: float = option(
        1.0, "Burstiness of the arrivals: 1 is Poisson, lower is burstier, higher is more regular.", low=1e-3
    )
    max_concurrency: int | None = option(None, "Maximum number of concurrent requests; default: unlimited.", low=1)
    num_warmups: int = option(0, "Requests sent before measuring.", low=0)
    dataset_name: str = option("random", "Source of the prompts.", choices=("random", "custom"))
    dataset_path: str | None = option(None, 'JSON lines with "prompt" (and "output_tokens"), for custom.')
    random_input_len: int | None = option(
        None,
        "Tokens per random prompt; default: 1024, or as many as the model's context allows.",
        low=1,
        metavar="TOKENS",
    )
    random_output_len: int = option(128, "Tokens to generate per request.", low=1, metavar="TOKENS")
    random_range_ratio: float = option(0.0, "Maximum relative deviation of lengths.", low=0.0, high=1.0)
    random_prefix_len: int = option(0, "Tokens of a prefix that all random prompts share.", low=0, metavar="TOKENS")
    ignore_eos: bool = option(False, "Generate the full length, ignoring the end-of-sequence token.")
    extra_body: dict[str, Any] = option({}, "JSON object with additional request fields.", json=True)
    seed: int = option(0, "Seed of prompts and arrival times.", low=0, high=2**63 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """Results"""

    percentile_metrics: str = option("ttft,tpot,itl", "Metrics to report: of ttft, tpot, itl, e2el.")
    metric_percentiles: str = option("99", "Percentiles to report, separated by commas.")
    goodput: list[str] = option([], "SLO for goodput in milliseconds, such as ttft:500 (or tpot, e2el).")
    save_result: bool = option(False, "Write the result as JSON.")
    save_detailed: bool = option(False, "Write each request's times and text too.")
    result_dir: str = option(".", "Folder for the result.", metavar="FOLDER")
    result_filename: str | None = option(None, "Name of the result file; default: made of label, rate, model, time.")
    label: str | None = option(None, "Prefix of the name of the result file; default: the backend.")
    disable_tqdm: bool = option(False, "Show no progress bar.")


GROUPS = (TargetOptions, LoadOptions, ResultOptions, LogOptions)
FLAGS = flags_of(GROUPS)


@dataclass(frozen=True, slots=True)
class Plan:
    """The options of one run, checked."""

    target: TargetOptions
    load: LoadOptions
    result: ResultOptions
    limits: dict[str, float]
    names: list[str]
    percentiles: list[float]

    @property
    def base_url(self) -> str:
        """Address of the server, without the path of the API."""
        return self.target.base_url or f"http://{self.target.host}:{self.target.port}"

    @property
    def endpoint(self) -> str:
        """Path of the API."""
        return self.target.endpoint or ENDPOINTS[self.target.backend]


def run(values: dict[str, Any]) -> int:
    """Run the benchmark; return 0 if any request succeeded."""
    logs.setup(options_from(LogOptions, values).log_level)
    plan = make_plan(values)
    summary, results = asyncio.run(measure(plan))
    show(plan, summary)
    for text in sorted({item.error for item in results if item.error})[:5]:
        print(f"error: {text}", file=sys.stderr)
    if plan.result.save_result:
        save(plan, summary, results)
    return 0 if summary["completed"] else 1


def make_plan(values: dict[str, Any]) -> Plan:
    """Check options that depend on one another. Raises `ConfigError`."""
    from quire.cli.bench.metrics import parse_goodput, parse_names, parse_percentiles

    load: LoadOptions = options_from(LoadOptions, values)
    result: ResultOptions = options_from(ResultOptions, values)
    if (load.dataset_name == "custom") != (load.dataset_path is not None):
        raise ConfigError("dataset_name custom and dataset_path need each other", param="dataset_path")
    return Plan(
        options_from(TargetOptions, values),
        load,
        result,
        parse_goodput(result.goodput),
        parse_names(result.percentile_metrics),
        parse_percentiles(result.metric_percentiles),
    )


async def measure(plan: Plan) -> tuple[dict[str, Any], list[RequestResult]]:
    """Run the load; return its summary and the results of all requests."""
    import numpy as np

    from quire.cli.bench.http1 import HttpClient
    from quire.cli.bench.load import arrival_times, run_load
    from quire.cli.bench.metrics import summarize

    key = plan.target.api_key
    client = HttpClient(plan.base_url, {"authorization": f"Bearer {key}"} if key else {})
    try:
        offered, context = await wait_until_ready(client, plan.target.ready_check_timeout_sec)
        model = plan.target.model or offered
        tokenizer = load_tokenizer(plan.target.tokenizer or model)
        rng = np.random.default_rng(plan.load.seed)
        requests = make_requests(plan, model, tokenizer, make_samples(plan, tokenizer, rng, context))
        times = arrival_times(rng, len(requests), plan.load.request_rate, plan.load.burstiness)
        for _ in range(plan.load.num_warmups):
            await run_load(client, plan.endpoint, requests[:1], [0.0])
        with progress_bar("requests", len(requests), disabled=plan.result.disable_tqdm) as on_done:
            started = time.perf_counter()
            results = await run_load(client, plan.endpoint, requests, times, plan.load.max_concurrency, on_done)
            duration = time.perf_counter() - started
    finally:
        await client.close()
    figures = summarize(results, duration, limits=plan.limits, names=plan.names, percentiles=plan.percentiles)
    return describe(plan, model) | figures, results


async def wait_until_ready(client: HttpClient, seconds: float) -> tuple[str, int | None]:
    """Wait until the server lists its models; return the name of the first, and its context length if it is known.

    Raises:
        QuireError: it does not name any in time.
    """
    deadline = time.monotonic() + seconds
    while True:
        try:
            first = (await client.get_json("/v1/models"))["data"][0]
            context = first.get("max_model_len")
            return str(first["id"]), context if isinstance(context, int) else None
        except QuireError:
            if time.monotonic() + RETRY_SECONDS > deadline:
                raise
        except (LookupError, TypeError, AttributeError):
            raise QuireError("the server offers no model at /v1/models") from None
        await asyncio.sleep(RETRY_SECONDS)


def load_tokenizer(name: str) -> Tokenizer:
    """Load the tokenizer that prompts are made with. Raises `ConfigError` naming --tokenizer."""
    from quire.checkpoint.folder import resolve_model
    from quire.frontend.tokenizer_check import load_tokenizer as load

    try:
        return load(resolve_model(name))
    except QuireError as error:
        raise ConfigError(f"no tokenizer to make prompts with; give --tokenizer: {error.message}") from None


def make_samples(plan: Plan, tokenizer: Tokenizer, rng: Any, context: int | None = None) -> list[Sample]:
    """Make the prompts, as token ids; `context` is the longest sequence the model takes, where known."""
    from quire.cli.bench.dataset import file_samples, fitting_input_len, random_samples

    load = plan.load
    if load.dataset_path is not None:
        return file_samples(load.dataset_path, load.num_prompts, tokenizer=tokenizer, output_len=load.random_output_len)
    return random_samples(
        rng,
        load.num_prompts,
        vocab_size=tokenizer.vocab_size,
        input_len=fitting_input_len(load.random_input_len, context, load.random_output_len, load.random_prefix_len),
        output_len=load.random_output_len,
        range_ratio=load.random_range_ratio,
        prefix_len=load.random_prefix_len,
    )


def make_requests(plan: Plan, model: str, tokenizer: Tokenizer, samples: list[Sample]) -> list[LoadRequest]:
    """Make the bodies: token ids for completions, so that lengths are exact; text for chat."""
    from quire.cli.bench.load import LoadRequest, request_body

    extra = ({"ignore_eos": True} if plan.load.ignore_eos else {}) | plan.load.extra_body
    requests = []
    for sample in samples:
        ids = sample.prompt_token_ids
        prompt = tokenizer.decode(ids) if plan.target.backend == "openai-chat" else ids
        body = request_body(plan.target.backend, model, prompt, sample.output_len, extra)
        requests.append(LoadRequest(body, len(ids)))
    return requests


def describe(plan: Plan, model: str) -> dict[str, Any]:
    """Return the part of the result that describes the run."""
    rate = plan.load.request_rate
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).strftime("%Y%m%d-%H%M%S"),
        "backend": plan.target.backend,
        "endpoint_type": plan.target.backend,
        "label": plan.result.label,
        "model_id": model,
        "tokenizer_id": plan.target.tokenizer or model,
        "num_prompts": plan.load.num_prompts,
        "request_rate": "inf" if rate == float("inf") else rate,
        "burstiness": plan.load.burstiness,
        "max_concurrency": plan.load.max_concurrency,
    }


def show(plan: Plan, summary: dict[str, Any]) -> None:
    """Print the figures."""
    from quire.cli.bench.metrics import NAMES

    rows = {
        "requests answered": summary["completed"],
        "requests failed": summary["failed"],
        "duration (s)": summary["duration"],
        "prompt tokens": summary["total_input_tokens"],
        "output tokens": summary["total_output_tokens"],
        "requests per second": summary["request_throughput"],
        "output tokens per second": summary["output_throughput"],
        "output tokens in the best second": summary["max_output_tokens_per_s"],
        "tokens per second, prompt and output": summary["total_token_throughput"],
        "most requests under way": summary["max_concurrent_requests"],
    }
    if plan.limits:
        rows["requests per second within limits"] = summary["request_goodput"]
    print_table(f"Load on {plan.base_url}{plan.endpoint}", rows)
    for name in plan.names:
        suffix = f"_{name}_ms"
        rows = {key.removesuffix(suffix): value for key, value in summary.items() if key.endswith(suffix)}
        print_table(f"{NAMES[name].capitalize()} (ms)", rows)


def save(plan: Plan, summary: dict[str, Any], results: list[RequestResult]) -> None:
    """Write the result file, with lists of one entry per request for --save-detailed."""
    stored = dict(summary)
    if plan.result.save_detailed:
        stored |= {
            "input_lens": [item.prompt_len for item in results],
            "output_lens": [item.output_len for item in results],
            "ttfts": [item.ttft for item in results],
            "itls": [item.itls for item in results],
            "start_times": [item.start for item in results],
            "generated_texts": [item.text for item in results],
            "errors": [item.error for item in results],
        }
    label = plan.result.label or plan.target.backend
    model = Path(summary["model_id"]).name
    name = plan.result.result_filename or f"{label}-{summary['request_rate']}qps-{model}-{summary['date']}.json"
    write_json(Path(plan.result.result_dir) / name, stored, "result_dir")


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Measure a running server: requests arrive at a given rate, whether or not it keeps up.",
    arguments=(),
)

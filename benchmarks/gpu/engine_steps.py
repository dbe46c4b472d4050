"""Steps of whole models in the real engine: decodes and prompts against the roofline, host gaps, throughput.

The engine is an `EngineCore` with dummy weights of published shapes; requests are random token ids, and end tokens are
ignored. A step's time is the wall time of many steps divided by their number, so that what the host adds is in it.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from measure import Limits, on_gpu, synchronize
from report import Table
from shapes import shape_of, work_of, write_config

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest
from quire.sampling_params import SamplingParams

STEPS, SMALL_STEPS = 48, 2  # that are timed
WARM_STEPS, SMALL_WARM_STEPS = 12, 1  # before, in which graphs are recorded
TAIL_STEPS, SMALL_TAIL_STEPS = 16, 3  # after, for steps that are under way
SMALL_TOKENS = 8  # of a step; the largest there can be is computed when an engine starts


@dataclass(frozen=True, slots=True)
class Decode:
    """`batch` sequences after `context` tokens; `goal` is the share of the roofline that is wanted."""

    batch: int
    context: int = 1024
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """`prompts` of `length` tokens at once; `goal` is the share of the peak that is wanted."""

    prompts: int
    length: int
    goal: float | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One model with options, and what is measured on it."""

    shape: str
    decodes: tuple[Decode, ...] = ()
    prefills: tuple[Prefill, ...] = ()
    throughput: tuple[int, int, int] | None = None  # requests at once, prompt tokens, output tokens
    options: dict[str, Any] = field(default_factory=dict)
    unit: str = "bfloat16"

    @property
    def name(self) -> str:
        """How the tables call it."""
        given = ", ".join(f"{key}={value}" for key, value in self.options.items())
        return self.shape + (f" ({given})" if given else "")


SCENARIOS = (
    Scenario(
        "llama-3.1-8b",
        decodes=(Decode(1, goal=0.85), Decode(8), Decode(64, goal=0.75), Decode(256, goal=0.75), Decode(1, 32768)),
        prefills=(Prefill(8, 1024, goal=0.6), Prefill(1, 32768, goal=0.6)),
    ),
    Scenario("llama-3.1-8b", decodes=(Decode(1), Decode(64)), options={"enforce_eager": True}),
    Scenario("llama-3.1-8b", decodes=(Decode(1), Decode(64)), options={"async_scheduling": False}),
    Scenario("llama-3.1-8b", decodes=(Decode(1), Decode(64)), options={"quantization": "fp8"}, unit="float8"),
    Scenario("llama-3.1-8b", decodes=(Decode(1), Decode(64)), options={"quantization": "int4"}, unit="int8"),
    Scenario("llama-3.1-8b", decodes=(Decode(64), Decode(256)), options={"kv_cache_dtype": "fp8"}),
    Scenario("qwen3-0.6b", decodes=(Decode(1, goal=0.6), Decode(64), Decode(256)), throughput=(256, 128, 128)),
    Scenario("qwen3-30b-a3b", decodes=(Decode(1), Decode(64)), prefills=(Prefill(8, 1024),)),
)


class Bench:
    """An engine of one scenario."""

    def __init__(self, scenario: Scenario, folder: Path, *, small: bool) -> None:
        self._steps = SMALL_STEPS if small else STEPS
        self._warm = SMALL_WARM_STEPS if small else WARM_STEPS
        self._tail = SMALL_TAIL_STEPS if small else TAIL_STEPS
        longest = max([1, *(one.context for one in scenario.decodes), *(one.length for one in scenario.prefills)])
        at_once, given, wanted = scenario.throughput or (1, 0, 0)
        most = max([1, at_once, *(one.batch for one in scenario.decodes)])
        tokens = self._tokens = SMALL_TOKENS if small else 8192 if scenario.prefills else 2048
        longest += max([0, *(self._lead(one.batch, one.context) for one in scenario.decodes)])
        longest = max(longest, given + wanted)
        options: dict[str, Any] = {
            "model": str(write_config(scenario.shape, folder, small=small)),
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "device": "cuda",
            "max_model_len": min(longest + STEPS + WARM_STEPS + 64, 40960 if "qwen" in scenario.shape else 131072),
            "max_num_seqs": most if small else max(most, 8),
            "max_num_batched_tokens": tokens,
            "enable_prefix_caching": False,
            "swap_space": 0,
            **({"dtype": "float32"} if small else {}),
            **scenario.options,
        }
        self.config = EngineConfig.from_kwargs(**options)
        started = time.perf_counter()
        self.core = EngineCore(self.config)
        self.load_seconds = time.perf_counter() - started
        self.work, self.token_bytes = work_of(self.config)
        self._vocab: int = shape_of(scenario.shape, small=small)["vocab_size"]
        self._random, self._sent = random.Random(0), 0
        self.generated = 0

    def add(self, prompt_tokens: int, max_tokens: int) -> None:
        """Send a request of random tokens."""
        self._sent += 1
        name = self._name(self._sent)
        prompt = [self._random.randrange(2, self._vocab) for _ in range(prompt_tokens)]
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        self.core.add(EngineRequest(name, prompt, params, self.core.clock(), max_tokens))

    @staticmethod
    def _name(number: int) -> str:
        return f"request-{number}"

    def abort(self) -> None:
        """Drop what there is."""
        self.core.abort(AbortRequests([self._name(number + 1) for number in range(self._sent)]))
        self.drain()

    def _lead(self, batch: int, context: int) -> int:
        """Return the steps of prompts at most, in which the first sequences decode beside the last ones' prompts."""
        return -(-batch * context // (self._tokens - batch)) + 1

    def step(self) -> int:
        """Run a step; return how many tokens came of it."""
        assert self.core.has_unfinished(), "all sequences have ended"
        made = 0
        for output in self.core.step().outputs:
            assert output.error is None, output.error
            made += len(output.new_token_ids)
        self.generated += made
        return made

    def drain(self) -> None:
        """Run what there is to its end."""
        while self.core.has_unfinished():
            self.step()

    def decode_seconds(self, batch: int, context: int) -> tuple[float, float, float]:
        """Return the seconds of a step of `batch` sequences, the mean length of their contexts meanwhile, and the share
        of the time in which the device waited for the host.
        """
        steps, base = self._steps, self.generated
        for _ in range(batch):
            self.add(context, self._lead(batch, context) + steps + self._warm + self._tail)
        while self.core.scheduler.stats().num_waiting or self.step() < batch:
            self.step()
        for _ in range(self._warm):
            self.step()
        synchronize()
        earlier = self.core.scheduler.stats()
        before, started = self.generated, time.perf_counter()
        while self.generated - before < steps * batch:
            self.step()
        elapsed = (time.perf_counter() - started) * batch / (self.generated - before)
        later = self.core.scheduler.stats()
        gap = later.host_gap_seconds - earlier.host_gap_seconds
        self.abort()  # rather than to record graphs of smaller and smaller batches
        length = context + (before - base) / batch + steps / 2
        return elapsed, length, gap / max(later.step_seconds - earlier.step_seconds, 1e-9)

    def prefill_seconds(self, prompts: int, length: int) -> float:
        """Return the seconds from sending prompts to the first token of the last, the second time."""
        for _ in range(2):
            for _ in range(prompts):
                self.add(length, 1)
            synchronize()
            started = time.perf_counter()
            self.drain()
            elapsed = time.perf_counter() - started
        return elapsed

    def tokens_per_second(self, requests: int, prompt_tokens: int, output_tokens: int) -> float:
        """Return the output tokens of so many requests at once over the time that all of them took, the second time."""
        for _ in range(2):
            for _ in range(requests):
                self.add(prompt_tokens, output_tokens)
            synchronize()
            before, started = self.generated, time.perf_counter()
            self.drain()
            elapsed = time.perf_counter() - started
        return (self.generated - before) / elapsed

    def close(self) -> None:
        """Free the device."""
        self.core.close()


def _share(value: float, goal: float | None) -> str:
    return f"{100 * value:.0f} %" + ("" if goal is None else f" (goal {100 * goal:.0f} %)")


def measure_engine(
    limits: Limits, *, small: bool = False, only: str = "", keep: Callable[[list[Table]], None]
) -> list[Table]:
    """Return tables of decodes, prompts and throughput; `keep` is called whenever there is more."""
    decodes = Table(
        "Decode steps", ("model", "batch", "context", "step ms", "roofline ms", "of the roofline", "host gap")
    )
    prefills = Table("Prompts", ("model", "prompts", "tokens each", "ms", "model FLOPs utilization"))
    speeds = Table("Throughput", ("model", "requests at once", "in", "out", "output tokens/s"))
    failed = Table("Failures", ("model", "how"))
    tables = [decodes, prefills, speeds, failed]
    for scenario in SCENARIOS:
        if only not in scenario.name:
            continue
        try:
            for _ in _measure(_small(scenario) if small else scenario, limits, tables, small=small):
                keep(tables)
        except Exception as error:  # boundary: one scenario that fails must not hide the others
            traceback.print_exc()
            failed.add(scenario.name, f"failed: {type(error).__name__}: {str(error)[:200]}".replace("|", "/"))
            keep(tables)
        _free()
    return tables


def _free() -> None:
    """Give back what an engine has left; one that failed is held by cycles of its error."""
    gc.collect()
    if on_gpu():
        torch.cuda.empty_cache()


def _small(scenario: Scenario) -> Scenario:
    """Return a scenario that ends soon without a GPU."""
    return Scenario(
        scenario.shape,
        tuple(Decode(min(one.batch, 2), 4) for one in scenario.decodes[:1]),
        tuple(Prefill(2, 4) for _ in scenario.prefills[:1]),
        None if scenario.throughput is None else (2, 3, 2),
        scenario.options,
        scenario.unit,
    )


def _measure(scenario: Scenario, limits: Limits, tables: Sequence[Table], *, small: bool) -> Iterator[None]:
    """Add to the tables of decodes, prompts and throughput; yield after each row."""
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(scenario, Path(folder), small=small)
        try:
            yield from _rows(bench, scenario, limits, tables)
        finally:
            bench.close()


def _rows(bench: Bench, scenario: Scenario, limits: Limits, tables: Sequence[Table]) -> Iterator[None]:
    decodes, prefills, speeds, *_ = tables
    work = bench.work
    for one in scenario.decodes:
        elapsed, context, gap = bench.decode_seconds(one.batch, one.context)
        num_bytes = work.token.read(one.batch) + work.sample.read(one.batch)
        num_bytes += one.batch * context * bench.token_bytes
        flops = one.batch * (work.token.flops + work.sample.flops + context * work.pair_flops)
        # Both at once at best: the combined roofline adds the cache's bytes to the weights', and takes the longer.
        least = limits.least_seconds(num_bytes, flops, scenario.unit)
        decodes.add(
            scenario.name,
            str(one.batch),
            str(one.context),
            f"{elapsed * 1e3:.3f}",
            f"{least * 1e3:.3f}",
            _share(least / elapsed, one.goal),
            f"{100 * gap:.1f} %",
            host_gap=gap,
            model=scenario.name,
            batch=one.batch,
            context=one.context,
            seconds=elapsed,
            roofline_seconds=least,
            load_seconds=bench.load_seconds,
        )
        yield
    for one in scenario.prefills:
        elapsed = bench.prefill_seconds(one.prompts, one.length)
        pairs = one.length * (one.length + 1) / 2
        flops = one.prompts * (one.length * work.token.flops + work.sample.flops + pairs * work.pair_flops)
        used = flops / elapsed / limits.flops[scenario.unit if scenario.unit in limits.flops else "bfloat16"]
        prefills.add(
            scenario.name,
            str(one.prompts),
            str(one.length),
            f"{elapsed * 1e3:.1f}",
            _share(used, one.goal),
            model=scenario.name,
            prompts=one.prompts,
            length=one.length,
            seconds=elapsed,
            utilization=used,
        )
        yield
    if scenario.throughput is not None:
        speed = bench.tokens_per_second(*scenario.throughput)
        speeds.add(scenario.name, *(str(number) for number in scenario.throughput), f"{speed:.0f}")
        yield

"""Measures steps of a real engine, which differ in what a step's time depends on, and fits a `FittedCost`.

Most steps are submitted to the executor directly, with contexts that were never computed: how long attention takes does
not depend on the values it reads. Then the whole engine runs under small loads, for realistic steps and for the
scheduler's own time.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests
from quire.engine.resolve import load_info
from quire.engine_request import EngineRequest
from quire.executor.base import Executor
from quire.sampling_params import SamplingParams
from quire.simulate.contents import StepContents, StepReader, windows_of
from quire.simulate.cost import DEVICE_FEATURES, HOST_FEATURES, FittedCost
from quire.simulate.driver import message_of
from quire.simulate.fit import Measured, fit_device, fit_host
from quire.simulate.trace import Synthetic, draw
from quire.step import (
    BlockTransfer,
    ContinuingSequenceData,
    KVCacheSpec,
    NewSequenceData,
    PendingOutput,
    SchedulerOutput,
    Tier,
    TransferOp,
)

NUM_SHAPES = 96  # as many as `worker/graphs.py` keeps
DECODE_STEPS = 4  # measured after the first, which also takes the sequences in
MAX_ROUNDS = 1000
MAX_STEPS = 20000  # of loads
MAX_LOAD_STEPS = 500  # of these, that count beside the designed ones
LOAD_SHARE = 0.3  # of the time
LOAD = "load"
MOVED_BLOCKS = 64
MOVE_ROUNDS = 5
PARAMS = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False)


@dataclass(frozen=True, slots=True)
class Workload:
    """A kind of steps to be measured.

    Attributes:
        sequences: (tokens of context, tokens to compute) of each. num_more: how often each then goes on by one token.
        num_left: tokens of each prompt that remain, so that nothing is sampled.
    """

    name: str
    sequences: tuple[tuple[int, int], ...]
    num_more: int = 0
    num_left: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step of this engine can hold."""

    num_blocks: int
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int


def workloads(limits: Limits) -> list[Workload]:
    """Return prompts of every size with and without context, decodes of every number and context, and mixtures."""
    room = limits.max_model_len - DECODE_STEPS - 2
    sizes = [size for size in sizes_up_to(limits.max_num_batched_tokens) if size <= room]
    batches = sizes_up_to(min(limits.max_num_seqs, limits.max_num_batched_tokens))
    everything = [Workload(f"prompt {size}", ((0, size),)) for size in sizes]
    everything += [Workload(f"chunk of {size}", ((0, size),), num_left=1) for size in sizes]
    everything += [
        Workload(f"prompt {size} after {room - size}", ((room - size, size),)) for size in sizes if size * 2 <= room
    ]
    for size in sizes_up_to(limits.max_num_batched_tokens):
        for count in (2, 8):
            if 8 <= size // count <= room and count <= limits.max_num_seqs:
                everything.append(Workload(f"{count} prompts of {size // count}", ((0, size // count),) * count))
    for count in batches:
        for context in sorted({min(16, room), room // 4, room - 1}):
            everything.append(Workload(f"{count} decodes at {context}", ((context, 1),) * count, DECODE_STEPS))
    for count in (2, 8, 32):
        for size in sizes[4::2]:
            if count < limits.max_num_seqs and size + count <= limits.max_num_batched_tokens:
                rows = ((room // 4, 1),) * count + ((0, size),)
                everything.append(Workload(f"{count} decodes and a prompt of {size}", rows))
    fitting = [workload for workload in everything if _num_blocks(workload, limits) <= limits.num_blocks]
    return fitting or [Workload("prompt 1", ((0, 1),))]


def sizes_up_to(high: int) -> list[int]:
    """Return 1, 2, 3, 4, 6, 8, 12, ...: the powers of two and the middles between them, and `high`."""
    sizes = {1, high}
    power = 2
    while power <= high:
        sizes |= {size for size in (power, power * 3 // 2) if size <= high}
        power *= 2
    return sorted(sizes)


def _num_blocks(workload: Workload, limits: Limits) -> int:
    longest = (-(-(context + count + workload.num_more) // limits.block_size) for context, count in workload.sequences)
    return sum(longest)


class WorkloadRunner:
    """Runs workloads on an executor and measures their steps.

    Args:
        executor: its KV cache is allocated.
    """

    def __init__(self, executor: TimedExecutor, limits: Limits) -> None:
        self._executor = executor
        self._limits = limits
        self._ended: list[str] = []
        self._num_named = 0
        self._rng = np.random.default_rng(0)

    def run(self, workload: Workload) -> Iterator[Measured]:
        """Run the steps of a workload; yield each with its seconds."""
        new, block = [], 0
        for context, count in workload.sequences:
            num_blocks = -(-(context + count + workload.num_more) // self._limits.block_size)
            blocks = list(range(block, block + num_blocks))
            new.append(self._new(context, context + count + workload.num_left, blocks))
            block += num_blocks
        scheduled = {data.sequence_id: count for data, (_, count) in zip(new, workload.sequences, strict=True)}
        yield self._measure(workload, self._step(scheduled, new=new))
        for further in range(workload.num_more):
            going = [
                ContinuingSequenceData(data.sequence_id, [], context + count + further)
                for data, (context, count) in zip(new, workload.sequences, strict=True)
            ]
            yield self._measure(workload, self._step(dict.fromkeys(scheduled, 1), continuing=going))
        self._ended = list(scheduled)

    def end(self) -> None:
        """Remove the last workload's sequences from the executor."""
        if self._ended:
            self._executor.execute(self._step({}))

    def _new(self, context: int, num_tokens: int, block_ids: list[int]) -> NewSequenceData:
        self._num_named += 1
        name, prompt = (
            f"workload-{self._num_named}",
            self._rng.integers(0, self._limits.vocab_size, num_tokens).tolist(),
        )
        return NewSequenceData(name, EngineRequest(name, prompt, PARAMS), [block_ids], context, seed=self._num_named)

    def _step(
        self,
        scheduled: dict[str, int],
        new: Sequence[NewSequenceData] = (),
        continuing: Sequence[ContinuingSequenceData] = (),
    ) -> SchedulerOutput:
        ended, self._ended = self._ended, []
        return SchedulerOutput(
            new_sequences=list(new),
            continuing=list(continuing),
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            finished_sequence_ids=ended,
            preempted_sequence_ids=[],
        )

    def _measure(self, workload: Workload, plan: SchedulerOutput) -> Measured:
        self._executor.execute(plan)
        return Measured(self._executor.last.contents, self._executor.last.seconds, workload.name)


def measure_workloads(runner: WorkloadRunner, limits: Limits, seconds: float) -> list[Measured]:
    """Run all workloads in random order, again and again for `seconds`, but at least once; return medians.

    Each runs twice in a row: a shape of step that was seen just before costs less than a new one.
    """
    rng = random.Random(0)
    order = workloads(limits)
    measured: list[Measured] = []
    started = time.perf_counter()
    for num_rounds in range(MAX_ROUNDS):
        rng.shuffle(order)
        for workload in order:
            if num_rounds and time.perf_counter() - started > seconds:
                return _medians(measured)
            for _ in range(2):
                measured += runner.run(workload)
    return _medians(measured)


def _medians(steps: Sequence[Measured]) -> list[Measured]:
    """Return the step of median time of each group; within a group, steps differ only by a few tokens of context."""
    kinds: dict[tuple[object, ...], list[Measured]] = {}
    for step in steps:
        contents = step.contents
        kind = (step.workload, contents.num_tokens, contents.num_sequences, contents.num_new, contents.is_new_shape)
        kinds.setdefault(kind, []).append(step)
    return [sorted(group, key=lambda step: step.seconds)[(len(group) - 1) // 2] for group in kinds.values()]


class TimedExecutor(Executor):
    """An executor around another, whose KV cache is allocated: measures its steps and what is in them.

    Args:
        clock: seconds; the machine's, unless the executor inside is a simulated one.
    """

    def __init__(self, inner: Executor, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._inner = inner
        self._clock = clock
        self._reader = StepReader(
            windows_of([layer.sliding_window for layer in inner.kv_cache_spec().layers]), NUM_SHAPES
        )
        self.last = Measured(StepContents(), 0.0)

    def kv_cache_spec(self) -> KVCacheSpec:
        """Return that of the inner executor."""
        return self._inner.kv_cache_spec()

    def available_memory(self) -> int:
        """Return enough for any number of blocks: they are allocated."""
        return 2**62

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Execute the step and measure it."""
        contents, _ = self._reader.read(plan)
        before = self._clock()
        result = self._inner.execute(plan)
        self.last = Measured(contents, max(self._clock() - before, 1e-9), LOAD)
        return result


def measure_moves(executor: TimedExecutor, count: int) -> float:
    """Return the seconds that a block takes to the host or back, from moves of `count` blocks; 0 without a pool."""
    if count == 0:
        return 0.0
    seconds = []
    for _ in range(MOVE_ROUNDS):
        for op in (TransferOp.STORE, TransferOp.LOAD):
            transfers = [BlockTransfer(op, Tier.HOST, block, block) for block in range(count)]
            plan = SchedulerOutput.empty()
            plan.transfers = transfers
            executor.execute(plan)
            seconds.append(executor.last.seconds / count)
    return float(np.median(seconds))


def measure_load(
    config: EngineConfig,
    info: ModelInfo,
    executor: TimedExecutor,
    limits: Limits,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[list[Measured], list[Measured]]:
    """Run the whole engine under small loads for `seconds`; return steps with the executor's time, and the rest's."""
    device: list[Measured] = []
    host: list[Measured] = []
    started = time.perf_counter()
    most = min(limits.max_num_seqs, 64)
    for count in itertools.chain.from_iterable(itertools.repeat(sorted({1, min(4, most), min(16, most), most}))):
        load = _load(count, limits, seed=len(host))
        with contextlib.closing(_run_load(config, info, executor, limits, load, clock)) as steps:
            for step, rest in steps:
                device.append(step)
                host.append(Measured(step.contents, rest, LOAD))
                if time.perf_counter() - started > seconds or len(host) >= MAX_STEPS:
                    return device, host
    raise AssertionError("the loads never end")


def _load(count: int, limits: Limits, seed: int) -> Synthetic:
    prompt = max(1, limits.max_model_len // 4)
    output = max(1, min(64, limits.max_model_len // 8))
    return Synthetic("burst", num=2 * count, prompt=prompt, output=output, spread=0.5, seed=seed)


def _run_load(
    config: EngineConfig,
    info: ModelInfo,
    executor: TimedExecutor,
    limits: Limits,
    load: Synthetic,
    clock: Callable[[], float],
) -> Generator[tuple[Measured, float], None, None]:
    """Yield each step of `load` as the executor measured it, and the seconds that the scheduler took."""
    cache = replace(config.cache, num_gpu_blocks_override=limits.num_blocks, kv_cache_memory_bytes=None)
    core = EngineCore(replace(config, cache=cache), executor=executor, info=info)
    requests = draw([load])
    for request in requests:
        core.add(message_of(request, request.prompt_token_ids(limits.vocab_size)))
    try:
        while core.has_unfinished():
            executor.last = Measured(StepContents(), 0.0)
            before = clock()
            core.step()
            rest = clock() - before - executor.last.seconds
            if executor.last.contents.num_tokens:
                yield executor.last, max(rest, 1e-9)
    finally:
        core.abort(AbortRequests([str(request.number) for request in requests]))
        core.step()  # removes them from the executor


@dataclass(frozen=True, slots=True)
class Calibration:
    """A fitted cost model and the steps it was fitted to."""

    cost: FittedCost
    device: list[Measured]
    host: list[Measured]

    def errors(self) -> list[tuple[str, float, float]]:
        """Return of each measured step its workload, its seconds, and those of the model; the worst first."""
        errors = [(step.workload, step.seconds, self.cost.device_seconds(step.contents)) for step in self.device]
        return sorted(errors, key=lambda item: -abs(item[2] / item[1] - 1))


def calibrate(config: EngineConfig, *, seconds: float = 60.0, machine: str = "") -> Calibration:
    """Load the model that `config` names, measure it for some `seconds`, and fit.

    Raises:
        ConfigError, ModelError: as the engine does when it starts.
    """
    info = load_info(config)
    core = EngineCore(config, info=info)  # imports the data plane, as nothing else here does
    try:
        return measure(core, info, seconds, machine=machine)
    finally:
        core.close()


def measure(
    core: EngineCore,
    info: ModelInfo,
    seconds: float,
    *,
    machine: str = "",
    clock: Callable[[], float] = time.perf_counter,
) -> Calibration:
    """Measure the executor of `core`, which has no requests, and its scheduler; fit."""
    ready, config = core.ready, core.config
    limits = Limits(
        num_blocks=ready.num_blocks,
        block_size=ready.block_size,
        max_model_len=ready.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        vocab_size=ready.vocab_size,
    )
    timed = TimedExecutor(core.executor, clock)
    runner = WorkloadRunner(timed, limits)
    designed = measure_workloads(runner, limits, seconds * (1 - LOAD_SHARE))
    runner.end()
    moved_block = measure_moves(timed, min(ready.num_blocks, core.scheduler.stats().num_host_blocks, MOVED_BLOCKS))
    loaded, host = measure_load(config, info, timed, limits, seconds * LOAD_SHARE, clock)
    memory = ready.num_blocks * core.executor.kv_cache_spec().block_bytes(ready.block_size, ready.max_model_len)
    calibration = fit_cost(config, designed, loaded, host, memory=memory, machine=machine)
    return replace(calibration, cost=msgspec.structs.replace(calibration.cost, moved_block=moved_block))


def fit_cost(
    config: EngineConfig,
    designed: Sequence[Measured],
    loaded: Sequence[Measured],
    host: Sequence[Measured],
    *,
    memory: int,
    machine: str = "",
) -> Calibration:
    """Fit a cost model to measured steps: designed ones, those of loads, and the scheduler's part of these.

    The fit discounts slow outliers, so it is below the mean, which is what the duration of a load depends on. All times
    are therefore scaled at the end, to the total time of the loads. `config` is resolved.
    """
    thinned = random.Random(0).sample(loaded, min(len(loaded), MAX_LOAD_STEPS))
    steps = [*designed, *thinned]
    knots, knot_seconds, rates = fit_device(steps, sizes_up_to(config.scheduler.max_num_batched_tokens))
    host_base, host_rates = fit_host(_medians(host))
    cost = FittedCost(
        model=config.model.model,
        machine=machine,
        dtype=config.model.dtype,
        kv_dtype=config.cache.kv_cache_dtype,
        knots=knots,
        knot_seconds=knot_seconds,
        device=rates,
        host_base=host_base,
        host=host_rates,
        num_shapes=NUM_SHAPES,
        memory=memory,
    )
    device_scale = _ratio(loaded, cost.device_seconds)
    host_scale = _ratio(host, cost.host_seconds)
    cost = msgspec.structs.replace(
        cost,
        knot_seconds=tuple(value * device_scale for value in knot_seconds),
        device=tuple(value * device_scale for value in rates),
        host_base=host_base * host_scale,
        host=tuple(value * host_scale for value in host_rates),
    )
    error = float(np.median([abs(cost.device_seconds(step.contents) / step.seconds - 1) for step in steps]))
    return Calibration(msgspec.structs.replace(cost, error=error), steps, list(host))


def _ratio(steps: Sequence[Measured], predict: Callable[[StepContents], float]) -> float:
    """Return by how much all `steps` together took longer than predicted."""
    predicted = sum(predict(step.contents) for step in steps)
    return sum(step.seconds for step in steps) / predicted if predicted > 0 else 1.0


def calibration_table(calibration: Calibration, worst: int = 8) -> str:
    """Return what was fitted, and where it fits worst, as text."""
    cost = calibration.cost
    lines = [
        f"{len(calibration.device)} kinds of step measured; median error of the fit {cost.error:.1%}",
        "",
        f"  {'tokens in a step':<32}{'microseconds':>14}",
    ]
    for knot, value in zip(cost.knots, cost.knot_seconds, strict=True):
        lines.append(f"  {knot:<32}{value * 1e6:>14.1f}")
    lines += ["", f"  {'and for each unit of':<32}{'microseconds':>14}"]
    for name, rate in zip(DEVICE_FEATURES, cost.device, strict=True):
        lines.append(f"  {name:<32}{rate * 1e6:>14.5f}")
    lines += ["", f"  {'scheduler, per step':<32}{cost.host_base * 1e6:>14.1f}"]
    for name, rate in zip(HOST_FEATURES, cost.host, strict=True):
        lines.append(f"  {'scheduler, ' + name:<32}{rate * 1e6:>14.5f}")
    lines += ["", f"  {'a block to or from the host':<32}{cost.moved_block * 1e6:>14.1f}"]
    lines += ["", f"  {'where the fit is worst':<40}{'measured us':>14}{'fitted us':>14}"]
    for workload, measured, fitted in calibration.errors()[:worst]:
        lines.append(f"  {workload:<40}{measured * 1e6:>14.1f}{fitted * 1e6:>14.1f}")
    return "\n".join(lines)

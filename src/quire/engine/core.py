"""`EngineCore`: one loop of schedule -> execute -> update over a scheduler and an executor.

It knows nothing of text, sockets, or arrays. `LLM` calls it directly; `loop.py` does for clients, in a thread or a
process.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import msgspec

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine.advice import size_text
from quire.engine.deferred import Answer, CompiledGrammar, LoadedAdapter, Prerequisites
from quire.engine.kv_cache_size import (
    ReservedBytes,
    allocation_failed,
    device_bytes,
    fit_kv_cache,
    nothing_reserved,
    reserved_bytes,
    step_failed,
)
from quire.engine.messages import AbortRequests, EngineOutputs, Ready, ShowBlocks, ShowPrefixes, Sleep, UnloadLoRA
from quire.engine.profiler import Profiler, check_profiler_dir
from quire.engine.recorder import FlightRecorder, ShowTimeline, StepRecord
from quire.engine.resolve import load_info, resolve_config
from quire.engine_request import EngineRequest, LoRARequest
from quire.errors import ConfigError, EngineAsleepError, EngineDeadError, QuireError, RequestError
from quire.executor.base import Executor
from quire.kernels.memory import resident_memory
from quire.kvcache.block_hash import BlockHasher
from quire.kvcache.view import describe_prefixes, draw_prefixes
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler, create_scheduler
from quire.scheduler.view import describe, describe_map, draw_picture
from quire.step import ModelOutput, PendingOutput, SchedulerOutput, SequenceOutput, StoredBlocks

logger = logging.getLogger(__name__)

DEFERRED_WAIT_SECONDS = 0.05  # how long a step waits for deferred requests when there is nothing else to do

T = TypeVar("T")
P = ParamSpec("P")


@dataclass(slots=True)
class SubmittedStep:
    """A submitted step; its result is not processed yet."""

    plan: SchedulerOutput
    pending: PendingOutput
    record: StepRecord


class EngineCore:
    """Runs requests to their end, a step at a time.

    Args:
        config: engine options, resolved or not.
        executor: runs the model; by default made from the config.
        info: the model's config, when the caller has it already.
        clock: seconds, monotonic; a virtual one in simulations. hasher: computes block hashes; by default with the key
            of the disk tier, or a random one.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        executor: Executor | None = None,
        info: ModelInfo | None = None,
        clock: Callable[[], float] = time.monotonic,
        hasher: BlockHasher | None = None,
    ) -> None:
        check_profiler_dir(config.profiler.profiler_dir)
        info = info or load_info(config)
        requested = config
        scratch: ReservedBytes = nothing_reserved
        self.config = config = resolve_config(config, info)
        if executor is None:
            # Lazy, both: this module must not pull in the data plane.
            from quire.engine.plan import check_before_loading
            from quire.executor.ranks import create_executor

            scratch = check_before_loading(requested, info)
            executor = create_executor(config, info)
        self.executor = executor
        self._requested = requested
        try:
            memory = executor.device_memory()
        except MemoryError as error:
            raise step_failed(requested, config, executor.available_memory()) from error
        beside = reserved_bytes(memory, scratch, config)
        self._fitted = fit_kv_cache(requested, config, executor.kv_cache_spec(), memory.total, beside)
        num_blocks, max_model_len = self._fitted.num_blocks, self._fitted.max_model_len
        self._allocate()
        self.clock = clock
        self._hasher = hasher
        self._lora = LoadedAdapter(executor)
        self._prerequisites = Prerequisites([self._lora, CompiledGrammar(executor)])
        self.scheduler = self._create_scheduler(stored=True)
        self._pools = info.pooling is not None
        self.sleep_level = 0  # of 0 (awake), 1 and 2
        # Called before steps are executed, or waited for, with their plans, oldest first.
        self.on_plans: Callable[[list[SchedulerOutput]], None] | None = None
        self._in_flight: deque[SubmittedStep] = deque()
        self._failed = False
        self._max_in_flight = 2 if config.scheduler.async_scheduling else 1
        self._processed: list[tuple[StepRecord, float]] = []  # steps processed since the last outputs; their host gaps
        self._last_result_time: float | None = None  # when the last step was processed, if there was work ever since
        self._profiler = Profiler(config.profiler)
        self.recorder = FlightRecorder(
            clock,
            block_size=config.cache.block_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        )
        self.ready = Ready(
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_model_len=max_model_len,
            vocab_size=info.vocab_size,
            max_num_seqs=config.scheduler.max_num_seqs,
            lora_vocab_size=info.vocab_size + config.lora.lora_extra_vocab_size if config.lora.enable_lora else None,
        )
        logger.info(
            "KV cache: %d blocks of %d tokens; context %d tokens", num_blocks, config.cache.block_size, max_model_len
        )

    def _allocate(self) -> None:
        fitted, executor = self._fitted, self.executor
        try:
            executor.allocate(
                fitted.num_blocks, fitted.max_model_len, fitted.num_host_blocks, fitted.num_layerwise_blocks
            )
        except MemoryError as error:
            block_bytes = executor.kv_cache_spec().block_bytes(self.config.cache.block_size, fitted.max_model_len)
            raise allocation_failed(self._requested, fitted, block_bytes, executor.available_memory()) from error
        if self.config.cache.kv_resident_layers:
            logger.info(
                "KV cache: %d of the blocks have layers beyond the first %d on the host",
                fitted.num_layerwise_blocks,
                self.config.cache.kv_resident_layers,
            )

    def _create_scheduler(self, *, stored: bool) -> Scheduler:
        """Return a scheduler with empty queues and caches; with `stored` it knows the blocks in the disk tier."""
        fitted = self._fitted
        disk = self.executor.stored_blocks() if stored else StoredBlocks()
        return create_scheduler(
            self.config,
            self.executor.kv_cache_spec().groups(self.config.max_model_len),
            num_blocks=fitted.num_blocks,
            max_model_len=fitted.max_model_len,
            clock=self.clock,
            num_layerwise_blocks=fitted.num_layerwise_blocks,
            num_host_blocks=fitted.num_host_blocks,
            num_disk_slots=disk.num_slots,
            stored=disk.blocks,
            hasher=self._hasher or BlockHasher(disk.hash_key),
            whole_prompts=self.executor.kv_cache_spec().one_step,
            accepts_drafts=not self.executor.kv_cache_spec().states,
            on_finished=self._prerequisites.release,
        )

    def send(self, message: EngineRequest | AbortRequests) -> None:
        """Add a request, or abort some, at once. Raises `QuireError` as `add`."""
        if isinstance(message, AbortRequests):
            self.abort(message)
        else:
            self.add(message)

    def add(self, message: EngineRequest) -> None:
        """Queue a request, after its grammar was compiled if it has one.

        Raises:
            EngineAsleepError: the engine is asleep.
            RequestError: a live request, or sequence, has the same id; it has more, or fewer, sequences than seeds.
        """
        if self.sleep_level:
            raise EngineAsleepError("the engine is asleep; wake it up first")
        if self._pools != (message.pooling is not None):
            made = "vectors or scores and generates no text" if self._pools else "text and pools nothing"
            raise RequestError(f"this engine's model makes {made}", param="model", code="unsupported_endpoint")
        count = len(message.sequence_ids)
        if len(message.seeds) != count or (message.resumed is not None and len(message.resumed) != count):
            raise RequestError("each sequence of a request needs a seed, and its progress if resumed", param="seeds")
        request = Request(message)
        self.scheduler.requests.check_ids(request)
        if self._prerequisites.prepare(message):
            self.scheduler.requests.defer(request)
        else:
            self.scheduler.add_request(request)

    def abort(self, message: AbortRequests) -> None:
        """Drop requests; their blocks are free at once, and the next step removes them from the worker."""
        self.scheduler.abort_requests(message.request_ids)
        if not self.scheduler.has_requests():
            self._last_result_time = None  # time until the next request is not that of a step

    def has_unfinished(self) -> bool:
        """Whether a step would have anything to do."""
        return self._is_busy() or len(self.scheduler.requests.deferred) > 0 or self._lora.is_loading

    def _is_busy(self) -> bool:
        """Whether a step would compute anything, or send outputs."""
        return len(self._in_flight) > 0 or self.scheduler.has_unfinished()

    def idle(self) -> bool:
        """With nothing unfinished, let the executor warm up a graph for later steps; return whether it did."""
        return self.sleep_level == 0 and self.executor.idle()

    def collect_failed_stores(self) -> bool:
        """With nothing unfinished, let the scheduler know which stores to asynchronous tiers have failed since.

        Otherwise the results of steps say so. Returns whether there were any, so that the statistics have changed.
        """
        if self.sleep_level or not self.scheduler.kv.has_async_tiers:
            return False
        result = self.executor.execute(plan := SchedulerOutput.empty())
        self.scheduler.update_from_output(plan, result)
        return bool(result.failed_stores)

    def step(self) -> EngineOutputs:
        """Submit a step, if possible, and process the result of the oldest in flight; return outputs and stats.

        With `async_scheduling` a step is planned and submitted while the previous one runs; its outputs are returned.
        """
        if self._failed:
            raise EngineDeadError("a step has failed; the engine cannot go on")
        deferred = self.scheduler.requests.deferred
        if deferred:
            self._queue_deferred(deferred)
        if self._lora.is_loading:
            self._lora.finish_loads(0.0 if deferred or self._is_busy() else DEFERRED_WAIT_SECONDS)
        try:
            outputs = self._traced("step", self._advance)
        except BaseException as error:
            self._failed = True
            if isinstance(error, Exception):
                logger.error("a step failed; the last ones were\n%s", "\n".join(self.recorder.last()))
            raise
        result = self.snapshot(outputs)
        for record, gap in self._processed:
            self.recorder.end(record, result.stats, gap)
        self._processed.clear()
        if not self.has_unfinished():
            self._last_result_time = None  # the next step does not wait for the host, but for a request
        return result

    def _advance(self) -> list[SequenceOutput]:
        in_flight = self._in_flight
        if in_flight and not (self._overlaps(in_flight[-1]) and self.scheduler.admission.make_room_ahead()):
            self._announce()
            return self._process_oldest()
        plan = self._traced("schedule", self.scheduler.schedule)
        self._announce(plan)
        if plan.is_empty:
            outputs: list[SequenceOutput] = []
            if in_flight:
                outputs = self._process_oldest()
            else:
                self._last_result_time = None  # the next step waits for a grammar or an adapter, not for the host
            return outputs + self.scheduler.update_from_output(plan, ModelOutput(sampled_token_ids={}))
        was_idle, step = not in_flight, self._begin(plan)
        in_flight.append(step)
        outputs = [] if was_idle or len(in_flight) < self._max_in_flight else self._process_oldest()
        if len(in_flight) == 1 and not self._overlaps(step) and (was_idle or not plan.num_scheduled_tokens):
            outputs += self._process_oldest()
        return outputs

    def _begin(self, plan: SchedulerOutput) -> SubmittedStep:
        record = self.recorder.begin(plan, self.scheduler)
        return SubmittedStep(plan, self._traced("submit", self.executor.submit, plan), record)

    def _traced(self, name: str, phase: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Carry out a phase of a step, which a profile shows by this name."""
        if self._profiler.trace is None:
            return phase(*args, **kwargs)
        with self._profiler.trace.span(name):
            return phase(*args, **kwargs)

    def _overlaps(self, step: SubmittedStep) -> bool:
        """Whether another step may be submitted before the result of `step` is processed; the executor decides that."""
        return self._max_in_flight > 1 and step.pending.overlaps

    def _announce(self, plan: SchedulerOutput | None = None) -> None:
        if self.on_plans is not None:
            plans = [step.plan for step in self._in_flight]
            self.on_plans(plans if plan is None else [*plans, plan])

    def _process_oldest(self) -> list[SequenceOutput]:
        """Wait for the oldest step in flight and process its result."""
        step = self._in_flight.popleft()
        result = self._traced("wait for the result", step.pending.result)
        outputs = self._traced("update", self.scheduler.update_from_output, step.plan, result)
        now, gap = self.clock(), 0.0
        if self._last_result_time is not None:
            gap = result.host_gap
            self.scheduler.note_step(now - self._last_result_time, gap)
        self._last_result_time = now
        self._processed.append((step.record, gap))
        return outputs

    def _queue_deferred(self, deferred: list[Request]) -> None:
        """Queue the deferred requests that are ready, and end those that cannot run."""
        found = self._prerequisites.poll(deferred, 0.0 if self._is_busy() else DEFERRED_WAIT_SECONDS)
        for request in [request for request in deferred if request.request_id in found]:
            error = found[request.request_id]
            if error is not None:
                self.scheduler.requests.refuse(request, error)
                continue
            if request.engine_request.grammar is not None:
                self.recorder.note_grammar(request.request_id, self.clock() - request.engine_request.arrival_time)
                if request.engine_request.beam is not None:
                    # A beam whose grammar allows nothing more must end, also with `ignore_eos`.
                    request.add_stop_ids(self.executor.grammars.end_ids())
            self.scheduler.add_request(request)

    def snapshot(self, outputs: list[SequenceOutput] | None = None) -> EngineOutputs:
        """Return the current stats, with outputs that no step has made, if any."""
        return EngineOutputs(outputs or [], self.scheduler.stats(), self.clock(), self.sleep_level)

    def call(self, method: str, arguments: Mapping[str, int | bool | str] | None = None) -> dict[str, Any]:
        """Run an operation between steps; return its result, JSON-like.

        "reset_prefix_cache", "stats", "memory" (bytes of this process) and "check_integrity" take no arguments;
        "blocks" is a picture of the queues and the block manager (`ShowBlocks`), "prefixes" the radix tree of what is
        cached (`ShowPrefixes`), "timeline" what happened to a request (`ShowTimeline`); "sleep" frees memory until
        "wake_up" (`Sleep`); "unload_lora" unloads an adapter (`UnloadLoRA`), which `load_lora` has loaded;
        "start_profile" and "stop_profile" begin and end a trace (`Profiler`).

        Raises `ConfigError` for an unknown one, and for bad arguments.
        """
        if method == "reset_prefix_cache":
            return {"reset": self.scheduler.reset_prefix_cache()}
        if method == "check_integrity":
            self.scheduler.check_integrity()
            return {"ok": True}
        if method == "stats":
            return msgspec.to_builtins(self.scheduler.stats())
        if method == "blocks":
            return self._show_blocks(_convert(arguments, ShowBlocks))
        if method == "prefixes":
            show = _convert(arguments, ShowPrefixes)
            tree = describe_prefixes(self.scheduler.kv.pool.blocks, limit=show.limit, tokens=show.tokens)
            return {"text": draw_prefixes(tree)} if show.text else tree
        if method == "timeline":
            return self.recorder.timeline(_convert(arguments, ShowTimeline))
        if method == "memory":
            return {"resident": resident_memory()}
        if method == "unload_lora":
            if self.sleep_level < 2:  # there are no adapters without the weights
                self._lora.unload(_convert(arguments, UnloadLoRA).lora_int_id)
            return {}
        if method == "sleep":
            return self._sleep(_convert(arguments, Sleep).level)
        if method == "wake_up":
            return self._wake_up()
        if method == "start_profile":
            return self._profiler.start(self.executor)
        if method == "stop_profile":
            return self._profiler.stop(self.executor)
        raise ConfigError(f"unknown engine operation {method!r}", param="method")

    def load_lora(self, arguments: Mapping[str, int | bool | str], answer: Answer) -> None:
        """Load an adapter (arguments as in `LoRARequest`), to see whether it can be used; a later step answers.

        Raises:
            ConfigError: bad arguments. RequestError: LoRA is off. EngineAsleepError: there are no weights.
        """
        if self.sleep_level > 1:
            raise EngineAsleepError("the engine is asleep without its weights; wake it up to load an adapter")
        self._lora.load(_convert(arguments, LoRARequest), answer)

    def _sleep(self, level: int) -> dict[str, Any]:
        """Free the KV cache, at level 2 also the weights; what is cached is forgotten, except on disk.

        Raises `RequestError` while requests run, which would have to begin again, and while an adapter is loaded.
        """
        if self._lora.is_loading:
            raise RequestError("the engine is loading an adapter; it sleeps once that has ended", code="engine_busy")
        if self.scheduler.has_requests():
            raise RequestError("the engine has unfinished requests; it sleeps once they have ended", code="engine_busy")
        while self._in_flight:  # for requests that were aborted
            self._process_oldest()
        freed = 0
        if level > self.sleep_level:
            if not self.sleep_level:
                self._save_cached()
            freed = self.executor.sleep(level)
            self._exchange_scheduler(stored=False)
            self.sleep_level = level
        return {"level": self.sleep_level, "freed": freed}

    def _wake_up(self) -> dict[str, Any]:
        """Allocate again what `sleep` has freed. If it does not fit, the engine keeps sleeping.

        Raises `QuireError`.
        """
        if self.sleep_level:
            self._check_room()
            try:
                self._allocate()
                self._exchange_scheduler(stored=True)
            except QuireError:
                self.executor.sleep(self.sleep_level)
                raise
            self.sleep_level = 0
        return {"level": 0}

    def _check_room(self) -> None:
        """Raise `ConfigError` if others have taken the memory meanwhile."""
        fitted, available = self._fitted, self.executor.available_memory()
        needed = device_bytes(self.config, self.executor.kv_cache_spec(), fitted)
        needed += self.config.scheduler.max_num_seqs * self.executor.kv_cache_spec().state_bytes
        if needed > available:
            raise ConfigError(
                f"the engine cannot wake up: its KV cache needs {size_text(needed)}, {size_text(available)} are free",
                param="kv_cache_memory_bytes",
                code="out_of_memory",
            )

    def _exchange_scheduler(self, *, stored: bool) -> None:
        before = self.scheduler.stats()
        self.scheduler = self._create_scheduler(stored=stored)
        self.scheduler.restore_counters(before)

    def _show_blocks(self, show: ShowBlocks) -> dict[str, Any]:
        if show.cells:
            started = self.clock()
            picture = describe_map(self.scheduler, cells=show.cells, limit=show.limit)
            return {**picture, "seconds": self.clock() - started}
        max_model_len = self.config.max_model_len
        spec = self.executor.kv_cache_spec()
        picture = {
            "block_bytes": spec.block_bytes(self.config.cache.block_size, max_model_len),
            "groups": [msgspec.to_builtins(group) for group in spec.groups(max_model_len)],
            **describe(self.scheduler, tier=show.tier, start=show.start, limit=show.limit, tokens=show.tokens),
        }
        return {"text": draw_picture(picture)} if show.text else picture

    def close(self) -> None:
        """Release the model and its memory; with a disk tier, what is cached is written there first.

        After a step that failed nothing is written: blocks that it should have computed have their hashes already.
        """
        self._profiler.close(self.executor)
        try:
            if not self._failed:
                while self._in_flight:
                    self._process_oldest()
                if not self.sleep_level:
                    self._save_cached()
        finally:
            self.executor.close()

    def _save_cached(self) -> None:
        saves = self.scheduler.closing_plan()
        if not saves.is_empty:
            self.executor.execute(saves)


def _convert(arguments: Mapping[str, int | bool | str] | None, kind: type[T]) -> T:
    try:
        return msgspec.convert(arguments or {}, kind)
    except msgspec.ValidationError as error:
        raise ConfigError(f"bad arguments: {error}", param="arguments") from None

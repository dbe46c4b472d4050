"""Drives an `EngineCore` with a real model by requests in token ids, and keeps all it says of each sequence.

A `Result` is what came of one sequence of a `Request`, compared bit by bit. `alone` gives what each sequence says by
itself: computed in one piece, without any cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests
from quire.engine.resolve import load_info, resolve_config
from quire.engine_request import EngineRequest, ResumedSequence, ThinkingData
from quire.executor.base import Executor
from quire.sampling_params import SamplingParams
from quire.step import SchedulerStats, TokenTopLogprobs


@dataclass(frozen=True)
class Request:
    """A request for as many sequences as there are seeds."""

    prompt: list[int]
    params: SamplingParams
    max_tokens: int = 12
    seeds: tuple[int, ...] = (0,)
    salt: str | None = None
    stop_ids: tuple[int, ...] = (2,)
    grammar: str | None = None
    thinking: ThinkingData | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()

    def single(self, index: int) -> Request:
        """Return the request for sequence `index` alone; of several, the first reports on the prompt."""
        params = self.params if index == 0 else self.params.clone(prompt_logprobs=None, prompt_logprob_start=None)
        return replace(self, params=params, seeds=(self.seeds[index],))


@dataclass
class Result:
    """What was said of one sequence. `num_cached` does not count when two are compared."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenTopLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenTopLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    num_cached: int | None = field(default=None, compare=False)


class EngineDriver:
    """An engine of its own, with the options given; a pool of 400 blocks of 4 tokens unless they say otherwise."""

    def __init__(
        self,
        model: Path | str,
        device: str = "cpu",
        new_executor: Callable[[EngineConfig, ModelInfo], Executor] | None = None,
        **options: object,
    ) -> None:
        settings = {"block_size": 4, "num_gpu_blocks_override": 400, "max_num_batched_tokens": 256, "max_num_seqs": 64}
        config = EngineConfig.from_kwargs(model=str(model), device=device, **{**settings, **options})
        executor = None
        if new_executor is not None:
            info = load_info(config)
            executor = new_executor(resolve_config(config, info), info)
        self.core = EngineCore(config, executor=executor)
        self.results: dict[str, Result] = {}
        self.sampler_states: dict[str, float | None] = {}
        self.most_used = 0
        """Most blocks in use after any step."""

    def add(self, name: str, ask: Request) -> None:
        """Send a request; its sequences are called name, or name-0 and so on."""
        self._add(name, ask, names_of(name, ask), list(ask.seeds))

    def take_over(self, other: EngineDriver, name: str, ask: Request) -> None:
        """Go on with a request that another driver had sent, as if that one's engine had died."""
        sequences = names_of(name, ask)
        told = {key: other.results[key] for key in sequences if key in other.results}
        if not any(item.tokens for item in told.values()):
            self.add(name, ask)
            return
        self.results.update(told)
        self.sampler_states.update((key, other.sampler_states[key]) for key in told)
        left = [index for index, key in enumerate(sequences) if told[key].finish_reason is None]
        if left:
            keys = [sequences[index] for index in left]
            resumed = [ResumedSequence(list(told[key].tokens), other.sampler_states[key]) for key in keys]
            self._add(name, ask, keys, [ask.seeds[index] for index in left], resumed)

    def _add(
        self, name: str, ask: Request, names: list[str], seeds: list[int], resumed: list[ResumedSequence] | None = None
    ) -> None:
        self.core.add(
            EngineRequest(
                request_id=name,
                sequence_ids=names,
                prompt_token_ids=list(ask.prompt),
                sampling_params=ask.params,
                arrival_time=0.0,
                seeds=seeds,
                stop_ids=list(ask.stop_ids),
                bad_words_ids=[list(word) for word in ask.bad_words],
                max_tokens=ask.max_tokens,
                cache_salt=ask.salt,
                grammar=ask.grammar,
                thinking=ask.thinking,
                resumed=resumed,
            )
        )

    def abort(self, *names: str) -> None:
        """Abort requests or sequences."""
        self.core.abort(AbortRequests(list(names)))

    def step(self) -> None:
        """Run one step and take down its news."""
        outputs = self.core.step()
        self.most_used = max(self.most_used, outputs.stats.num_blocks - outputs.stats.num_free_blocks)
        for news in outputs.outputs:
            assert news.error is None, news.error
            told = self.results.setdefault(news.sequence_id, Result())
            told.tokens += news.new_token_ids
            self.sampler_states[news.sequence_id] = news.sampler_state
            told.logprobs += news.logprobs or []
            told.prompt_logprobs += news.prompt_logprobs or []
            told.finish_reason = news.finish_reason or told.finish_reason
            if news.num_cached_tokens is not None:
                told.num_cached = news.num_cached_tokens

    def run(self) -> None:
        """Step until nothing is left to do."""
        while self.core.has_unfinished():
            self.step()

    def generate(self, name: str, ask: Request) -> Result:
        """Run a request of one sequence to its end, and return what came of it."""
        self.add(name, ask)
        self.run()
        return self.results[name]

    def stats(self) -> SchedulerStats:
        """Return the counters."""
        return self.core.scheduler.stats()

    def check_all_free(self) -> None:
        """Assert that nothing is held any more, in any tier, and that no invariant is broken."""
        self.core.call("check_integrity")
        stats = self.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_free_host_blocks == stats.num_host_blocks
        assert not self.core.has_unfinished()

    def close(self) -> None:
        """Release the model; with a disk tier, what is cached is written first."""
        self.core.close()


def names_of(name: str, ask: Request) -> list[str]:
    """Return the names of a request's sequences."""
    return [name] if len(ask.seeds) == 1 else [f"{name}-{index}" for index in range(len(ask.seeds))]


ALONE: dict[str, dict[str, Result]] = {}
"""What `alone` has computed; the tests of each module begin with nothing (tests/e2e/conftest.py)."""


def alone(model: Path | str, asks: Iterable[Request], device: str = "cpu", **options: object) -> dict[str, Result]:
    """Return what each sequence of each request says with an engine to itself; requests are called by their numbers.

    What tests of the same module have computed before is not computed again; callers must not change it.
    """
    asks = list(asks)
    key = repr((model, asks, device, options))
    if key not in ALONE:
        driver = EngineDriver(model, device, enable_prefix_caching=False, **options)
        ALONE[key] = {
            name: driver.generate(name, ask.single(index))
            for number, ask in enumerate(asks)
            for index, name in enumerate(names_of(f"{number}", ask))
        }
        driver.check_all_free()
        driver.close()
    return ALONE[key]


def mingle(driver: EngineDriver, asks: list[Request], rng: random.Random, *, twins: bool = False) -> None:
    """Let requests come at random times, and run them all to their ends.

    Args:
        twins: every third request has a twin that is aborted on its way.
    """
    order = list(range(len(asks)))
    rng.shuffle(order)
    doomed: list[str] = []
    while order or driver.core.has_unfinished():
        for _ in range(rng.choice([0, 0, 1, 1, 3])):
            if order:
                number = order.pop()
                driver.add(f"{number}", asks[number])
                if twins and number % 3 == 0:
                    doomed.append(f"twin-{number}")
                    driver.add(doomed[-1], asks[number])
        if doomed and rng.random() < 0.2:
            driver.abort(doomed.pop(rng.randrange(len(doomed))))
        driver.step()
        driver.core.call("check_integrity")

"""A hundred thousand requests aborted at random moments: nothing of them is left behind."""

from __future__ import annotations

import os
import random

import pytest

from quire import SamplingParams
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest, ResumedSequence
from quire.executor.null import NullExecutor
from quire.sampling_params import BeamSearchParams
from tests.helpers.fake_engine import model_info

ABORTS = int(os.environ.get("QUIRE_ABORTS", "100000"))
CHECK_EVERY = 1000
OPTIONS = {
    "plain": {},
    "swapping": {"preemption_mode": "swap", "swap_space": "8MiB"},
    "prefill-first": {"scheduler": "prefill-first", "max_num_batched_tokens": 256, "watermark": 0.0},
    "fair": {"scheduling_policy": "fair"},
}


def make_core(**options: object) -> EngineCore:
    settings = {"block_size": 4, "num_gpu_blocks_override": 120, "max_num_batched_tokens": 48, "max_num_seqs": 12}
    config = EngineConfig.from_kwargs(**{**settings, **options})
    return EngineCore(config, executor=NullExecutor(), info=model_info(1000, 256, ()))


def make_request(rng: random.Random, name: str) -> EngineRequest:
    kind = rng.random()
    count = rng.choice([1, 1, 1, 2, 4]) if kind < 0.8 else 1
    start = rng.randrange(3)  # prompts begin alike, so that blocks are shared
    prompt = [*range(start, start + rng.randrange(1, 90)), rng.randrange(1000)]
    resumed = None
    if kind < 0.1:
        resumed = [ResumedSequence([rng.randrange(1000) for _ in range(rng.randrange(1, 9))]) for _ in range(count)]
    return EngineRequest(
        request_id=name,
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(temperature=1.0),
        arrival_time=0.0,
        sequence_ids=[name] if count == 1 else [f"{name}-{index}" for index in range(count)],
        seeds=list(range(count)),
        stop_ids=[],
        max_tokens=rng.randrange(1, 60),
        tenant=f"t{rng.randrange(3)}",
        beam=BeamSearchParams(beam_width=3, max_tokens=20) if kind >= 0.9 else None,
        grammar="start: /a*/" if 0.8 <= kind < 0.85 else None,
        resumed=resumed,
    )


def check_free(core: EngineCore) -> None:
    core.call("check_integrity")
    stats = core.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_swapped) == (0, 0, 0)
    assert (stats.num_free_blocks, stats.num_free_host_blocks) == (stats.num_blocks, stats.num_host_blocks)
    assert not core.has_unfinished()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", OPTIONS)
def test_nothing_is_left_of_what_was_aborted(name: str) -> None:
    core = make_core(**OPTIONS[name])
    rng = random.Random(name)
    live: list[EngineRequest] = []
    num_added = num_aborted = next_check = 0
    while num_aborted < ABORTS // len(OPTIONS):
        for _ in range(rng.choice([0, 1, 2, 5])):
            live.append(make_request(rng, f"r{num_added}"))
            num_added += 1
            core.add(live[-1])
        for _ in range(rng.choice([0, 1, 2, 4])):
            if live:
                request = live.pop(rng.randrange(len(live)))
                if rng.random() < 0.3 and len(request.sequence_ids) > 1:  # one after another, and with a step between
                    for sequence_id in rng.sample(request.sequence_ids, len(request.sequence_ids)):
                        core.abort(AbortRequests([sequence_id]))
                        if rng.random() < 0.2:
                            core.step()
                else:
                    core.abort(AbortRequests([request.request_id]))
                num_aborted += 1
        if rng.random() < 0.8:
            core.step()
        if num_aborted >= next_check:
            next_check += CHECK_EVERY
            core.call("check_integrity")
            core.abort(AbortRequests([request.request_id for request in live]))
            live.clear()
            while core.has_unfinished():
                core.step()
            check_free(core)
    print(f"{name}: {num_added} requests, {num_aborted} aborted one by one")

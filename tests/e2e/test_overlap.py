"""Planning a step while the one before runs changes nothing that is said: compared with requests alone, one by one.

The CPU computes within `submit`, but its tokens stay where they are until results are taken: ids of the next step come
from there, and the host does not know them when it plans.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.engine.core import EngineCore
from quire.executor.base import Executor
from quire.sampling.sampler import NO_TOKEN_LEFT
from quire.step import ModelOutput, PendingOutput, SchedulerOutput
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, alone, mingle, names_of

VOCAB = 160
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95)
SHARP = SamplingParams(temperature=0.8, top_k=30, min_p=0.01)
FANCY = SamplingParams(temperature=1.3, repetition_penalty=1.2, min_tokens=3, logprobs=2)
SCORED = SamplingParams(temperature=0.0, prompt_logprobs=1, logprobs=0)
NARROW = SamplingParams(temperature=1.5, allowed_token_ids=list(range(40, 52)), frequency_penalty=0.8, min_p=0.01)
BIASED = SamplingParams(temperature=0.7, presence_penalty=1.5, logit_bias={3: 2.0, 90: 3.5}, min_tokens=9)
NAMED = SamplingParams(temperature=1.0, logprob_token_ids=[7, 2, 159], repetition_penalty=0.7)
WHOLE = SamplingParams(temperature=0.0, logprobs=-1, frequency_penalty=0.5)
SPELT = SamplingParams(temperature=0.9, allowed_token_ids=list(range(40, 46)))
OVERLAPPING = {"fancy": FANCY, "narrow": NARROW, "biased": BIASED, "named": NAMED, "whole": WHOLE, "spelt": SPELT}
WORDS: dict[str, tuple[tuple[int, ...], ...]] = dict.fromkeys(OVERLAPPING, ((9,), (40, 41)))
WORDS["spelt"] = ((40, 41), (42,), (43, 44, 40), (44, 44), (45, 40, 43, 43), (45, 45))
DRY = SamplingParams(temperature=0.9, dry_multiplier=0.8, logprobs=1)
MIROSTAT = SamplingParams(temperature=1.0, mirostat=2, presence_penalty=0.3)
TIGHT = {"num_gpu_blocks_override": 34}
ROADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "chunks": {"max_num_batched_tokens": 13},
    "recompute": {**TIGHT, "preemption_mode": "recompute", "max_num_batched_tokens": 40},
    "swap": {**TIGHT, "preemption_mode": "swap", "swap_space": "1MiB", "enable_prefix_caching": False},
    "host": {**TIGHT, "swap_space": "1MiB", "max_num_batched_tokens": 64},
    "prompts first": {**TIGHT, "swap_space": "1MiB", "scheduler": "prefill-first", "max_num_batched_tokens": 512},
    "disk": {**TIGHT, "kv_disk_space": "1MiB", "max_num_batched_tokens": 99},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", num_key_value_heads=2)


class Counting:
    """An executor that counts steps: those begun while another was in flight, and those that the host had a part in."""

    def __init__(self, inner: Executor) -> None:
        self.inner = inner
        self.num_ahead = self.num_postponed = 0
        self._last: PendingOutput | None = None
        self._taken = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def submit(self, plan: SchedulerOutput) -> PendingOutput:
        """Begin a step."""
        self.num_ahead += not self._taken
        pending, counting = self.inner.submit(plan), self
        self.num_postponed += not pending.overlaps and bool(plan.num_scheduled_tokens)

        class Watched:
            overlaps = pending.overlaps

            def result(self) -> ModelOutput:
                if counting._last is self:
                    counting._taken = True
                return pending.result()

        self._last, self._taken = Watched(), False
        return self._last


def watch(core: EngineCore) -> Counting:
    """Put a counting executor into an engine."""
    core.executor = counting = Counting(core.executor)  # type: ignore[assignment]
    return counting


def make_requests(seed: int, count: int, *, overlapping: bool = False) -> list[Request]:
    """Requests of which many begin alike, and many end by a stop id; not `overlapping`: some that the host sees to."""
    rng = random.Random(seed)
    common = [rng.randrange(3, VOCAB) for _ in range(60)]
    kinds = [GREEDY, SEEDED, FANCY, SHARP, NARROW, BIASED, NAMED, WHOLE]
    if not overlapping:
        kinds += [SCORED, DRY, MIROSTAT]
    rng.shuffle(kinds)
    asks = []
    for number in range(count):
        prompt = common[: rng.choice([0, 5, 20, 60])] + [rng.randrange(3, VOCAB) for _ in range(rng.choice([1, 3, 9]))]
        seeds = tuple(rng.randrange(2**40) for _ in range(3 if number % 4 == 2 else 1))
        stop_ids = tuple(range(2, 2 + rng.choice([1, 12])))
        words = tuple(tuple(rng.choices(range(40, 52), k=length)) for length in (1, 2, 2, 3)) if number % 3 else ()
        kind, most = kinds[number % len(kinds)], rng.randrange(1, 30)
        asks.append(Request(prompt, kind, most, seeds, stop_ids=stop_ids, bad_words=words))
    return asks


@pytest.mark.parametrize("overlapping", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("road", ROADS)
def test_no_road_changes_what_is_said(folder: Path, tmp_path: Path, road: str, overlapping: bool) -> None:
    asks = make_requests(3, 11, overlapping=overlapping)
    expected = alone(folder, asks)
    options = {**ROADS[road], **({"kv_disk_dir": str(tmp_path)} if road == "disk" else {})}
    driver = EngineDriver(folder, async_scheduling=True, **options)
    counting = watch(driver.core)
    for turn in range(2):
        driver.results.clear()
        mingle(driver, asks, random.Random(turn), twins=True)
        for number, ask in enumerate(asks):
            for name in names_of(f"{number}", ask):
                assert driver.results[name] == expected[name], name
    stats = driver.stats()
    driver.check_all_free()
    driver.close()
    assert counting.num_ahead > (25 if overlapping else 5)
    assert stats.num_discarded_tokens > 0
    assert road != "swap" or stats.num_swapped_out
    assert not overlapping or road not in ("recompute", "prompts first") or stats.num_preemptions


@pytest.mark.parametrize(
    ("device", "kinds"), [*(("cpu", [kind]) for kind in OVERLAPPING), ("reference", [*OVERLAPPING])], ids=str
)
def test_options_that_the_device_sees_to_hold_nothing_up(folder: Path, device: str, kinds: list[str]) -> None:
    """On a CPU each kind alone, so that its rows are all that steps have.

    Some requests end by a stop id, and one is computed in chunks.
    """
    rng, asks = random.Random(kinds[0]), []
    for number in range(max(4, len(kinds))):
        kind, length = kinds[number % len(kinds)], (2, 9, 25, 9)[number % 4]
        prompt = [rng.randrange(3, VOCAB) for _ in range(length)]
        stop_ids = tuple(range(2, 3 + 9 * (number % 2)))
        asks.append(
            Request(prompt, OVERLAPPING[kind], 8 + 3 * number, (number,), stop_ids=stop_ids, bad_words=WORDS[kind])
        )
    driver = EngineDriver(folder, device, async_scheduling=True, max_num_batched_tokens=20)
    counting = watch(driver.core)
    for number, ask in enumerate(asks):
        driver.add(f"{number}", ask)
    driver.run()
    assert driver.results == alone(folder, asks, device)
    assert counting.num_postponed == 0 and counting.num_ahead >= driver.stats().num_steps - 1
    driver.check_all_free()
    driver.close()


@pytest.mark.parametrize(("kind", "steps"), [(SCORED, 1), (DRY, 4), (MIROSTAT, 4)])
def test_a_row_that_the_host_sees_to_holds_up_its_steps_and_no_others(
    folder: Path, kind: SamplingParams, steps: int
) -> None:
    asks = [Request([5, 6, 7], FANCY, 20, (1,), stop_ids=()), Request([8, 9], kind, 4, (2,), stop_ids=())]
    driver = EngineDriver(folder, async_scheduling=True)
    counting = watch(driver.core)
    for number, ask in enumerate(asks):
        driver.add(f"{number}", ask)
    driver.run()
    assert driver.results == alone(folder, asks)
    assert counting.num_postponed == steps and counting.num_ahead == 19 - steps
    driver.close()


@pytest.mark.parametrize("ends", [True, False])
def test_a_sequence_without_a_token_left_is_told_so_when_its_step_lands(folder: Path, ends: bool) -> None:
    """Its second token may not be what alone is allowed; whoever runs beside it notices nothing."""
    only = SamplingParams(temperature=0.0, allowed_token_ids=[5], logprobs=1, min_tokens=3)
    asks = {
        "lost": Request([4, 4], only, 9, stop_ids=(), bad_words=((5, 5),)),
        "well": Request([9, 8], FANCY, 6, stop_ids=()),
    }
    if not ends:
        asks["lost"] = Request([4, 4], only, 9, stop_ids=(), bad_words=((5, 6),))
    told = []
    for overlapped in (False, True):
        driver = EngineDriver(folder, async_scheduling=overlapped)
        counting = watch(driver.core)
        for name, ask in asks.items():
            driver.add(name, ask)
        news = []
        while driver.core.has_unfinished():
            for item in driver.core.step().outputs:
                news.append((item.sequence_id, item.new_token_ids, item.logprobs, item.finish_reason, item.error))
        told.append(sorted(news, key=lambda item: item[0] == "well"))
        assert counting.num_postponed == 0 or not overlapped
        driver.check_all_free()
        driver.close()
    assert told[0] == told[1]
    lost = [item for item in told[0] if item[0] == "lost"]
    assert len(lost) == (2 if ends else 9) and (lost[-1][-1] == NO_TOKEN_LEFT) == ends


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_what_ends_by_length_costs_nothing_more(folder: Path, device: str) -> None:
    asks = [Request(list(range(5, 15 + number)), GREEDY, 3 + number, stop_ids=()) for number in range(4)]
    told, steps = [], []
    for overlapped in (False, True):
        driver = EngineDriver(folder, device, async_scheduling=overlapped)
        counting = watch(driver.core)
        for number, ask in enumerate(asks):
            driver.add(f"{number}", ask)
        driver.run()
        told.append(driver.results)
        stats = driver.stats()
        steps.append((stats.num_steps, stats.num_scheduled_tokens, stats.num_discarded_tokens))
        assert counting.num_ahead == (stats.num_steps if overlapped else 0)  # also what says that the last has ended
        driver.close()
    assert told[0] == told[1] and steps[0] == steps[1]


def test_texts_usage_and_reasons_of_many_are_the_same(folder: Path) -> None:
    """Through `LLM`, with everything mixed that a request may ask for."""
    prompts = [{"prompt_token_ids": list(range(first, first + 7))} for first in range(5, 90, 9)]
    kinds = [
        SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
        SamplingParams(temperature=1.0, seed=3, max_tokens=9, stop_token_ids=list(range(30))),
        SamplingParams(temperature=1.0, seed=4, n=3, max_tokens=12),
        SamplingParams(temperature=0.0, max_tokens=15, min_tokens=8, stop_token_ids=list(range(60))),
        SamplingParams(temperature=1.0, seed=5, max_tokens=8, logprobs=3, prompt_logprobs=2),
        SamplingParams(temperature=0.9, seed=6, max_tokens=18, presence_penalty=0.5, logit_bias={7: 2.0}),
        SamplingParams(
            temperature=0.7, seed=7, max_tokens=25, repetition_detection={"max_pattern_size": 3, "min_count": 2}
        ),
    ]
    params = [kinds[number % len(kinds)] for number in range(len(prompts))]
    found = []
    for overlapped in (False, True):
        options = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 60, "block_size": 4, "max_num_seqs": 5}
        with LLM(str(folder), async_scheduling=overlapped, **options) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False)
            found.append(
                [
                    (output.prompt_logprobs, item.token_ids, item.logprobs, item.finish_reason, item.stop_reason)
                    for output in outputs
                    for item in output.outputs
                ]
            )
    assert found[0] == found[1]


def test_nothing_is_left_of_an_aborted_request_that_was_in_flight(folder: Path) -> None:
    driver = EngineDriver(folder, async_scheduling=True)
    driver.add("a", Request(list(range(5, 25)), GREEDY, 30, stop_ids=()))
    for _ in range(4):
        driver.step()
    driver.abort("a")
    driver.add("a", Request(list(range(30, 50)), GREEDY, 5, stop_ids=()))
    driver.run()
    again = alone(folder, [Request(list(range(30, 50)), GREEDY, 5, stop_ids=())])["0"]
    assert driver.results["a"].tokens[-5:] == again.tokens and len(driver.results["a"].tokens) == 8
    driver.add("b", Request(list(range(5, 25)), GREEDY, 30, stop_ids=()))
    driver.step()
    driver.abort("b")
    assert driver.core.call("sleep", {"level": 1})["level"] == 1
    driver.core.call("wake_up")
    assert driver.generate("c", Request(list(range(30, 50)), GREEDY, 5, stop_ids=())) == again
    driver.check_all_free()
    driver.close()

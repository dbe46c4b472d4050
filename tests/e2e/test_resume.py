"""An engine dies, another one takes over what it had begun: the texts are what they would have been, bit by bit."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quire import SamplingParams
from quire.demo import demo_model_path
from quire.engine_request import ThinkingData
from quire.errors import RequestError
from tests.helpers.engine_driver import EngineDriver, Request, Result, alone, names_of

VOCAB = 400
OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 16}


def asks(seed: int) -> list[Request]:
    """Requests of all kinds that remember what they generated."""
    rng = random.Random(seed)

    def ask(params: SamplingParams, count: int = 1, **more: Any) -> Request:
        prompt = [rng.randrange(10, VOCAB) for _ in range(rng.choice([2, 9, 40, 130]))]
        seeds = tuple(rng.randrange(2**40) for _ in range(count))
        return Request(prompt, params, rng.randrange(6, 28), seeds, **more)

    warm = {"temperature": 1.0}
    return [
        ask(SamplingParams(temperature=0.0, logprobs=2, prompt_logprobs=1)),
        ask(SamplingParams(**warm, top_p=0.9, logprobs=1), count=3),
        ask(SamplingParams(**warm, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.2, min_tokens=4)),
        ask(SamplingParams(**warm, mirostat=2, mirostat_tau=3.0)),
        ask(SamplingParams(**warm, mirostat=1), count=2),
        ask(SamplingParams(**warm, dry_multiplier=1.0, dry_allowed_length=1)),
        ask(SamplingParams(**warm), grammar='start: /[a-z]{3}/ "-" /[0-9]{4,9}/ "; the end of the matter"'),
        ask(SamplingParams(**warm), thinking=ThinkingData([5], [6, 7], budget=3, open=True)),
        ask(SamplingParams(temperature=0.0, repetition_detection={"max_pattern_size": 3, "min_count": 3})),
    ]


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "options",
    [{}, {"scheduler": "prefill-first", "max_num_batched_tokens": 256}, {"num_gpu_blocks_override": 60}],
    ids=["unified", "prefill-first", "few blocks"],
)
def test_texts_go_on_in_another_engine_as_if_nothing_had_happened(options: dict[str, Any], seed: int) -> None:
    folder = demo_model_path()
    options = {**OPTIONS, **options}
    wanted = asks(seed)
    expected = alone(folder, wanted, **OPTIONS)
    rng = random.Random(seed)
    driver = EngineDriver(folder, **options)
    for number, ask in enumerate(wanted):
        driver.add(f"{number}", ask)
    for _ in range(3):  # as many deaths
        for _ in range(rng.randrange(1, 9)):
            driver.step()
        dead, driver = driver, EngineDriver(folder, **options)
        for number, ask in enumerate(wanted):
            driver.take_over(dead, f"{number}", ask)
        dead.close()
    driver.run()
    assert driver.results.keys() == {name for number, ask in enumerate(wanted) for name in names_of(f"{number}", ask)}
    for name, told in driver.results.items():
        assert told == expected[name], name
    driver.check_all_free()
    driver.close()


def test_a_resumed_request_can_be_aborted_one_by_one() -> None:
    folder = demo_model_path()
    ask = asks(0)[1]
    first = EngineDriver(folder, **OPTIONS)
    first.add("r", ask)
    while not all(name in first.results for name in names_of("r", ask)):
        first.step()
    second = EngineDriver(folder, **OPTIONS)
    second.take_over(first, "r", ask)
    second.abort("r-1")
    second.run()
    expected = alone(folder, [ask], **OPTIONS)
    assert second.results["r-0"] == expected["0-0"] and second.results["r-2"] == expected["0-2"]
    assert second.results["r-1"].finish_reason is None
    second.check_all_free()
    first.close()
    second.close()


def test_a_sequence_is_not_resumed_without_tokens() -> None:
    driver = EngineDriver(demo_model_path(), **OPTIONS)
    other = EngineDriver(demo_model_path(), **OPTIONS)
    other.results = {"r-0": Result(tokens=[5]), "r-1": Result(), "r-2": Result(tokens=[6])}
    other.sampler_states = dict.fromkeys(other.results)
    with pytest.raises(RequestError, match="needs the tokens"):
        driver.take_over(other, "r", asks(0)[1])
    driver.check_all_free()
    driver.close()
    other.close()

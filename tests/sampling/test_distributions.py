"""Draws of every sampling option follow the distribution that its definition gives, alone and two together."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import numpy as np
import pytest

from quire.errors import RequestError
from quire.kernels.backend import Backend
from quire.kernels.create import create_backend
from quire.kernels.gpu.backend import GPUBackend
from quire.kernels.gpu.interpreter import repair_interpreter
from quire.sampling.metadata import Bitmask, SamplingMetadata
from quire.sampling.sampler import Sampler, SamplerOutput
from quire.sampling_params import SamplingParams
from tests.helpers.sampling_rows import metadata_of
from tests.helpers.sampling_truth import chi_square, distribution
from tests.kernels.gpu.common import DEVICE

VOCAB = 48
ROWS = 512
MIN_P = 1e-4
PROMPT = [3, 9, 4, 5, 6, 7, 11, 4, 5, 6]
OUTPUT = [8, 2, 4, 5, 6, 7, 2, 4, 5, 6]
STOP_IDS = [1]
BREAKERS = [([8, 30], []), ([2], [17])]  # as the worker gets them
SPELLED = [[8], [30], [2, 17]]
BACKENDS: dict[str, Backend] = {
    device: create_backend(device, "float32", "float32", 1) for device in ("cpu", "reference")
}
BACKENDS["cuda"] = GPUBackend("float32", "float32", DEVICE)

if DEVICE == "cpu":
    repair_interpreter()

# Each option alone, with settings that change this distribution.
SETTINGS: dict[str, dict[str, Any]] = {
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.7},
    "repetition_penalty": {"repetition_penalty": 1.6},
    "temperature": {"temperature": 1.7},
    "top_p": {"top_p": 0.7},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.2},
    "min_tokens": {"min_tokens": 16},
    "logit_bias": {"logit_bias": {2: 1.5, 5: -2.0}},
    "allowed_token_ids": {"allowed_token_ids": [0, 1, 2, 5, 6, 7, 20, 21]},
    "typical_p": {"typical_p": 0.6},
    "top_n_sigma": {"top_n_sigma": 1.2},
    "xtc": {"xtc_probability": 0.4, "xtc_threshold": 0.08},
    "dry": {"dry_multiplier": 0.8, "dry_base": 1.4},
    "dynatemp": {"dynatemp_range": 0.7, "dynatemp_exponent": 1.3},
    "mirostat_1": {"mirostat": 1, "mirostat_tau": 2.2},
    "mirostat_2": {"mirostat": 2, "mirostat_tau": 1.6},
    "greedy": {"temperature": 0.0},
}


def logits_of() -> np.ndarray:
    """A skewed distribution with no ties, in which likely tokens were in the text before."""
    logits = np.random.default_rng(5).normal(size=VOCAB) * 1.5
    logits[[1, 2, 5, 7]] = [2.6, 2.9, 2.2, 3.1]
    return logits.astype(np.float32)


def metadata(params: SamplingParams, seeds: np.ndarray, state: float | None = None) -> SamplingMetadata:
    """The options of a row for each seed."""
    rest = {"stop_ids": STOP_IDS, "dry_breakers": BREAKERS, "sampler_state": state}
    return metadata_of([params] * len(seeds), VOCAB, prompt=PROMPT, outputs=[OUTPUT] * len(seeds), seeds=seeds, **rest)


def sample(
    params: SamplingParams,
    seeds: np.ndarray,
    *,
    device: str = "cpu",
    logits: np.ndarray | None = None,
    state: float | None = None,
    mask: Bitmask | None = None,
) -> SamplerOutput:
    """Sample one token for each seed, all from the same logits."""
    backend, rows = BACKENDS[device], len(seeds)
    source = logits_of() if logits is None else logits
    batch = metadata(params, seeds, state)
    batch.bitmask = mask
    return Sampler(backend).start(backend.from_numpy(np.tile(source, (rows, 1))), batch).finish()


def draws(params: SamplingParams, count: int, **options: Any) -> np.ndarray:
    """Count the tokens of so many draws, with as many seeds."""
    counts = np.zeros(VOCAB, dtype=np.int64)
    for start in range(0, count, ROWS):
        np.add.at(counts, sample(params, np.arange(start, start + ROWS), **options).token_ids, 1)
    return counts


@functools.cache
def plain_draws() -> np.ndarray:
    """Draws without any option."""
    return draws(SamplingParams(), 4 * ROWS)


def expected(params: SamplingParams, mu: float | None = None) -> np.ndarray:
    return distribution(logits_of(), params, PROMPT, OUTPUT, stop_ids=STOP_IDS, breakers=SPELLED, mu=mu)


@pytest.mark.parametrize("name", SETTINGS)
def test_one_option_alone(name: str) -> None:
    params = SamplingParams(**SETTINGS[name], max_tokens=32)
    probs = expected(params)
    assert chi_square(draws(params, 4 * ROWS), probs) > MIN_P
    plain = expected(SamplingParams())
    assert chi_square(plain_draws(), probs) < MIN_P, "the option should change something"
    assert np.abs(probs - plain).sum() > 0.05


# Four pairs of five are for slow runs; each option still meets some of the others.
PAIRS = [
    pytest.param(one, other, marks=[pytest.mark.slow] if (i + j) % 5 else [])
    for (i, one), (j, other) in itertools.combinations(enumerate(SETTINGS), 2)
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_options_together_do_what_both_say_or_are_refused_by_name(one: str, other: str) -> None:
    fields = {**SETTINGS[one], **SETTINGS[other]}
    try:
        params = SamplingParams(**fields, max_tokens=32)
    except RequestError as error:
        assert error.param in {**SETTINGS[one], **SETTINGS[other]} and "contradicts" in error.message
        return
    probs = expected(params)
    assert chi_square(draws(params, 2 * ROWS), probs) > MIN_P


@pytest.mark.parametrize("name", SETTINGS)
def test_both_backends_draw_the_same_tokens_and_so_does_a_row_by_itself(name: str) -> None:
    params = SamplingParams(**SETTINGS[name], max_tokens=32)
    seeds = np.arange(64) * 7919
    tokens = sample(params, seeds).token_ids
    assert sample(params, seeds, device="reference").token_ids.tolist() == tokens.tolist()
    for row in (0, 9, 63):
        assert sample(params, seeds[row : row + 1]).token_ids.tolist() == [tokens[row]]


# A pair for each option, so that all are drawn on a GPU with another one. Triton's interpreter takes ms for each row.
GPU_PAIRS = list(zip(SETTINGS, [*list(SETTINGS)[5:], *list(SETTINGS)[:5]], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("one", "other"), [*((name, name) for name in SETTINGS), *GPU_PAIRS])
def test_a_gpu_draws_the_same_tokens(one: str, other: str) -> None:
    try:
        params = SamplingParams(**{**SETTINGS[one], **SETTINGS[other]}, max_tokens=32)
    except RequestError as error:
        assert "contradicts" in error.message
        return
    seeds = np.arange(16) * 7919
    expected_tokens = sample(params, seeds).token_ids
    assert sample(params, seeds, device="cuda").token_ids.tolist() == expected_tokens.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["temperature", "top_p", "top_k", "min_p", "repetition_penalty"])
def test_one_option_alone_on_a_gpu(name: str) -> None:
    params = SamplingParams(**SETTINGS[name], max_tokens=32)
    assert chi_square(draws(params, ROWS, device="cuda"), expected(params)) > MIN_P


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("mu", [0.05, 0.9, 6.0, -1.0])
def test_mirostat_goes_on_from_its_state(version: int, mu: float) -> None:
    params = SamplingParams(mirostat=version, temperature=0.8)
    if version == 1 and mu < 0:
        probs = np.eye(VOCAB)[int(np.argmax(logits_of()))]
    else:
        probs = expected(params, mu=mu)
    assert chi_square(draws(params, 2 * ROWS, state=mu), probs) > MIN_P


@pytest.mark.parametrize("name", sorted(SETTINGS.keys() - {"allowed_token_ids"}))
def test_what_a_grammar_bars_counts_for_no_sampler(name: str) -> None:
    allowed = [0, 1, 2, 5, 6, 7, 20, 21]
    bits = np.zeros((ROWS, 2), dtype=np.int64)
    for token in allowed:
        bits[:, token // 32] |= 1 << token % 32
    mask = Bitmask(np.arange(ROWS), bits.astype(np.uint32).view(np.int32), np.full(ROWS, -1))
    params = SamplingParams(**SETTINGS[name], max_tokens=32)
    counts = np.zeros(VOCAB, dtype=np.int64)
    for start in range(0, 2 * ROWS, ROWS):
        np.add.at(counts, sample(params, np.arange(start, start + ROWS), mask=mask).token_ids, 1)
    assert chi_square(counts, expected(params.clone(allowed_token_ids=allowed))) > MIN_P


def test_xtc_of_another_purpose_than_the_draw() -> None:
    """Whether the top is excluded and which token is drawn are independent."""
    params = SamplingParams(xtc_probability=0.5, xtc_threshold=0.08)
    seeds = np.arange(4096)
    always = sample(SamplingParams(xtc_probability=1.0, xtc_threshold=0.08), seeds).token_ids
    never = sample(SamplingParams(), seeds).token_ids
    mixed = sample(params, seeds).token_ids
    assert np.all((mixed == always) | (mixed == never))
    differ = always != never
    assert 0.4 < (mixed[differ] == always[differ]).mean() < 0.6


EXTREME_ROWS = {
    "all but one": np.where(np.arange(VOCAB) == 7, 0.5, -np.inf),
    "all equal": np.zeros(VOCAB),
    "two levels": np.where(np.arange(VOCAB) % 2, 3.0, 0.0),
    "far apart": np.linspace(-3e38, 3e38, VOCAB),
    "one far above": np.where(np.arange(VOCAB) == 9, 1e6, 0.0),
    "hardly finite": np.where(np.arange(VOCAB) < 2, -3e38, -np.inf),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("row", EXTREME_ROWS)
@pytest.mark.parametrize("name", SETTINGS)
def test_extreme_logits_give_tokens_that_are_there(name: str, row: str) -> None:
    settings = {key: value for key, value in SETTINGS[name].items() if key != "allowed_token_ids"}
    logits = EXTREME_ROWS[row].astype(np.float32)
    sampled = sample(SamplingParams(**settings, max_tokens=32), np.arange(4), logits=logits)
    assert not sampled.errors
    assert np.isfinite(logits[sampled.token_ids]).all()


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_that_are_not_finite_spoil_no_other_row(name: str) -> None:
    params = SamplingParams(**SETTINGS[name], max_tokens=32)
    backend = BACKENDS["cpu"]
    good = sample(params, np.array([5])).token_ids[0]
    logits = np.tile(logits_of(), (4, 1))
    logits[0, 3], logits[1, :], logits[3, 4] = np.nan, -np.inf, np.inf
    batch = metadata(params, np.full(4, 5))
    assert Sampler(backend).start(backend.from_numpy(logits), batch).finish().token_ids[2] == good


@pytest.mark.parametrize("device", BACKENDS)
def test_a_vocabulary_of_one(device: str) -> None:
    backend = BACKENDS[device]
    for name in ("typical_p", "top_n_sigma", "xtc", "dry", "dynatemp", "mirostat_1", "mirostat_2"):
        params = SamplingParams(**SETTINGS[name])
        batch = metadata_of([params], 1, prompt=[0] * 4, outputs=[[0] * 5])
        sampled = Sampler(backend).start(backend.from_numpy(np.array([[2.5]], dtype=np.float32)), batch).finish()
        assert (sampled.token_ids.tolist(), sampled.errors) == ([0], {})


def test_options_that_leave_no_token_are_an_error_of_their_own_row() -> None:
    barred = SamplingParams(allowed_token_ids=[1], min_tokens=16, max_tokens=32)
    sampled = sample(barred, np.arange(2))
    assert sampled.token_ids.tolist() == [-1, -1]
    assert sorted(sampled.errors) == [0, 1] and "leave no token" in sampled.errors[0].message

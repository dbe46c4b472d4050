"""The sampler applies each request's options, to its own row only."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.backend import DeviceTokens
from quire.kernels.create import create_backend
from quire.sampling.sampler import Sampler, SamplerOutput
from quire.sampling_params import SamplingParams
from tests.helpers.sampling_rows import metadata_of

VOCAB = 50


def run(
    logits: np.ndarray,
    rows: list[SamplingParams],
    *,
    outputs: list[list[int]] | None = None,
    stop_ids: list[int] | None = None,
    bad: list[list[int]] | None = None,
    device: str = "reference",
    positions: np.ndarray | None = None,
) -> SamplerOutput:
    backend = create_backend(device, "float32", "float32", 1)
    batch = metadata_of(
        rows,
        VOCAB,
        prompt=[1, 2, 3],
        outputs=outputs or [[] for _ in rows],
        positions=np.arange(len(rows)) + 3 if positions is None else positions,
        stop_ids=stop_ids or [],
        bad_words_ids=bad or [],
    )
    return Sampler(backend).start(backend.from_numpy(logits.astype(np.float32)), batch).finish()


def rising(rows: int) -> np.ndarray:
    """Logits that grow with the token id, so that greedy takes the last allowed one."""
    return np.tile(np.linspace(0, 5, VOCAB), (rows, 1))


def greedy(**fields: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, **fields)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (greedy(), 49),
        (greedy(allowed_token_ids=[3, 11]), 11),
        (greedy(logit_bias={7: 100.0}), 7),
        (greedy(logit_bias={49: -100.0}), 48),
        (greedy(presence_penalty=2.0), 47),  # 48 and 49 were generated
        (greedy(repetition_penalty=10.0), 47),
    ],
)
def test_each_option_changes_its_own_row_only(params: SamplingParams, expected: int) -> None:
    sampled = run(rising(3), [greedy(), params, greedy()], outputs=[[48, 49]] * 3)
    assert sampled.token_ids.tolist() == [49, expected, 49]


def test_stop_ids_are_barred_until_min_tokens() -> None:
    params = greedy(min_tokens=2)
    early = run(rising(1), [params], outputs=[[5]], stop_ids=[49, 48])
    late = run(rising(1), [params], outputs=[[5, 6]], stop_ids=[49, 48])
    assert (early.token_ids[0], late.token_ids[0]) == (47, 49)


def test_a_bad_word_is_barred_only_where_its_beginning_was_just_generated() -> None:
    bad = [[10, 49], [48]]
    params = [greedy(bad_words=["x"])] * 3
    sampled = run(rising(3), params, outputs=[[10], [10, 3], []], bad=bad)
    assert sampled.token_ids.tolist() == [47, 49, 49]


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_last_token_that_only_the_device_knows_counts_as_one_that_is_known(device: str) -> None:
    """For bad words, stop ids until `min_tokens` and penalties; what lies in its place here is not looked at."""
    backend = create_backend(device, "float32", "float32", 1)
    put = backend.from_numpy
    rows = [greedy(bad_words=["x"]), greedy(min_tokens=3), greedy(repetition_penalty=10.0), greedy(logprobs=1)] * 2
    lasts, bad = [10, 10, 49, 10, 11, 11, 48, 11], [[10, 49], [48], [3, 10, 47], [4, 11, 49]]
    outputs = [[3, last] for last in lasts]
    logits = rising(8).astype(np.float32)
    known = run(logits, rows, outputs=outputs, stop_ids=[49], bad=bad, device=device)
    places = np.array([3, 1, 4, 7, 5, 9, 2, 6])
    held = np.zeros(10, np.int64)
    held[places] = lasts
    batch = metadata_of(rows, VOCAB, prompt=[1, 2, 3], outputs=[[3]] * 8, stop_ids=[49], bad_words_ids=bad)
    batch.positions = np.arange(8) + 3
    batch.output_ids = [np.array([3, 12], np.int32)] * 8
    batch.device_tokens = DeviceTokens(put(held), places)
    sampled = Sampler(backend).start(put(logits.copy()), batch).finish()
    assert sampled.token_ids.tolist() == known.token_ids.tolist() and sampled.logprobs == known.logprobs
    assert sampled.token_ids[[0, 4]].tolist() == [46, 49]


def test_frequency_counts_generated_tokens_and_repetition_the_prompt_too() -> None:
    logits = np.zeros((2, VOCAB))
    logits[:, 2] = 1.0  # in the prompt, not generated
    logits[:, 5] = 0.9  # generated three times
    logits[:, 9] = 0.5
    rows = [greedy(frequency_penalty=0.2), greedy(repetition_penalty=3.0)]
    assert run(logits, rows, outputs=[[5, 5, 5]] * 2).token_ids.tolist() == [2, 9]


def test_logprobs_describe_the_raw_logits_and_hold_the_chosen_token_first() -> None:
    logits = rising(2)
    sampled = run(logits, [greedy(), greedy(logprobs=3, logit_bias={4: 100.0})])
    assert list(sampled.logprobs) == [1]
    entry = sampled.logprobs[1]
    expected = logits[1] - np.log(np.exp(logits[1]).sum())
    assert entry.token_ids == [4, 49, 48, 47]
    assert entry.rank == 46
    np.testing.assert_allclose(entry.logprobs, expected[entry.token_ids], rtol=1e-5)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_logprobs_of_the_whole_vocabulary_beside_those_of_a_few_tokens(device: str) -> None:
    logits = np.random.default_rng(3).normal(size=(4, VOCAB))
    rows = [greedy(logprobs=-1), greedy(logprobs=2), greedy(), greedy(logprob_token_ids=[7, 9, 7], seed=1)]
    sampled = run(logits, rows, device=device)
    expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    whole, few, named = (sampled.logprobs[row] for row in (0, 1, 3))
    order = np.argsort(-logits[0]).tolist()
    assert whole.token_ids == [order[0], *order] and len(few.token_ids) == 3
    assert named.token_ids == [int(logits[3].argmax()), 7, 9, 7] and named.rank == 1
    for row, entry in ((0, whole), (1, few), (3, named)):
        np.testing.assert_allclose(entry.logprobs, expected[row, entry.token_ids], rtol=1e-5)


def test_more_logprobs_than_tokens_are_all_of_them() -> None:
    sampled = run(rising(1), [greedy(logprobs=VOCAB + 20)])
    assert len(sampled.logprobs[0].token_ids) == VOCAB + 1


def test_rows_that_are_not_finite_leave_the_others_alone() -> None:
    logits = rising(4)
    logits[1, 3] = np.nan
    logits[2, :] = -np.inf
    sampled = run(logits, [greedy()] * 4)
    assert sampled.token_ids[[0, 3]].tolist() == [49, 49]


def test_the_same_seed_and_position_draw_the_same_token_in_any_batch() -> None:
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(6, VOCAB))
    params = [SamplingParams(seed=s, temperature=1.0, top_p=0.9) for s in range(6)]
    together = run(logits, params).token_ids
    backend = create_backend("reference", "float32", "float32", 1)
    alone = []
    for row in range(6):
        batch = metadata_of([params[row]], VOCAB, prompt=[1] * (row + 3), outputs=[[]])
        row_logits = backend.from_numpy(logits[row : row + 1].astype(np.float32))
        alone.append(int(Sampler(backend).start(row_logits, batch).finish().token_ids[0]))
    assert together.tolist() == alone


def random_options(number: int) -> SamplingParams:
    """Every kind of option, in some combination."""
    rng = np.random.default_rng(number)
    fields: dict[str, object] = {"temperature": float(rng.choice([0.0, 0.7, 1.0, 2.0])), "seed": number}
    fields["logprobs"] = rng.choice([None, 0, 1, 4])
    for name, value in (
        ("top_p", 0.8),
        ("top_k", 7),
        ("min_p", 0.05),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.7),
        ("repetition_penalty", 1.4),
        ("logit_bias", {3: 4.0, 9: -100.0}),
        ("allowed_token_ids", list(range(0, VOCAB, 2))),
        ("min_tokens", 3),
    ):
        if rng.random() < 0.3:
            fields[name] = value
    return SamplingParams(**fields)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_row_is_sampled_alike_in_any_batch(device: str) -> None:
    """Tokens and log-probabilities, bit by bit, with ties among the logits, whatever the other rows ask for."""
    rng = np.random.default_rng(1)
    count = 40
    rows = [random_options(number) for number in range(count)]
    logits = np.round(rng.normal(size=(count, VOCAB)) * 4) / 4
    outputs = [rng.integers(0, VOCAB, number % 6).tolist() for number in range(count)]
    common = {"stop_ids": [49, 20], "device": device}

    def sample(chosen: list[int]) -> dict[int, tuple[int, object]]:
        """Return token and log-probabilities of each of these rows, computed together."""
        sampled = run(
            logits[chosen],
            [rows[row] for row in chosen],
            outputs=[outputs[row] for row in chosen],
            positions=np.array(chosen) + 3,
            **common,
        )
        tokens = sampled.token_ids.tolist()
        return {row: (tokens[place], sampled.logprobs.get(place)) for place, row in enumerate(chosen)}

    alone = {row: sample([row])[row] for row in range(count)}
    assert sum(entry is not None for _, entry in alone.values()) > 10
    assert len({token for token, _ in alone.values()}) > 10
    for size in (2, 5, 17, count):
        chosen = rng.permutation(count)[:size].tolist()
        assert sample(chosen) == {row: alone[row] for row in chosen}

"""Beam search: worked by hand, against exhaustive and slow searches, and against transformers' on random models.

transformers sums in float32 and we in double, so beams whose sums differ by less than about 1e-6 could rank either way.
The seeds here have no such pair at a place where it counts. Equal sums, which the tables below do have, rank by their
parents and then by their own order, as the slow search says too.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling_params import BeamSearchParams
from quire.scheduler.beam import BeamSearch, Step, place
from quire.step import BeamOutput
from tests.helpers.checkpoints import write_checkpoint

Distribution = Callable[[tuple[int, ...]], list[float]]  # generated tokens -> log-probability of every next token


def best(logprobs: list[float], count: int) -> tuple[list[int], list[float]]:
    """What the worker returns for a beam."""
    token_ids = sorted(range(len(logprobs)), key=lambda token_id: -logprobs[token_id])[:count]
    return token_ids, [logprobs[token_id] for token_id in token_ids]


def drive(search: BeamSearch, distribution: Distribution) -> Iterator[Step]:
    """Run `search` to its end as the engine would, with the histories kept outside of it; yield its steps."""
    histories: list[tuple[int, ...]] = [()]
    while not search.over:
        step = search.advance([best(distribution(history), search.num_candidates) for history in histories])
        histories = [(*histories[parent], token_id) for parent, token_id in step.running]
        yield step


def beams_of(distribution: Distribution, stop_ids: set[int], max_tokens: int, **params) -> list[BeamOutput]:
    search = BeamSearch(BeamSearchParams(**params), stop_ids=stop_ids, max_tokens=max_tokens)
    for _ in drive(search, distribution):
        pass
    return search.beams()


def texts(beams: list[BeamOutput]) -> list[list[int]]:
    return [beam.token_ids for beam in beams]


# By hand. Tokens: 0 ends a beam, 1 and 2 do not. Probabilities of tokens 0, 1, 2 by the last token.

AFTER = {None: (0.1, 0.5, 0.4), 1: (0.3, 0.4, 0.3), 2: (0.1, 0.0, 0.9)}


def markov(history: tuple[int, ...]) -> list[float]:
    return [math.log(p) if p else -math.inf for p in AFTER[history[-1] if history else None]]


def test_two_beams_worked_by_hand():
    search = BeamSearch(BeamSearchParams(beam_width=2, length_penalty=0.0), stop_ids={0}, max_tokens=3)
    steps = list(drive(search, markov))
    assert steps == [
        Step([(0, 1), (0, 2)], over=False),  # 1: 0.5, 2: 0.4; the end has 0.1 and is not among the best two
        Step([(1, 2), (0, 1)], over=False),  # 22: 0.36, 11: 0.2
        Step([], over=True),  # 222: 0.324, 110 and 112: 0.06, 111: 0.08
    ]
    assert search.beams() == [
        BeamOutput([2, 2, 2], pytest.approx(math.log(0.324)), pytest.approx(math.log(0.324)), "length"),
        BeamOutput([1, 1, 1], pytest.approx(math.log(0.08)), pytest.approx(math.log(0.08)), "length"),
    ]


def test_a_greedy_search_misses_what_two_beams_find():
    assert texts(beams_of(markov, {0}, 3, beam_width=1)) == [[1, 1, 1]]
    assert texts(beams_of(markov, {0}, 3, beam_width=2))[0] == [2, 2, 2]


def test_width_one_ends_with_its_first_stop_id():
    """Even where a longer beam would rank before it."""

    def ends(history: tuple[int, ...]) -> list[float]:
        return [math.log(p) for p in ((0.6, 0.4) if history else (0.4, 0.6))]

    beam = BeamOutput([1, 0], pytest.approx(math.log(0.36)), pytest.approx(math.log(0.36) / 4), "stop")
    assert beams_of(ends, {0}, 9, beam_width=1, length_penalty=2.0, early_stopping="never") == [beam]


# Probabilities of tokens 0, 1, 2 by what came before; after anything else the end is certain.
EARLY_END = {(): (0.48, 0.12, 0.4), (2,): (0.55, 0.0, 0.45), (2, 2): (0.99, 0.0, 0.01)}


def early_end(history: tuple[int, ...]) -> list[float]:
    return [math.log(p) if p else -math.inf for p in EARLY_END.get(history, (1.0, 0.0, 0.0))]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "expected"),
    [
        # Of two beams, 0 ends in the first step (0.48), 20 in the second (0.22): enough have finished.
        (True, 0.0, [[0], [2, 0]]),
        (True, 2.0, [[2, 0], [0]]),  # log 0.22 / 4 against log 0.48
        # What may still come is 22 (0.18) and its children. As long as it is now, it ranks behind both ...
        (False, 0.0, [[0], [2, 0]]),
        (False, 0.9, [[0], [2, 0]]),
        (False, -1.0, [[0], [2, 0]]),
        # ... unless length counts for more ...
        (False, 2.0, [[2, 2, 0], [2, 0]]),
        # ... or it is judged as if it had 5 tokens already: log 0.18 / 5 ** 0.9 against log 0.22 / 2 ** 0.9.
        ("never", 0.0, [[0], [2, 0]]),
        ("never", 0.9, [[2, 2, 0], [0]]),
        ("never", -1.0, [[0], [2, 0]]),
    ],
)
def test_when_the_search_ends(early_stopping, length_penalty, expected):
    params = {"beam_width": 2, "early_stopping": early_stopping, "length_penalty": length_penalty}
    assert texts(beams_of(early_end, {0}, 5, **params)) == expected


def test_never_judges_by_the_present_length_where_short_beams_are_liked():
    """The running beam may only get worse: 22 (0.49) at length 2 ranks before 20 (0.21), at length 9 it would not."""

    def falling(history: tuple[int, ...]) -> list[float]:
        return [math.log(p) if p else -math.inf for p in ((0.3, 0.0, 0.7) if len(history) < 2 else (1.0, 0.0, 0.0))]

    beams = beams_of(falling, {0}, 9, beam_width=2, early_stopping="never", length_penalty=-1.0)
    assert texts(beams) == [[0], [2, 2, 0]]


def test_a_running_beam_that_could_only_draw_level_does_not_keep_the_search_open():
    search = BeamSearch(BeamSearchParams(beam_width=2, length_penalty=0.0), stop_ids={0}, max_tokens=9)
    search.advance([([0, 1, 2], [-0.5, -1.0, -2.0])])
    assert search.advance([([1, 0, 2], [-0.25, -0.25, -4.0]), ([1, 0, 2], [-3.0, -3.0, -4.0])]) == Step([], over=True)
    assert [(beam.token_ids, beam.score) for beam in search.beams()] == [([0], -0.5), ([1, 0], -1.25)]


def test_an_end_outside_the_best_continuations_is_no_beam():
    """In the first step the end (0.1) ranks third. Two beams do not have it, though it would rank before 11."""
    assert texts(beams_of(markov, {0}, 2, beam_width=2, length_penalty=-1.0)) == [[2, 2], [1, 1]]
    assert texts(beams_of(markov, {0}, 2, beam_width=3, length_penalty=-1.0)) == [[2, 2], [0], [1, 1]]


def test_a_stop_id_with_the_last_token_allowed_is_a_stop():
    beams = beams_of(lambda _: [math.log(0.6), math.log(0.4)], {0}, 1, beam_width=2)
    assert [(beam.token_ids, beam.finish_reason) for beam in beams] == [([0], "stop"), ([1], "length")]


def test_equal_sums_rank_by_parent_and_then_by_the_workers_order():
    search = BeamSearch(BeamSearchParams(beam_width=3), stop_ids=(), max_tokens=9)
    assert search.advance([([4, 7, 5], [-1.0, -1.0, -1.0])]).running == [(0, 4), (0, 7), (0, 5)]
    step = search.advance([([1, 2, 3], [-2.0, -3.0, -9.0]), ([1, 2, 3], [-2.0, -2.5, -9.0]), ([8], [-2.0])])
    assert step.running == [(0, 1), (1, 1), (2, 8)]


def test_a_small_vocabulary_begins_with_fewer_beams():
    search = BeamSearch(BeamSearchParams(beam_width=8), stop_ids=(), max_tokens=4)
    widths = [len(step.running) for step in drive(search, lambda _: [math.log(0.5)] * 2)]
    assert widths == [2, 4, 8, 0]
    assert len(search.beams()) == 8


def test_impossible_tokens_are_never_taken():
    beams = beams_of(lambda _: [0.0, -math.inf, -math.inf], set(), 3, beam_width=3)
    assert texts(beams) == [[0, 0, 0]]


def test_a_search_that_is_cut_short_returns_its_running_beams():
    search = BeamSearch(BeamSearchParams(beam_width=2), stop_ids={0}, max_tokens=9)
    assert search.beams() == []
    search.advance([([0, 1, 2], [-0.5, -1.0, -2.0])])
    search.advance([([1, 2, 0], [-1.0, -8.0, -9.0]), ([1, 2, 0], [-0.6, -8.0, -9.0])])
    assert [(beam.token_ids, beam.score, beam.finish_reason) for beam in search.beams()] == [
        ([0], -0.5, "stop"),
        ([1, 1], -1.0, "length"),
    ]
    assert not search.over


def test_long_searches_cost_a_step_each():
    """Histories share their beginnings: 10,000 steps of two beams are no 10,000 ** 2 tokens, nor a deep recursion."""
    search = BeamSearch(BeamSearchParams(beam_width=2), stop_ids=(), max_tokens=10_000)
    candidates = [([1, 2], [-0.1, -5.0])]
    while not search.over:
        candidates = [([1, 2], [-0.1, -5.0])] * len(search.advance(candidates).running)
    assert [len(beam.token_ids) for beam in search.beams()] == [10_000] * 2
    assert sorted(sum(token_id == 2 for token_id in beam.token_ids) for beam in search.beams()) == [0, 1]


def test_place_forks_only_what_has_more_than_one_child():
    placement = place([(2, 50), (0, 51), (2, 52), (2, 53)], 4)
    assert placement.in_place == [(2, 0), (0, 1)]
    assert placement.forks == [(2, 2), (2, 3)]
    assert placement.ended == [1, 3]
    assert place([], 2) == ([], [], [0, 1])


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=7))
def test_every_child_has_a_place_and_every_parent_a_fate(running):
    placement = place(running, 7)
    placed = placement.in_place + placement.forks
    assert sorted(child for _, child in placed) == list(range(len(running)))
    assert all(running[child][0] == parent for parent, child in placed)
    assert sorted([parent for parent, _ in placement.in_place] + placement.ended) == list(range(7))


# Against searches that are slow and plain.


def slow_search(
    distribution: Distribution,
    stop_ids: set[int],
    max_tokens: int,
    beam_width: int,
    length_penalty: float,
    early_stopping: bool | str,
) -> list[tuple[float, tuple[int, ...]]]:
    """Rank the whole vocabulary of every beam in every step, as transformers does; return (score, tokens)."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    finished: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, max_tokens + 1):
        ranked = sorted(
            (
                (total + logprob, (*history, token_id))
                for total, history in running
                for token_id, logprob in enumerate(distribution(history))
                if logprob > -math.inf
            ),
            key=lambda candidate: -candidate[0],
        )[: max(2, 1 + len(stop_ids)) * beam_width]
        ends = [length == max_tokens or history[-1] in stop_ids for _, history in ranked]
        running = [candidate for candidate, end in zip(ranked, ends, strict=True) if not end][:beam_width]
        finished += [
            (total / length**length_penalty, history)
            for (total, history), end in list(zip(ranked, ends, strict=True))[:beam_width]
            if end
        ]
        finished = sorted(finished, key=lambda candidate: -candidate[0])[:beam_width]
        if not running:
            break
        if len(finished) == beam_width:
            hoped_for = max_tokens if early_stopping == "never" and length_penalty > 0 else length
            if early_stopping is True or running[0][0] / hoped_for**length_penalty <= finished[-1][0]:
                break
    return finished


def random_distribution(seed: int, vocab_size: int, levels: int) -> Distribution:
    """Log-probabilities that depend on the whole history; with few `levels`, many are equal or zero."""

    @cache
    def logprobs(history: tuple[int, ...]) -> list[float]:
        rng = random.Random(f"{seed} {history}")
        weights = [rng.randint(0, levels) for _ in range(vocab_size)]
        weights[rng.randrange(vocab_size)] += 1  # something is possible
        return [math.log(weight / sum(weights)) if weight else -math.inf for weight in weights]

    return logprobs


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(1, 9),
    levels=st.sampled_from([1, 4, 10**6]),
    num_stop_ids=st.integers(0, 3),
    max_tokens=st.integers(1, 10),
    beam_width=st.integers(2, 6),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_equal_to_a_slow_search(seed, vocab_size, levels, num_stop_ids, max_tokens, **params):
    distribution = random_distribution(seed, vocab_size, levels)
    stop_ids = set(range(min(num_stop_ids, vocab_size)))
    expected = slow_search(distribution, stop_ids, max_tokens, **params)
    beams = beams_of(distribution, stop_ids, max_tokens, **params)
    assert [(beam.score, tuple(beam.token_ids)) for beam in beams] == expected
    for beam in beams:
        assert beam.finish_reason == ("stop" if beam.token_ids[-1] in stop_ids else "length")
        steps = [distribution(tuple(beam.token_ids[:n]))[token_id] for n, token_id in enumerate(beam.token_ids)]
        assert beam.cumulative_logprob == pytest.approx(sum(steps))
        assert beam.score == pytest.approx(sum(steps) / len(steps) ** params["length_penalty"])


def all_texts(vocab_size: int, stop_ids: set[int], max_tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield every sequence that ends with its first stop id or at `max_tokens`."""
    for length in range(1, max_tokens + 1):
        for text in itertools.product(range(vocab_size), repeat=length):
            ended = text[-1] in stop_ids or length == max_tokens
            if ended and not stop_ids & set(text[:-1]):
                yield text


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    vocab_size=st.integers(2, 4),
    num_stop_ids=st.integers(0, 2),
    max_tokens=st.integers(1, 3),
    length_penalty=st.sampled_from([-1.0, 0.0, 1.0, 2.0]),
    early_stopping=st.sampled_from([True, False, "never"]),
)
def test_with_room_for_everything_the_search_is_exhaustive(
    seed, vocab_size, num_stop_ids, max_tokens, length_penalty, early_stopping
):
    distribution = random_distribution(seed, vocab_size, 10**6)
    stop_ids = set(range(num_stop_ids))
    scores = {
        text: sum(distribution(text[:n])[token_id] for n, token_id in enumerate(text)) / len(text) ** length_penalty
        for text in all_texts(vocab_size, stop_ids, max_tokens)
    }
    expected = sorted((text for text in scores if scores[text] > -math.inf), key=lambda text: -scores[text])
    options = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    beams = beams_of(distribution, stop_ids, max_tokens, beam_width=len(scores), **options)
    assert [tuple(beam.token_ids) for beam in beams] == expected
    assert [beam.score for beam in beams] == pytest.approx([scores[text] for text in expected])


# Against transformers, which takes long to import.

PROMPTS = [[5, 9, 11], [3], [17, 8, 8, 30, 41, 2]]
WIDTHS, MAX_TOKENS = (2, 4, 7), (1, 2, 3, 5, 8, 13, 20)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Random Llamas with 50 tokens, and the distribution of each after one of PROMPTS."""
    import torch
    from transformers import AutoModelForCausalLM

    def load(seed: int):
        folder = write_checkpoint(tmp_path_factory.mktemp("beams"), seed=seed, vocab_size=50)
        model = AutoModelForCausalLM.from_pretrained(folder).eval()

        @cache
        def logprobs(history: tuple[int, ...]) -> list[float]:
            with torch.no_grad():
                logits = model(torch.tensor([PROMPTS[seed] + list(history)])).logits[0, -1]
            return torch.log_softmax(logits, dim=-1).tolist()

        return model, logprobs

    return [load(seed) for seed in range(len(PROMPTS))]


def theirs(model, prompt: list[int], stop_ids: list[int], **options) -> list[tuple[list[int], float | None]]:
    """The beams of transformers: tokens, cut off after their stop id, and score."""
    import torch

    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        eos_token_id=stop_ids or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    found = []
    for row in output.sequences[:, len(prompt) :].tolist():
        end = next((at + 1 for at, token_id in enumerate(row) if token_id in stop_ids), len(row))
        found.append(row[:end])
    scores = output.sequences_scores.tolist() if options["num_beams"] > 1 else [None]
    return list(zip(found, scores, strict=True))


def likely_ends(distribution: Distribution, number: int) -> list[int]:
    """Tokens of the best beams without any end, so that with them as stop ids beams do end, at different times."""
    if not number:
        return []
    paths = texts(beams_of(distribution, set(), 8, beam_width=4))
    return list(dict.fromkeys([paths[0][4], paths[1][2], paths[2][1], paths[3][6], *paths[0]]))[:number]


@pytest.mark.slow
@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0, -1.0])
@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("number_of_stop_ids", [0, 1, 2])
def test_equal_to_transformers(models, number_of_stop_ids, early_stopping, length_penalty):
    cases = list(itertools.product(range(len(PROMPTS)), WIDTHS, MAX_TOKENS))
    choice = random.Random(f"{number_of_stop_ids} {early_stopping} {length_penalty}")
    for seed, width, max_tokens in choice.sample(cases, 4):
        model, distribution = models[seed]
        stop_ids = likely_ends(distribution, number_of_stop_ids)
        options = {"early_stopping": early_stopping, "length_penalty": length_penalty}
        ours = beams_of(distribution, set(stop_ids), max_tokens, beam_width=width, **options)
        expected = theirs(model, PROMPTS[seed], stop_ids, max_new_tokens=max_tokens, num_beams=width, **options)
        case = f"model {seed}, width {width}, {max_tokens} tokens"
        assert texts(ours) == [tokens for tokens, _ in expected], case
        assert [beam.score for beam in ours] == pytest.approx([s for _, s in expected], rel=1e-5, abs=1e-4), case


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [1, 4, 20])
def test_width_one_equals_transformers_greedy_search(models, max_tokens):
    for (model, distribution), prompt in zip(models, PROMPTS, strict=True):
        for stop_ids in ([], likely_ends(distribution, 2)):
            expected = theirs(model, prompt, stop_ids, max_new_tokens=max_tokens, num_beams=1)
            assert texts(beams_of(distribution, set(stop_ids), max_tokens, beam_width=1)) == [expected[0][0]]


@pytest.mark.slow
def test_the_models_make_beams_end_at_different_times(models):
    """Or else the comparison above would show little."""
    lengths = set()
    for _, distribution in models:
        stop_ids = set(likely_ends(distribution, 2))
        beams = beams_of(distribution, stop_ids, 20, beam_width=7)
        lengths |= {len(beam.token_ids) for beam in beams if beam.finish_reason == "stop"}
    assert len(lengths) >= 5

"""Steps of a runner: groups of layers, forks and beams give what sequences computed by themselves would."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.kernels.backend import Array, AttentionMetadata
from quire.kernels.create import create_backend
from quire.models.interface import Model
from quire.models.loader import load_model
from quire.sampling_params import SamplingParams
from quire.step import ContinuingSequenceData, SchedulerOutput, TokenTopLogprobs
from quire.worker.input_batch import StepInputs
from tests.helpers.checkpoints import oracle_logits, write_checkpoint
from tests.helpers.runner_driver import OneGroup, RunnerDriver, Sequence
from tests.helpers.transfers import COPY, transfers_of

# Layers of two kinds in three groups, the last of which has fewer layers; the window is no multiple of a block.
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
WINDOWED: dict[str, Any] = {
    "num_hidden_layers": len(KINDS),
    "num_key_value_heads": 2,
    "use_sliding_window": True,
    "sliding_window": 7,
    "max_window_layers": 0,
    "layer_types": KINDS,
}
GREEDY = SamplingParams(temperature=0.0, logprobs=3)
PLAIN = SamplingParams(temperature=0.0)
FANCY = SamplingParams(
    temperature=1.5, top_p=0.95, top_k=40, repetition_penalty=1.2, frequency_penalty=0.5, min_tokens=3, logprobs=2
)
PROMPT = [5, 9, 11, 3, 7, 8, 140, 61, 33, 20]
BACKENDS = [("cpu", "float32"), ("cpu", "bfloat16"), ("cpu", "int8"), ("reference", "float32")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "plain": write_checkpoint(tmp_path_factory.mktemp("plain"), "llama"),
        "windowed": write_checkpoint(tmp_path_factory.mktemp("windowed"), "qwen2", **WINDOWED),
    }


def make(folder: Path, device: str = "cpu", kv_dtype: str = "float32", *, one_group: bool = False) -> RunnerDriver:
    backend = create_backend(device, "float32", kv_dtype)
    model = load_model(load_model_info(folder), backend)
    return RunnerDriver(OneGroup(model) if one_group else model, backend)


def run(driver: RunnerDriver, names: list[str], chunks: list[int], decodes: int) -> dict[str, list[TokenTopLogprobs]]:
    """Compute the prompts in chunks, then decode; return each sequence's log-probabilities."""
    found: dict[str, list[TokenTopLogprobs]] = {name: [] for name in names}
    for count in [*chunks, *[1] * decodes]:
        output = driver.step(dict.fromkeys(names, count))
        for name, logprobs in output.logprobs.items():
            found[name] += logprobs
    return found


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max()
    return shifted - np.log(np.exp(shifted).sum())


@pytest.mark.parametrize(("device", "kv_dtype"), BACKENDS)
def test_groups_of_layers_change_no_bit(folders: dict[str, Path], device: str, kv_dtype: str) -> None:
    results = []
    for one_group in (False, True):
        driver = make(folders["windowed"], device, kv_dtype, one_group=one_group)
        assert len(driver.windows) == (1 if one_group else 3)
        assert len(driver.runner.kv_caches) == (5 if one_group else 2)
        for name, start in (("a", 0), ("b", 1)):
            driver.add(name, [token + start for token in PROMPT], GREEDY)
        results.append(run(driver, ["a", "b"], [3, 6, 1], 40))
        assert len(results[-1]["a"]) == 41
    assert results[0] == results[1]


def test_a_model_with_windows_says_what_transformers_says(folders: dict[str, Path]) -> None:
    driver = make(folders["windowed"])
    driver.add("a", PROMPT, GREEDY)
    found = run(driver, ["a"], [4, 6], 30)["a"]
    oracle = oracle_logits(folders["windowed"], driver.sequences["a"].tokens)
    for place, logprobs in enumerate(found, start=len(PROMPT) - 1):
        expected = log_softmax(oracle[place])
        np.testing.assert_allclose(logprobs.logprobs, expected[logprobs.token_ids], atol=1e-4)
        assert logprobs.token_ids[0] == expected.argmax()


def test_a_prefix_hit_needs_no_blocks_before_the_window(folders: dict[str, Path]) -> None:
    driver = make(folders["windowed"])
    tokens = [*PROMPT, *PROMPT]
    driver.add("a", tokens, GREEDY)
    driver.step({"a": 16})
    tables = driver.sequences["a"].tables
    hit = driver.add("b", tokens, GREEDY)
    hit.computed = 16
    hit.tables = [list(tables[0]), *([0, 0, *table[2:]] for table in tables[1:])]
    if all(0 not in table for table in tables):
        driver.spoil([0])
    logprobs = driver.step({"a": 4, "b": 4}).logprobs
    assert logprobs["b"] == logprobs["a"]


@pytest.mark.parametrize("params", [GREEDY, FANCY])
def test_forks_draw_what_sequences_by_themselves_draw(folders: dict[str, Path], params: SamplingParams) -> None:
    alone = make(folders["windowed"])
    expected: dict[str, list[int]] = {}
    for seed, name in enumerate(("a", "b", "c")):
        alone.add(name, PROMPT, params, seed=seed)
        run(alone, [name], [10], 12)
        expected[name] = alone.sequences[name].tokens
    assert (len({tuple(tokens) for tokens in expected.values()}) == 1) == params.greedy

    driver = make(folders["windowed"])
    driver.add("other", [40, 41], SamplingParams(temperature=0.0))
    driver.add("a", PROMPT, params, seed=0)
    driver.step({"other": 2, "a": 6})
    output = driver.step({"other": 1, "a": 4}, branches={"a": ["b", "c"]})
    assert output.sampled_token_ids.keys() == {"other", "a", "b", "c"}
    assert [len(output.logprobs[name][0].token_ids) for name in "abc"] == [1 + (params.logprobs or 0)] * 3
    run(driver, ["a", "b", "c", "other"], [], 12)
    assert {name: driver.sequences[name].tokens for name in "abc"} == expected


def test_a_new_prompt_may_branch_in_its_first_step(folders: dict[str, Path]) -> None:
    driver = make(folders["plain"])
    driver.add("a", PROMPT, GREEDY)
    output = driver.step({"a": len(PROMPT)}, branches={"a": ["b"]})
    assert output.sampled_token_ids["a"] == output.sampled_token_ids["b"]
    assert output.logprobs["a"] == output.logprobs["b"]


def test_a_fork_amid_decoding_goes_its_own_way(folders: dict[str, Path]) -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0, logprobs=1)
    driver, alone = make(folders["windowed"]), make(folders["windowed"])
    driver.add("a", PROMPT, params)
    run(driver, ["a"], [10], 3)
    fork = driver.fork("a", "b")
    driver.tell("b", 77)  # beside the token that its parent drew
    driver.tell("a", 78)
    driver.sequences["a"].tokens[-2:] = [driver.sequences["b"].tokens[-2], 78]
    output = driver.step({"a": 2, "b": 2}, [fork])
    for name in "ab":
        known = driver.sequences[name].tokens[:-1]
        twin = alone.add(name, known, params)
        twin.num_prompt_tokens = len(PROMPT)
        assert alone.step({name: len(known)}).logprobs[name] == output.logprobs[name]
    run(driver, ["a", "b"], [], 10)
    run(alone, ["a", "b"], [], 10)
    for name in "ab":
        assert driver.sequences[name].tokens == alone.sequences[name].tokens


def test_beams_are_offered_the_most_likely_tokens(folders: dict[str, Path]) -> None:
    driver = make(folders["windowed"])
    params = SamplingParams(temperature=0.0, min_tokens=5, logit_bias={4: 100.0})
    driver.add("a", PROMPT, params, num_candidates=4)
    driver.add("other", [40, 41], GREEDY)
    output = driver.step({"a": 10, "other": 2})
    assert output.sampled_token_ids.keys() == {"other"}
    check_candidates(folders["windowed"], driver.sequences["a"].tokens, output.candidates["a"])
    best, second = output.candidates["a"].token_ids[1:3]
    driver.step({"other": 1})  # beams may wait
    fork = driver.fork("a", "b")
    driver.tell("a", second)
    driver.tell("b", best)
    output = driver.step({"b": 1, "other": 1, "a": 1}, [fork])
    assert output.candidates.keys() == {"a", "b"}
    for name in "ab":
        check_candidates(folders["windowed"], driver.sequences[name].tokens, output.candidates[name])
    driver.end("a")
    forks = [driver.fork("b", name) for name in ("c", "d")]
    for name, token in zip("bcd", output.candidates["b"].token_ids[1:]):
        driver.tell(name, token)
    output = driver.step({"b": 1, "c": 1, "d": 1}, forks)
    assert output.sampled_token_ids == {}
    for name in "bcd":
        check_candidates(folders["windowed"], driver.sequences[name].tokens, output.candidates[name])
    driver.end("b", "c", "d")
    assert driver.step({"other": 1}).candidates == {}
    assert not driver.runner.batch.num_candidates


def check_candidates(folder: Path, tokens: list[int], found: TokenTopLogprobs) -> None:
    """The four best of log_softmax, behind the best one."""
    expected = log_softmax(oracle_logits(folder, tokens)[-1])
    best = np.argsort(-expected)[:4]
    assert found.token_ids == [best[0], *best]
    np.testing.assert_allclose(found.logprobs, expected[[best[0], *best]], atol=1e-4)
    assert found.rank == 1


def test_more_candidates_than_tokens_are_all_tokens(folders: dict[str, Path]) -> None:
    driver = make(folders["plain"])
    driver.add("a", PROMPT, GREEDY, num_candidates=1000)
    found = driver.step({"a": 10}).candidates["a"]
    assert sorted(found.token_ids[1:]) == list(range(160))


@pytest.mark.parametrize("num_candidates", [0, 2])
def test_logits_that_are_not_finite_are_an_error_of_each_fork_alone(
    folders: dict[str, Path], num_candidates: int
) -> None:
    driver = make(folders["plain"])
    driver.add("a", PROMPT, GREEDY, num_candidates=num_candidates)
    driver.add("well", PROMPT, GREEDY)
    driver.step({"a": 8, "well": 8})
    driver.spoil(driver.sequences["a"].tables[0])
    output = driver.step({"a": 2, "well": 2}, branches={} if num_candidates else {"a": ["b", "c"]})
    assert output.errors.keys() == ({"a"} if num_candidates else {"a", "b", "c"})
    assert output.sampled_token_ids.keys() == {"well"}
    assert output.candidates == {}


def test_logits_that_are_not_finite_are_told_with_the_result(folders: dict[str, Path]) -> None:
    """The step after it was begun with some token in its place, and disturbs nobody."""
    told = []
    for spoilt in (False, True):
        driver = make(folders["plain"])
        for name in ("a", "well"):
            driver.add(name, PROMPT, PLAIN)
        driver.step({"a": 8, "well": 8})
        if spoilt:
            driver.spoil(driver.sequences["a"].tables[0])
        first = driver.submit({"a": 2, "well": 2})
        second = driver.submit({"a": 1, "well": 1})
        assert first.overlaps and second.overlaps
        outputs = first.result(), second.result()
        assert [output.errors.keys() for output in outputs] == [{"a"} if spoilt else set()] * 2
        told.append([output.sampled_token_ids["well"] for output in outputs])
        assert first.result() is outputs[0]
    assert told[0] == told[1]


def test_what_the_host_must_see_to_is_computed_after_steps_in_flight(folders: dict[str, Path]) -> None:
    driver, other = make(folders["plain"]), make(folders["plain"])
    dry = SamplingParams(temperature=0.0, dry_multiplier=1.5)
    for one in (driver, other):
        one.add("a", PROMPT, PLAIN)
        one.add("b", PROMPT, dry)
    first = driver.submit({"a": 10, "b": 4})
    second = driver.submit({"a": 1, "b": 6})
    assert first.overlaps and not second.overlaps
    found = [second.result().sampled_token_ids, first.result().sampled_token_ids]
    expected = [other.step(counts).sampled_token_ids for counts in ({"a": 10, "b": 4}, {"a": 1, "b": 6})]
    assert found[::-1] == expected


def test_a_failed_step_fails_whenever_its_result_is_taken(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = make(folders["plain"])
    driver.add("a", PROMPT, PLAIN)
    driver.add("b", PROMPT, SamplingParams(temperature=0.0, dry_multiplier=1.5))
    first, second = driver.submit({"a": 10, "b": 4}), driver.submit({"a": 1, "b": 6})

    def broken(*args: object, **options: object) -> None:
        raise ArithmeticError("as asked")

    monkeypatch.setattr(driver.runner.graphs, "run", broken)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="as asked"):
            second.result()
    assert first.result().sampled_token_ids.keys() == {"a"}
    monkeypatch.undo()
    driver.end("a", "b")
    driver.add("c", PROMPT, PLAIN)
    assert driver.step({"c": 10}).sampled_token_ids.keys() == {"c"}


def test_a_third_step_knows_what_the_first_has_sampled(folders: dict[str, Path]) -> None:
    """Nobody asks for results in between, and each step has penalties by all tokens before it."""
    driver, other = make(folders["plain"]), make(folders["plain"])
    for one in (driver, other):
        one.add("a", PROMPT, FANCY)
        one.add("b", PROMPT[:4], FANCY, seed=3)
        one.add("c", PROMPT[:4], PLAIN)
    steps = [{"a": 10, "b": 4}, *[{"a": 1, "b": 1}] * 2, {"a": 1, "c": 4}, *[{"b": 1, "a": 1, "c": 1}] * 5]
    pending_steps = [driver.submit(counts) for counts in steps]
    assert all(pending.overlaps for pending in pending_steps)
    for pending, counts in zip(pending_steps, steps, strict=True):
        found, expected = pending.result(), other.step(counts)
        assert (found.sampled_token_ids, found.logprobs) == (expected.sampled_token_ids, expected.logprobs)


def test_a_row_that_another_sequence_has_taken_keeps_its_tokens(folders: dict[str, Path]) -> None:
    """The first one's token arrives after the second one, of the same name, was added in its row."""
    driver, other = make(folders["plain"]), make(folders["plain"])
    driver.add("a", PROMPT, PLAIN)
    first = driver.submit({"a": len(PROMPT)})
    driver.end("a")
    driver._known.clear()  # as after a preemption
    prompt = [*PROMPT[::-1], 12]
    for one in (driver, other):
        one.add("a", prompt, PLAIN)
    driver.submit({"a": 5})
    assert first.overlaps and first.result().sampled_token_ids.keys() == {"a"}
    other.step({"a": 5})
    for count in (len(prompt) - 5, 1, 1):
        pending = driver.submit({"a": count})
        assert pending.result().sampled_token_ids == other.step({"a": count}).sampled_token_ids


SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, logit_bias={7: 2.0}, logprobs=2)


@pytest.mark.parametrize(("device", "folder"), [("cpu", "windowed"), ("reference", "plain")])
def test_drafts_change_no_bit_whether_right_or_wrong(folders: dict[str, Path], folder: str, device: str) -> None:
    rng = random.Random(7)
    rows = {"greedy": GREEDY, "sampled": SAMPLED, "penalized": FANCY}
    alone = make(folders[folder], device)
    for seed, (name, params) in enumerate(rows.items()):
        alone.add(name, PROMPT[seed:], params, seed=seed)
    counts = {name: len(PROMPT) - seed for seed, name in enumerate(rows)}
    logprobs = {name: alone.step({name: counts[name]}).logprobs[name] for name in rows}
    for name, decoded in run(alone, list(rows), [], 40).items():
        logprobs[name] = logprobs[name] + decoded

    driver = make(folders[folder], device)
    for seed, (name, params) in enumerate(rows.items()):
        driver.add(name, PROMPT[seed:], params, seed=seed)
    confirmed = dict.fromkeys(rows, 0)
    found: dict[str, list[TokenTopLogprobs]] = {name: [] for name in rows}
    while min(map(len, found.values())) < 30:
        ready = [name for name in rows if len(found[name]) < 36 and rng.random() < 0.8]
        scheduled = {name: 1 if found[name] else counts[name] for name in ready}
        drafts = {}
        for name in [name for name in scheduled if found[name]]:
            done = len(driver.sequences[name].tokens)
            right = alone.sequences[name].tokens[done : done + rng.randint(0, 4)]
            if right and rng.random() < 0.5:
                right[rng.randrange(len(right))] += 1
            drafts[name] = [token % 160 for token in right]
        output = driver.step(scheduled, drafts=drafts)
        assert output.errors == {}
        for name, entries in output.logprobs.items():
            found[name] += entries
            assert len(entries) == len(output.sampled_token_ids[name])
            confirmed[name] += len(entries) - 1
    for name in rows:
        tokens = driver.sequences[name].tokens
        assert tokens == alone.sequences[name].tokens[: len(tokens)]
        assert found[name] == logprobs[name][: len(found[name])]
    assert min(confirmed["greedy"], confirmed["sampled"]) > 5
    assert confirmed["penalized"] == 0, "drafts are not verified where logits depend on earlier tokens"


def test_log_probabilities_of_a_prompt_are_given_once(folders: dict[str, Path]) -> None:
    driver = make(folders["plain"])
    driver.add("a", PROMPT, SamplingParams(temperature=0.0, prompt_logprobs=1))
    driver.step({"a": 4})
    output = driver.step({"a": 6}, branches={"a": ["b"]})
    assert output.prompt_logprobs.keys() == {"a"}
    fork = driver.fork("b", "c")
    assert driver.step({"a": 1, "b": 1, "c": 1}, [fork]).prompt_logprobs == {}


def test_random_traffic_gives_every_sequence_its_own_text(folders: dict[str, Path]) -> None:
    rng, driver = random.Random(5), make(folders["windowed"])
    ended: list[Sequence] = []
    for number in range(150):
        sequences = driver.sequences
        for name in [name for name, at in sequences.items() if len(at.tokens) > 30 or rng.random() < 0.02]:
            ended.append(sequences[name])
            driver.end(name)
        forks = []
        for name in [name for name, at in sequences.items() if at.computed >= at.num_prompt_tokens]:
            if len(sequences) < 8 and rng.random() < 0.1:
                forks.append(driver.fork(name, f"f{number}-{name}", seed=sequences[name].seed))
        if len(sequences) < 8 and rng.random() < 0.5:
            prompt = [rng.randrange(3, 160) for _ in range(rng.randint(1, 20))]
            driver.add(f"s{number}", prompt, rng.choice([GREEDY, FANCY]), seed=number)
        counts = {
            name: rng.randint(1, min(6, len(at.tokens) - at.computed))
            for name, at in sequences.items()
            if rng.random() < 0.8 or name.startswith("f")
        }
        assert driver.step(counts, forks).errors == {}
    texts = {(at.seed, at.num_prompt_tokens): at for at in sorted(ended, key=lambda at: len(at.tokens))}
    assert len(ended) > len(texts) > 10
    alone = make(folders["windowed"])
    for number, at in enumerate(texts.values()):
        alone.add(f"s{number}", at.tokens[: at.num_prompt_tokens], at.params, seed=at.seed)
        run(alone, [f"s{number}"], [at.num_prompt_tokens], len(at.tokens) - at.num_prompt_tokens - 1)
        expected = alone.sequences[f"s{number}"].tokens
        for other in ended:  # forks of one seed, too
            if other.seed == at.seed:
                assert other.tokens == expected[: len(other.tokens)]
        alone.end(f"s{number}")


class ThreeAxes(OneGroup):
    """A model whose positions have three axes, of which it uses the second."""

    position_axes = 3

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self._inner = model.forward
        self.forward = self._forward

    def _forward(self, input_ids: Array, positions: Array, caches: list[Any], metadata: AttentionMetadata) -> Array:
        assert positions.shape == (3, len(input_ids))
        return self._inner(input_ids, positions[1], caches, metadata)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_embeddings_replace_those_of_tokens_and_positions_have_axes(folders: dict[str, Path], device: str) -> None:
    expected = make(folders["plain"], device)
    expected.add("a", PROMPT, GREEDY)
    model: Any = load_model(load_model_info(folders["plain"]), expected.backend)
    driver = RunnerDriver(ThreeAxes(model), expected.backend)
    embeds = np.array(expected.backend.to_numpy(model.embedding(expected.backend.from_numpy(np.array(PROMPT[2:5])))))
    driver.add("a", [*PROMPT[:2], 1, 1, 1, *PROMPT[5:]], GREEDY)
    inputs = driver.runner.batch.inputs

    def with_image(num_scheduled_tokens: dict[str, int]) -> StepInputs:
        made = inputs(num_scheduled_tokens)
        made.positions = np.stack([made.positions + axis - 1 for axis in range(3)]).clip(min=0)
        made.inputs_embeds, made.embed_indices = embeds, np.array([2, 3, 4])
        return made

    driver.runner.batch.inputs = with_image  # type: ignore[method-assign]
    assert driver.step({"a": 10}).logprobs == expected.step({"a": 10}).logprobs
    driver.runner.batch.inputs = inputs  # type: ignore[method-assign]
    for _ in range(3):
        assert driver.step({"a": 1}).logprobs == expected.step({"a": 1}).logprobs


def test_a_step_may_only_move_blocks_or_let_sequences_go(folders: dict[str, Path]) -> None:
    driver = make(folders["plain"])
    driver.add("a", PROMPT, GREEDY)
    driver.add("b", PROMPT, GREEDY)
    driver.step({"a": 9, "b": 10})
    old = driver.sequences["a"].tables[0]
    new = [driver.free.pop() for _ in old]
    step = SchedulerOutput([], [], {}, 0, ["b"], [])
    step.transfers = transfers_of((COPY, source, destination) for source, destination in zip(old, new))
    output = driver.runner.submit(step).result()
    assert output.sampled_token_ids == {} and output.errors == {}
    driver.spoil(old)
    replaced = [(0, index, block) for index, block in enumerate(new)]
    step = SchedulerOutput([], [ContinuingSequenceData("a", [], 9, replaced)], {"a": 1}, 1, [], [])
    assert driver.runner.submit(step).result().errors == {}

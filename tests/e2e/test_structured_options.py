"""Grammars together with other options, in the engine: beams, log-probabilities, ends, budgets of reasoning."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLParserLimits

from quire.engine_request import EngineRequest, ThinkingData
from quire.sampling.grammars import MAX_FORCED_BYTES
from quire.sampling.sampler import NO_TOKEN_IN_GRAMMAR
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.step import SequenceOutput
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import train_byte_level, write_folder
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request

GREEDY = SamplingParams(temperature=0.0)
HOT = SamplingParams(temperature=2.0)
LONG = {"max_position_embeddings": 4096}
FIELD = r'start: "{\"size\": " /[1-9][0-9]?/ "}"'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a tokenizer."""
    path = tmp_path_factory.mktemp("model")
    end = train_byte_level().token_to_id("<|im_end|>")
    write_checkpoint(path, "llama", num_key_value_heads=2, vocab_size=437, eos_token_id=end, bos_token_id=420)
    return write_folder(path, "byte_level")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def driver(folder: Path) -> EngineDriver:
    return EngineDriver(folder)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text without control tokens."""
    return tokenizer.encode_segments([text])


def run(driver: EngineDriver, message: EngineRequest) -> list[SequenceOutput]:
    """Return all the news of a request."""
    driver.core.add(message)
    news = []
    while driver.core.has_unfinished():
        news += driver.core.step().outputs
    return news


def message(prompt: list[int], params: SamplingParams, **fields: object) -> EngineRequest:
    """Return a request of one sequence."""
    given = {"request_id": "r", "sequence_ids": ["r"], "arrival_time": 0.0, "seeds": [0], "stop_ids": [422]}
    return EngineRequest(prompt_token_ids=prompt, sampling_params=params, **{**given, "max_tokens": 40, **fields})  # type: ignore[arg-type]


def end_of(news: list[SequenceOutput]) -> SequenceOutput:
    """Return the last news, which ends the sequence."""
    assert news[-1].finish_reason is not None
    return news[-1]


def test_a_text_that_is_complete_ends_without_a_step_more(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    """Also where the length ends with it, and where the end-of-text token is ignored."""
    for stop_ids, max_tokens in [([422], 40), ([], 40), ([422], 3), ([], 2)]:
        news = run(driver, message([5, 6], GREEDY, grammar='start: "yes!"', stop_ids=stop_ids, max_tokens=max_tokens))
        tokens = [token for entry in news for token in entry.new_token_ids]
        if max_tokens > 2:
            assert tokens == ids(tokenizer, "yes!")
            assert (end_of(news).finish_reason, end_of(news).stop_reason) == ("stop", None)
            assert end_of(news).complete
        else:
            assert (len(tokens), end_of(news).finish_reason) == (2, "length")


def test_forced_text_costs_one_forward_pass(folder: Path, tokenizer: Tokenizer) -> None:
    text = '{"name": "a long constant", "other": [1, 2, 3, 4, 5, 6, 7, 8, 9]}'
    steps = {}
    for jump_forward in (True, False):
        driver = EngineDriver(folder, jump_forward=jump_forward)
        ask = Request([5, 6], GREEDY, 200, grammar="start: " + repr(text).replace('"', '\\"').replace("'", '"'))
        told = driver.generate("a", ask)
        assert told.tokens == ids(tokenizer, text)  # as the tokenizer spells it
        steps[jump_forward] = driver.stats().num_steps
        driver.close()
    assert steps[True] == 1
    assert steps[False] == len(ids(tokenizer, text))


def test_log_probabilities_are_the_models_own(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    """Each token has its own, those that had no alternative too."""
    prompt = ids(tokenizer, "Hello")
    told = driver.generate("lp", Request(prompt, GREEDY.clone(logprobs=3), 40, grammar=FIELD))
    assert re.fullmatch(r'\{"size": [1-9][0-9]?\}', tokenizer.decode(told.tokens))
    assert len(told.logprobs) == len(told.tokens)
    plain = driver.generate("scored", Request(prompt + told.tokens, GREEDY.clone(prompt_logprobs=3), 1))
    expected = plain.prompt_logprobs[len(prompt) - 1 :]
    assert [entry.token_ids for entry in told.logprobs] == [entry.token_ids for entry in expected]
    for got, want in zip(told.logprobs, expected, strict=True):
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-5)
        assert got.rank == want.rank


@pytest.mark.parametrize("stop_ids", [[422], []])
def test_beams_are_texts_of_the_grammar_with_the_models_own_sums(
    driver: EngineDriver, tokenizer: Tokenizer, stop_ids: list[int]
) -> None:
    prompt = ids(tokenizer, "Hello")
    grammar = 'start: ("a" | "b" | "ab" | "cd" | "日") /[0-9]/'
    params = BeamSearchParams(beam_width=4, ignore_eos=not stop_ids)
    [news] = run(driver, message(prompt, GREEDY, grammar=grammar, beam=params, stop_ids=stop_ids))
    assert news.finish_reason == "stop"
    assert news.beams is not None
    assert len(news.beams) == 4
    for number, beam in enumerate(news.beams):
        assert beam.token_ids[-1] == 422
        assert re.fullmatch("(a|b|ab|cd|日)[0-9]", tokenizer.decode(beam.token_ids))
        scored = driver.generate(
            f"beam-{len(stop_ids)}-{number}", Request(prompt + beam.token_ids, GREEDY.clone(prompt_logprobs=0), 1)
        )
        entries = scored.prompt_logprobs[len(prompt) - 1 :]
        assert beam.cumulative_logprob == pytest.approx(sum(entry.logprobs[0] for entry in entries), abs=1e-4)
    driver.check_all_free()


def test_there_are_no_more_beams_than_texts(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    params = BeamSearchParams(beam_width=5)
    [news] = run(driver, message([5, 6], GREEDY, grammar='start: "x" | "y"', beam=params))
    assert news.beams is not None
    assert sorted(tokenizer.decode(beam.token_ids) for beam in news.beams) == ["x", "y"]


def test_all_beams_there_are(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    """A search as wide as the language finds all of it, and ranks it as the model does."""
    params = BeamSearchParams(beam_width=9, length_penalty=0.0)
    grammar = 'start: /[abc]/ /[xyz]/ "!"'
    [news] = run(driver, message([5, 6], GREEDY, grammar=grammar, beam=params))
    assert news.beams is not None
    texts = {tokenizer.decode(beam.token_ids) for beam in news.beams}
    assert texts == {a + b + "!" for a in "abc" for b in "xyz"}
    scores = [beam.score for beam in news.beams]
    assert scores == sorted(scores, reverse=True)


def test_the_end_waits_for_min_tokens_while_there_is_anything_else(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    end = tokenizer.control_tokens["<|im_end|>"]
    likely = HOT.clone(logit_bias={end: 100.0})
    told = driver.generate("free", Request([5, 6], likely, 40, stop_ids=(end,), grammar="start: /[a-z]*/"))
    assert told.tokens == [end]
    for number, stop_ids in enumerate([(end,), ()]):
        ask = Request([5, 6], likely.clone(min_tokens=7), 40, stop_ids=stop_ids, grammar="start: /[a-z]*/")
        told = driver.generate(f"min-{number}", ask)
        assert len(told.tokens) == 7 + (number == 0) or told.tokens[7] == end
        assert end not in told.tokens[:7]
        assert told.finish_reason == "stop"
    told = driver.generate(
        "short", Request([5, 6], likely.clone(min_tokens=7), 40, stop_ids=(end,), grammar='start: "ab"?')
    )
    assert tokenizer.decode(told.tokens) == "ab"
    assert told.finish_reason == "stop"
    told = driver.generate(
        "empty", Request([5, 6], likely.clone(min_tokens=7), 40, stop_ids=(end,), grammar='start: ""')
    )
    assert (told.tokens, told.finish_reason) == ([end], "stop")


def test_options_that_leave_no_token_end_only_their_request(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    barred = ids(tokenizer, "yes")
    driver.add("beside", Request([5, 6, 7], GREEDY, 10, grammar="start: /[a-z]{30}/"))
    news = run(driver, message([5, 6], GREEDY.clone(allowed_token_ids=ids(tokenizer, "no")), grammar='start: "yes"'))
    failed = next(entry for entry in news if entry.sequence_id == "r")
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert "structured output" in failed.error.message
    assert next(entry for entry in reversed(news) if entry.sequence_id == "beside").finish_reason == "length"
    news = run(
        driver,
        message([5, 6], GREEDY, grammar='start: "yes" | "no"', bad_words_ids=[barred[:1], [barred[0]], barred]),
    )
    tokens = [token for entry in news for token in entry.new_token_ids]
    assert tokenizer.decode(tokens) == "no"
    # Where the text may end, it does.
    allowed = ids(tokenizer, "ab")
    news = run(
        driver,
        message([5, 6], GREEDY.clone(allowed_token_ids=allowed), grammar='start: "ab" "c"?', bad_words_ids=[[64, 64]]),
    )
    tokens = [token for entry in news for token in entry.new_token_ids]
    assert (tokenizer.decode(tokens), end_of(news).finish_reason) == ("ab", "stop")


def test_a_grammar_may_name_tokens_that_the_model_has_not(driver: EngineDriver) -> None:
    for params in (GREEDY, GREEDY.clone(logprobs=1)):
        news = run(driver, message([5, 6], params, grammar='start: "ab" <[437]> "c"'))
        assert end_of(news).finish_reason == "error"
        assert end_of(news).error == NO_TOKEN_IN_GRAMMAR


def test_long_constants_are_spelled_piece_by_piece(folder: Path, tokenizer: Tokenizer) -> None:
    """As in one go, also around the places where they are cut, and inside characters."""
    text = "größer 日本語 words and-more 12345 " * 60
    assert len(text.encode()) > 2 * MAX_FORCED_BYTES
    driver = EngineDriver(folder, max_model_len=2500, num_gpu_blocks_override=700, hf_overrides=LONG)
    told = driver.generate("a", Request([5, 6], GREEDY, 2400, grammar=f'start: "{text}"'))
    assert told.tokens == ids(tokenizer, text)
    assert told.finish_reason == "stop"
    assert driver.stats().num_steps == 1
    driver.close()


def test_a_grammar_that_cannot_be_compiled_is_refused(driver: EngineDriver) -> None:
    for grammar in ("start: nothing", "start: A\nA: /a/ & /b/", "what", "start: <|no_such_token|>"):
        [news] = run(driver, message([5, 6], GREEDY, grammar=grammar))
        assert news.finish_reason == "error" and news.error is not None and news.error.refused
    driver.check_all_free()


def test_reasoning_ends_when_its_budget_is_used_up(driver: EngineDriver, tokenizer: Tokenizer) -> None:
    """By tokens nobody sampled, at once; with log-probabilities, one by one, to the same effect."""
    start, end = ids(tokenizer, "<think>"), ids(tokenizer, "\n</think>\n\n")
    assert len(end) > 1
    open_grammar = 'start: thoughts /[a-c]{3}/\nthoughts[suffix="</think>\\n\\n"]: /(?s:.*)/'
    for budget in (0, 1, 5):
        thinking = ThinkingData(start, end, budget, open=True)
        for number, params in enumerate([HOT, HOT.clone(logprobs=0), GREEDY]):
            ask = Request([5, 6], params, 60, seeds=(budget,), stop_ids=(422,), grammar=open_grammar, thinking=thinking)
            told = driver.generate(f"think-{budget}-{number}", ask)
            at = next(at for at in range(60) if told.tokens[at : at + len(end)] == end)
            assert budget <= at <= budget + 3  # a character is said to its end
            assert b"".join(map(tokenizer.token_bytes, told.tokens[:at])).decode() or not at
            assert re.fullmatch("[a-c]{3}", tokenizer.decode(told.tokens[at + len(end) :]))
            assert told.finish_reason == "stop"
        both = [driver.results[f"think-{budget}-{number}"].tokens for number in (0, 1)]
        assert both[0][: budget + len(end)] == both[1][: budget + len(end)]
    # Without a grammar, and where the reasoning begins later.
    thinking = ThinkingData(start, end, 4)
    biased = GREEDY.clone(logit_bias={start[0]: 100.0, 422: -100.0})
    told = driver.generate("later", Request([5, 6], biased, 30, stop_ids=(422,), thinking=thinking))
    assert told.tokens[0] == start[0]
    assert told.tokens[5 : 5 + len(end)] == end
    assert told.tokens.count(end[-1]) >= 1
    assert told.finish_reason == "length"


def test_budgets_survive_preemption(folder: Path, tokenizer: Tokenizer) -> None:
    start, end = ids(tokenizer, "<think>"), ids(tokenizer, "\n</think>\n\n")
    thinking = ThinkingData(start, end, 21, open=True)
    asks = [Request([5, 6, n], HOT, 50, seeds=(n,), stop_ids=(), thinking=thinking) for n in range(6)]
    driver = EngineDriver(folder, num_gpu_blocks_override=30, preemption_mode="recompute")
    for number, ask in enumerate(asks):
        driver.add(f"{number}", ask)
    driver.run()
    assert driver.stats().num_preemptions > 0
    for told in driver.results.values():
        assert told.tokens[21 : 21 + len(end)] == end
        assert told.finish_reason == "length"
    driver.check_all_free()
    driver.close()


def test_a_grammar_that_grows_too_large_on_its_way_ends_only_its_sequence(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "quire.sampling.grammars.parser_limits", lambda: LLParserLimits(max_items_in_row=12, verbose_errors=False)
    )
    driver = EngineDriver(folder)
    driver.core.add(message([5, 6], HOT, grammar="start: /[a-z]{20}/", request_id="fine", sequence_ids=["fine"]))
    eager = GREEDY.clone(logit_bias={ids(tokenizer, "x")[0]: 100.0}, min_tokens=30, max_tokens=40)
    news = run(driver, message([5, 6], eager, grammar='start: a*\na: "x" | "x" a "y" | a a'))
    failed = [entry for entry in news if entry.sequence_id == "r"][-1]
    assert failed.finish_reason == "error" and failed.error is not None and failed.error.refused
    assert "structured output failed" in failed.error.message
    assert "\n" not in failed.error.message
    fine = [entry for entry in news if entry.sequence_id == "fine"]
    assert fine[-1].finish_reason == "stop"
    assert re.fullmatch("[a-z]{20}", tokenizer.decode([token for entry in fine for token in entry.new_token_ids]))
    driver.check_all_free()
    driver.close()

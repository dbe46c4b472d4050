"""Every id is in the vocabulary, every prompt fits, and errors name the field: nothing bad reaches the engine."""

from __future__ import annotations

from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import ContextLengthError, ModelError, RequestError
from quire.frontend.chat import ChatTemplate
from quire.frontend.input_processor import InputProcessor, child_seed
from quire.sampling_params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import MAKERS, NAMED
from tests.helpers.errors import refused
from tests.helpers.fake_engine import small_tokenizer
from tests.helpers.requests import engine_requests, input_processor

VOCAB = 300


def make(tokenizer: Tokenizer | None = None, *, max_model_len: int = 64, **options: Any) -> InputProcessor:
    tokenizer = tokenizer or small_tokenizer()
    return input_processor(tokenizer, vocab_size=VOCAB, max_model_len=max_model_len, eos_token_ids=(2, 0), **options)


def process(prompt: Any, params: SamplingParams | None = None, **options: Any) -> list[Any]:
    return engine_requests(make(), prompt, params or SamplingParams(), "r", arrival_time=1.0, **options)


def test_all_kinds_of_prompts_give_the_same_request() -> None:
    ids = small_tokenizer().encode("hello world")
    for prompt in ("hello world", ids, tuple(ids), {"prompt": "hello world"}, {"prompt_token_ids": ids}):
        [add] = process(prompt)
        assert add.prompt_token_ids == ids
        assert (add.request_id, add.arrival_time, add.max_tokens) == ("r", 1.0, 16)


@pytest.mark.parametrize(
    "prompt", [5, None, 1.5, b"x", {"a": 1}, {}, {"prompt": None}, {"prompt": "a", "b": 1}, object()]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with refused("prompt"):
        process(prompt)


def test_errors_of_the_tokenizer_name_the_field() -> None:
    """Each route has another one for its texts."""
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"hi": 0}, unk_token="[UNK]"))
    tokenizer = Tokenizer(backend)
    for params in (SamplingParams(), SamplingParams(truncate_prompt_tokens=3)):
        with refused("input[3]"):
            make(tokenizer).tokenize("you", params, param="input[3]")
    with refused("messages"):
        ChatTemplate("{{ messages[0].content }}", tokenizer).encode([{"role": "user", "content": "you"}])


@pytest.mark.parametrize("prompt", ["", [], {"prompt": ""}, {"prompt_token_ids": []}])
def test_empty_prompts_are_refused(prompt: Any) -> None:
    with refused(code="empty_array"):
        process(prompt)


def test_an_empty_text_is_a_prompt_where_the_model_begins_texts_itself() -> None:
    tokenizer = Tokenizer(MAKERS["llama"](), special_tokens=NAMED["llama"])
    assert make(tokenizer).tokenize("", SamplingParams()) == [tokenizer.bos_token_id]


@pytest.mark.parametrize(
    ("token", "code"),
    [
        (-1, "invalid_value"),
        (VOCAB, "invalid_value"),
        (2**63, "invalid_value"),
        pytest.param(10**5000, "invalid_value", id="enormous"),
        (True, "invalid_type"),
        (1.5, "invalid_type"),
        ("5", "invalid_type"),
        (None, "invalid_type"),
        ([1], "invalid_type"),
    ],
)
def test_bad_ids_in_a_prompt_are_named(token: Any, code: str) -> None:
    for prompt, param in (
        ([token], "prompt[0]"),
        ([1, 2, token, 3], "prompt[2]"),
        ({"prompt_token_ids": [1, token]}, "prompt_token_ids[1]"),
    ):
        with refused(param, code):
            process(prompt)
    with refused("prompt[7][0]"):
        process([token], param="prompt[7]")


def test_the_message_names_id_and_vocabulary() -> None:
    with pytest.raises(RequestError, match=r"token id 300 >= vocab 300"):
        process([300])


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("stop_token_ids", [1, VOCAB], "stop_token_ids[1]"),
        ("stop_token_ids", [999_999_999], "stop_token_ids[0]"),
        ("allowed_token_ids", [VOCAB], "allowed_token_ids[0]"),
        ("logit_bias", {"300": 1.0}, "logit_bias"),
        ("logit_bias", {5: 1.0, 2**62: 1.0}, "logit_bias"),
    ],
)
def test_ids_in_parameters_are_checked_against_the_vocabulary(field: str, value: Any, param: str) -> None:
    with refused(param, "invalid_value"):
        process("x", SamplingParams(**{field: value}))


def test_texts_the_model_has_no_rows_for_are_refused() -> None:
    """A tokenizer with more tokens than the model's table must not reach the engine."""
    processor = input_processor(small_tokenizer(), vocab_size=100)
    with refused("prompt", match=">= vocab 100"):
        processor.tokenize("hello", SamplingParams())


@pytest.mark.parametrize("count", [64, 65, 2000])
def test_prompts_that_leave_no_room_are_refused_with_both_numbers(count: int) -> None:
    with refused("prompt", "context_length_exceeded", kind=ContextLengthError) as caught:
        process([5] * count)
    assert str(count) in caught.value.message
    assert "64" in caught.value.message


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "expected"),
    [(63, 16, 1), (60, 4, 4), (60, 5, 4), (10, None, 54), (10, 10**9, 54), (10, 2**62, 54)],
)
def test_max_tokens_is_cut_to_the_context(num_prompt: int, max_tokens: int | None, expected: int) -> None:
    [add] = process([5] * num_prompt, SamplingParams(max_tokens=max_tokens))
    assert add.max_tokens == expected


class CountingTokenizer(Tokenizer):
    """Counts the characters it was asked to tokenize."""

    num_chars = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.num_chars += len(text)
        return super().encode(text, add_special_tokens)


@pytest.mark.parametrize(
    "text",
    ["a" * 3_000_000, "hello " * 500_000, "😀" * 100_000, " " * 10**6, "<|im_end|>" * 10**5],
    ids=["letters", "words", "emoji", "spaces", "controls"],
)
def test_huge_texts_are_refused_before_they_are_tokenized(text: str) -> None:
    tokenizer = CountingTokenizer(small_tokenizer()._backend)
    with pytest.raises(ContextLengthError):
        make(tokenizer).tokenize(text, SamplingParams())
    assert tokenizer.num_chars == 0


def test_long_texts_are_tokenized_only_as_far_as_needed() -> None:
    """The context is so long that the number of characters decides nothing."""
    tokenizer = CountingTokenizer(small_tokenizer()._backend)
    processor = make(tokenizer, max_model_len=100_000)
    with refused("prompt", kind=ContextLengthError, match="at least"):
        processor.tokenize("x " * 600_000, SamplingParams())
    assert tokenizer.num_chars < 300_000
    assert len(processor.tokenize("x " * 40_000, SamplingParams())) == 80_000


def test_truncation_keeps_the_end_of_the_prompt() -> None:
    tokenizer = small_tokenizer()
    ids = tokenizer.encode("hello world, how are you")
    for keep in (1, 3, 1000):
        params = SamplingParams(truncate_prompt_tokens=keep)
        assert make().tokenize("hello world, how are you", params) == ids[-keep:]
        assert make().tokenize(ids, params) == ids[-keep:]
    make_room = SamplingParams(truncate_prompt_tokens=-1, max_tokens=10)
    assert len(make().tokenize(ids * 1000, make_room)) == make().max_model_len - 10
    assert make().tokenize(ids, make_room) == ids
    long = "hello " * 200_000 + "the end"
    assert tokenizer.decode(make().tokenize(long, SamplingParams(truncate_prompt_tokens=8)))[-7:] == "the end"
    counting = CountingTokenizer(small_tokenizer()._backend)
    make(counting).tokenize(long, SamplingParams(truncate_prompt_tokens=8))
    assert counting.num_chars < 5000


def test_lone_surrogates_are_refused() -> None:
    for prompt, param in (("a\ud800", "prompt"), ({"prompt": "\udc00"}, "prompt")):
        with refused(param, "invalid_value"):
            process(prompt)


def test_stop_ids_are_eos_and_the_callers() -> None:
    assert process("x", SamplingParams(stop_token_ids=[7, 2]))[0].stop_ids == [0, 2, 7]
    assert process("x", SamplingParams(stop_token_ids=[7], ignore_eos=True))[0].stop_ids == [7]


def test_several_completions_are_one_request() -> None:
    params = SamplingParams(n=3, seed=-5, prompt_logprobs=2, logprobs=1)
    [add] = process("x", params, priority=3, cache_salt="s", tenant="t")
    assert (add.request_id, add.sequence_ids) == ("r", ["r-0", "r-1", "r-2"])
    assert add.seeds == [-5, child_seed(-5, 1), child_seed(-5, 2)]
    assert len(set(add.seeds)) == 3
    own = add.sampling_params
    assert (own.n, own.best_of, own.logprobs, own.prompt_logprobs) == (1, None, 1, 2)
    assert (add.priority, add.cache_salt, add.tenant) == (3, "s", "t")
    assert process("x", params)[0].seeds == add.seeds
    [single] = process("x", params.clone(n=1))
    assert (single.request_id, single.sequence_ids, single.seeds) == ("r", ["r"], [-5])


def test_the_best_of_several_are_ranked_by_logprobs_that_nobody_asked_for() -> None:
    for best_of, logprobs, expected in ((4, None, 0), (4, 3, 3), (2, None, None)):
        [add] = process("x", SamplingParams(n=2, best_of=best_of, logprobs=logprobs))
        assert len(add.sequence_ids) == len(add.seeds) == best_of
        assert (add.sampling_params.logprobs, add.sampling_params.num_sequences) == (expected, 1)


def test_more_sequences_than_run_at_a_time_are_several_requests() -> None:
    processor = make(max_num_seqs=4)
    params = SamplingParams(n=10, seed=3, prompt_logprobs=0)
    adds = engine_requests(processor, "x", params, "r", arrival_time=0.0)
    assert [add.request_id for add in adds] == ["r/0", "r/1", "r/2"]
    assert [len(add.sequence_ids) for add in adds] == [4, 4, 2]
    assert [name for add in adds for name in add.sequence_ids] == [f"r-{index}" for index in range(10)]
    assert [seed for add in adds for seed in add.seeds] == [child_seed(3, index) for index in range(10)]
    assert [add.sampling_params.prompt_logprobs for add in adds] == [0, None, None]
    assert len(engine_requests(processor, "x", params.clone(n=4), "r", arrival_time=0.0)) == 1


@given(seed=st.integers(-(2**63), 2**63 - 1), index=st.integers(0, 127))
@settings(max_examples=60, deadline=None)
def test_derived_seeds_fit_64_bits(seed: int, index: int) -> None:
    assert -(2**63) <= child_seed(seed, index) < 2**63


def test_without_a_seed_every_request_draws_its_own() -> None:
    seeds = {process("x")[0].seeds[0] for _ in range(20)}
    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("kind", ["byte_level", "llama", "first"])
def test_bad_words_are_barred_in_every_spelling(kind: str) -> None:
    tokenizer = Tokenizer(MAKERS[kind](), special_tokens=NAMED[kind])
    processor = input_processor(tokenizer)
    barred = processor.bad_words_ids(["quick"])
    for text in ("quick", " quick", "The quick fox", "\nquick", "fox.quick dog"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        hit = any(ids[i : i + len(word)] == word for word in barred for i in range(len(ids)))
        assert hit, text
    ids = tokenizer.encode("The lazy dog", add_special_tokens=False)
    assert not any(ids[i : i + len(word)] == word for word in barred for i in range(len(ids)))
    assert all(barred)


def test_without_a_tokenizer_only_ids_work() -> None:
    processor = input_processor(None, vocab_size=VOCAB)
    assert engine_requests(processor, [1, 2], None, "r", arrival_time=0.0)[0].prompt_token_ids == [1, 2]
    for prompt, params, param in (
        ("text", SamplingParams(), "prompt"),
        ([1], SamplingParams(stop="x"), "stop"),
        ([1], SamplingParams(bad_words=["x"]), "bad_words"),
    ):
        with refused(param):
            engine_requests(processor, prompt, params, "r", arrival_time=0.0)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"priority": "high"}, "priority"),
        ({"priority": 2**70}, "priority"),
        ({"priority": True}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 1025}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
    ],
)
def test_bad_request_options_are_named(options: dict[str, Any], param: str) -> None:
    with refused(param):
        process("x", **options)


def test_defaults_come_from_the_model() -> None:
    processor = make(sampling_defaults={"temperature": 0.6, "top_k": 20, "max_tokens": 7})
    [add] = engine_requests(processor, "x", None, "r", arrival_time=0.0)
    assert (add.sampling_params.temperature, add.sampling_params.top_k, add.max_tokens) == (0.6, 20, 7)
    assert process("x", SamplingParams())[0].sampling_params.temperature == 1.0
    first = processor.default_sampling_params()
    first.temperature = 0.0
    assert processor.default_sampling_params().temperature == 0.6


def test_bad_defaults_blame_the_model() -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: temperature"):
        make(sampling_defaults={"temperature": -1.0})


def test_the_callers_parameters_are_not_shared_with_the_engine() -> None:
    params = SamplingParams(stop_token_ids=[4])
    [add] = process("x", params)
    params.temperature = 0.0
    assert add.sampling_params.temperature == 1.0

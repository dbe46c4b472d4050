"""`best_of` and `BeamSearchParams`: what is accepted, and which field every refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire import BeamSearchParams, SamplingParams, StructuredOutputParams
from quire.errors import RequestError, UnsupportedError
from quire.sampling_params import MIROSTAT_REPLACES, RequestOutputKind, with_recommended
from tests.helpers.errors import refused


def test_the_first_fields_may_be_given_by_position() -> None:
    params = SamplingParams(3, 0.1, 0.2, 1.3, 0.4, 0.5, 6, 0.07, 8, "stop", [9], True, 10, 2, 4, 5)
    assert params == SamplingParams(
        n=3,
        presence_penalty=0.1,
        frequency_penalty=0.2,
        repetition_penalty=1.3,
        temperature=0.4,
        top_p=0.5,
        top_k=6,
        min_p=0.07,
        seed=8,
        stop="stop",
        stop_token_ids=[9],
        ignore_eos=True,
        max_tokens=10,
        min_tokens=2,
        logprobs=4,
        prompt_logprobs=5,
    )
    with refused("n", "invalid_type", match="n must be an integer, got 0.8; for a temperature write temperature=0.8"):
        SamplingParams(0.8)  # type: ignore[arg-type]


def test_best_of_is_how_many_are_generated() -> None:
    assert SamplingParams().num_sequences == 1
    assert SamplingParams(n=3).num_sequences == 3
    assert SamplingParams(n=2, best_of=5).num_sequences == 5
    assert SamplingParams(n=2, best_of=2, temperature=0.0).num_sequences == 2
    assert SamplingParams(n=2, best_of=2, output_kind=RequestOutputKind.DELTA).num_sequences == 2


@pytest.mark.parametrize(
    ("fields", "code", "match"),
    [
        ({"best_of": 0}, "integer_below_min_value", "best_of must be at least 1"),
        ({"best_of": 16385}, "integer_above_max_value", "best_of must be at most 16384"),
        ({"best_of": 2.0}, "invalid_type", "best_of must be an integer"),
        ({"best_of": True}, "invalid_type", "best_of must be an integer"),
        ({"n": 3, "best_of": 2}, "invalid_value", r"best_of must be at least n \(3\), got 2"),
        ({"best_of": 2, "temperature": 0.0}, "invalid_value", "best_of must equal n .* temperature 0"),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "invalid_value", "best_of must equal n .* stream"),
    ],
)
def test_best_of_that_makes_no_sense(fields: dict[str, Any], code: str, match: str) -> None:
    with refused("best_of", code, match=match):
        SamplingParams(**fields)


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"beam_width": 0}, "beam_width", "integer_below_min_value"),
        ({"beam_width": 129}, "beam_width", "integer_above_max_value"),
        ({"beam_width": "4"}, "beam_width", "invalid_type"),
        ({"max_tokens": 0}, "max_tokens", "integer_below_min_value"),
        ({"max_tokens": None}, "max_tokens", "invalid_type"),
        ({"temperature": 0.7}, "temperature", "decimal_above_max_value"),
        ({"temperature": -1}, "temperature", "decimal_below_min_value"),
        ({"length_penalty": 10.5}, "length_penalty", "decimal_above_max_value"),
        ({"length_penalty": -10.5}, "length_penalty", "decimal_below_min_value"),
        ({"length_penalty": float("nan")}, "length_penalty", "invalid_value"),
        ({"length_penalty": "1"}, "length_penalty", "invalid_type"),
        ({"early_stopping": "soon"}, "early_stopping", "invalid_value"),
        ({"early_stopping": 1}, "early_stopping", "invalid_value"),
        ({"early_stopping": None}, "early_stopping", "invalid_value"),
        ({"early_stopping": []}, "early_stopping", "invalid_value"),
        ({"ignore_eos": 1}, "ignore_eos", "invalid_type"),
        ({"skip_special_tokens": 0}, "skip_special_tokens", "invalid_type"),
        ({"include_stop_str_in_output": "no"}, "include_stop_str_in_output", "invalid_type"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "integer_below_min_value"),
    ],
)
def test_bad_beam_search_params_are_named(fields: dict[str, Any], param: str, code: str) -> None:
    with refused(param, code):
        BeamSearchParams(**{"beam_width": 4, **fields})


def test_beam_search_params_survive_the_wire_and_are_checked_there() -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=7, length_penalty=2, early_stopping="never")
    sent = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(sent, type=BeamSearchParams) == params
    assert isinstance(params.length_penalty, float)
    with pytest.raises(RequestError, match="beam_width"):
        params.clone(beam_width=1000)


def test_a_beam_search_from_the_fields_of_a_request() -> None:
    fields = {"n": 2, "best_of": 5, "max_tokens": None, "length_penalty": 0.5, "early_stopping": True, "seed": 3}
    fields |= {"top_k": -1, "top_p": 1, "presence_penalty": 0, "stop": [], "bad_words": None, "ignore_eos": True}
    expected = BeamSearchParams(beam_width=5, max_tokens=40, ignore_eos=True, length_penalty=0.5, early_stopping=True)
    params = SamplingParams(use_beam_search=True, **fields)
    assert params.clone(max_tokens=40).beam_search_params() == expected
    assert params.greedy and params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.clone(n=3).n == 3  # what it has made of its fields passes the checks again
    old = SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0, early_stopping=True)
    search = BeamSearchParams(beam_width=3, early_stopping=True)
    assert old.beam_search_params() == search and search.sampling_params().beam_search_params() == search


def test_the_former_name_of_structured_outputs() -> None:
    form = StructuredOutputParams(choice=["yes", "no"])
    assert SamplingParams(guided_decoding=form) == SamplingParams(structured_outputs=form)
    with refused("guided_decoding", match="give one of them"):
        SamplingParams(guided_decoding=form, structured_outputs=StructuredOutputParams(regex="x"))


def test_no_recommended_value_changes_a_beam_search() -> None:
    assert with_recommended({"temperature": 0.6}, {"use_beam_search": True}) == {"use_beam_search": True}


NOT_FOR_BEAMS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "stop": "x",
    "stop_token_ids": [1],
    "bad_words": ["x"],
    "min_tokens": 1,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "logit_bias": {1: 1.0},
    "allowed_token_ids": [1],
    "detokenize": False,
    "thinking_token_budget": 5,
    "spaces_between_special_tokens": False,
    "stream_interval": 2,
    "logprob_token_ids": [1],
    "skip_reading_prefix_cache": True,
    "skip_clone": True,
    "repetition_detection": {"max_pattern_size": 3},
    "logits_processors": ["x"],
    "extra_args": {"a": 1},
    "typical_p": 0.5,
    "top_n_sigma": 1.0,
    "xtc_probability": 0.5,
    "dry_multiplier": 0.5,
    "dynatemp_range": 0.5,
    "mirostat": 2,
    "prompt_logprob_token_ids": [[1]],
    "watermarking": True,
    "routed_experts_prompt_start": 0,
    "trace_decode_token_ids": [1],
}
# Fields that mean nothing without another one, which is named.
DEPENDENT: dict[str, tuple[Any, str]] = {
    "prompt_logprob_start": (1, "prompt_logprobs"),
    "flat_logprobs": (True, "logprobs"),
    "xtc_threshold": (0.2, "xtc_probability"),
    "dry_base": (2.0, "dry_multiplier"),
    "dry_allowed_length": (3, "dry_multiplier"),
    "dry_penalty_last_n": (64, "dry_multiplier"),
    "dry_sequence_breakers": (["x"], "dry_multiplier"),
    "dynatemp_exponent": (2.0, "dynatemp_range"),
    "mirostat_tau": (3.0, "mirostat"),
    "mirostat_eta": (0.2, "mirostat"),
}


@pytest.mark.parametrize("name", NOT_FOR_BEAMS)
def test_what_beams_cannot_honour_is_refused_by_name(name: str) -> None:
    with refused(name, kind=UnsupportedError, match=name):
        SamplingParams(**{"n": 2, name: NOT_FOR_BEAMS[name], "use_beam_search": True})


def test_every_sampling_field_is_honoured_by_beams_or_refused() -> None:
    honoured = {"n", "seed", "use_beam_search", *BeamSearchParams.__struct_fields__} - {"beam_width"}
    elsewhere = {"best_of", "output_kind", "guided_decoding"}
    assert set(SamplingParams.__struct_fields__) == {*NOT_FOR_BEAMS, *DEPENDENT, *elsewhere, *honoured}


@pytest.mark.parametrize("name", DEPENDENT)
def test_what_means_nothing_alone_is_refused_by_name(name: str) -> None:
    value, needed = DEPENDENT[name]
    with refused(name, match=f"{name} has no effect without .*{needed}"):
        SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{"n": 2, name: value, "use_beam_search": True})


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"logprobs": -2}, "logprobs", "integer_below_min_value"),
        ({"logprobs": False}, "logprobs", "invalid_type"),
        ({"prompt_logprobs": 1.0}, "prompt_logprobs", "invalid_type"),
        ({"logprob_token_ids": []}, "logprob_token_ids", "empty_array"),
        ({"logprob_token_ids": [1] * 129}, "logprob_token_ids", "array_above_max_length"),
        ({"logprob_token_ids": [-1]}, "logprob_token_ids[0]", "invalid_value"),
        ({"logprob_token_ids": [1, 2], "logprobs": 3}, "logprobs", "invalid_value"),
        ({"prompt_logprob_start": -1, "prompt_logprobs": 0}, "prompt_logprob_start", "integer_below_min_value"),
        ({"stream_interval": 0}, "stream_interval", "integer_below_min_value"),
        ({"stream_interval": 2, "output_kind": RequestOutputKind.FINAL_ONLY}, "stream_interval", "invalid_value"),
        ({"stream_interval": 2, "best_of": 2}, "stream_interval", "invalid_value"),
        ({"spaces_between_special_tokens": 0}, "spaces_between_special_tokens", "invalid_type"),
        (
            {"spaces_between_special_tokens": False, "detokenize": False},
            "spaces_between_special_tokens",
            "invalid_value",
        ),
        ({"flat_logprobs": 1, "logprobs": 1}, "flat_logprobs", "invalid_type"),
        ({"skip_clone": None}, "skip_clone", "invalid_type"),
        ({"typical_p": 0.0}, "typical_p", "decimal_below_min_value"),
        ({"top_n_sigma": -0.5}, "top_n_sigma", "decimal_below_min_value"),
        ({"top_n_sigma": float("nan")}, "top_n_sigma", "invalid_value"),
        ({"xtc_probability": 1.5}, "xtc_probability", "decimal_above_max_value"),
        ({"dry_multiplier": -1}, "dry_multiplier", "decimal_below_min_value"),
        ({"dry_multiplier": 1, "dry_base": 0.9}, "dry_base", "decimal_below_min_value"),
        ({"dry_multiplier": 1, "dry_allowed_length": 0}, "dry_allowed_length", "integer_below_min_value"),
        ({"dry_multiplier": 1, "dry_sequence_breakers": [""]}, "dry_sequence_breakers[0]", "string_below_min_length"),
        ({"mirostat": 3}, "mirostat", "integer_above_max_value"),
        ({"mirostat": True}, "mirostat", "invalid_type"),
        ({"mirostat": 1, "mirostat_tau": 0}, "mirostat_tau", "decimal_below_min_value"),
        ({"logits_processors": "x"}, "logits_processors", "invalid_type"),
        ({"logits_processors": [{"args": {}}]}, "logits_processors[0]", "missing_required_parameter"),
        ({"logits_processors": [{"name": "x", "how": 1}]}, "logits_processors[0]", "unknown_parameter"),
        ({"logits_processors": ["x"], "extra_args": [1]}, "extra_args", "invalid_type"),
        ({"logits_processors": ["x"], "extra_args": {"y": 2**64}}, "extra_args", "invalid_value"),
        ({"logits_processors": [{"name": "x", "args": {"y": 2**64}}]}, "logits_processors", "invalid_value"),
        ({"logits_processors": ["x"], "extra_args": {"y": object()}}, "extra_args", "invalid_type"),
        ({"logits_processors": ["x"], "extra_args": {1: "y"}}, "extra_args", "invalid_type"),
        ({"logits_processors": [{"name": "x", "args": {1: "y"}}]}, "logits_processors", "invalid_type"),
        ({"repetition_detection": 3}, "repetition_detection", "invalid_type"),
        ({"repetition_detection": {}}, "repetition_detection", "missing_required_parameter"),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_count": 1}},
            "repetition_detection.min_count",
            "integer_below_min_value",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 3, "min_pattern_size": 4}},
            "repetition_detection.min_pattern_size",
            "integer_above_max_value",
        ),
        (
            {"repetition_detection": {"max_pattern_size": 1025}},
            "repetition_detection.max_pattern_size",
            "integer_above_max_value",
        ),
        (
            {"dry_multiplier": 1, "dry_sequence_breakers": ["x" * 41]},
            "dry_sequence_breakers[0]",
            "string_above_max_length",
        ),
        ({"watermarking": {"key": 1}}, "watermarking", "unsupported_parameter"),
        ({"routed_experts_prompt_start": 0}, "routed_experts_prompt_start", "unsupported_parameter"),
        ({"trace_decode_token_ids": [3]}, "trace_decode_token_ids", "unsupported_parameter"),
        ({"prompt_logprob_token_ids": [[3]]}, "prompt_logprob_token_ids", "unsupported_parameter"),
        ({"mirostat": 2, "temperature": 0}, "mirostat", "invalid_value"),
        ({"dynatemp_range": 0.5, "temperature": 0}, "dynatemp_range", "invalid_value"),
    ],
)
def test_bad_sampling_params_are_named(fields: dict[str, Any], param: str, code: str) -> None:
    with refused(param, code):
        SamplingParams(**fields)


@pytest.mark.parametrize("name", MIROSTAT_REPLACES)
def test_mirostat_replaces_the_other_truncations(name: str) -> None:
    with refused(name, match=f"{name} contradicts mirostat"):
        SamplingParams(mirostat=2, **{name: NOT_FOR_BEAMS[name]})
    SamplingParams(mirostat=1, top_k=-1, top_n_sigma=-1)  # both say "off"
    recommended = {name: NOT_FOR_BEAMS[name], "temperature": 0.5}
    assert with_recommended(recommended, {"mirostat": 2}) == {"temperature": 0.5, "mirostat": 2}
    assert with_recommended(recommended, {"mirostat": 0})[name] == NOT_FOR_BEAMS[name]


def test_values_that_mean_another_one(caplog: pytest.LogCaptureFixture) -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(logprobs=True, prompt_logprobs=True) == SamplingParams(logprobs=1, prompt_logprobs=1)
    assert SamplingParams(top_n_sigma=-1).top_n_sigma == 0.0
    greedy = SamplingParams(temperature=1e-6, top_p=0.5, top_k=3, min_p=0.5)
    assert greedy.greedy and (greedy.top_p, greedy.top_k, greedy.min_p) == (1.0, 0, 0.0)
    assert not caplog.records
    low = SamplingParams(temperature=0.001)
    assert low.temperature == 0.01 and "0.001" in caplog.text
    low.clone(seed=1)
    assert len(caplog.records) == 1


def test_sampling_params_survive_the_wire() -> None:
    params = SamplingParams(
        logits_processors=["a", {"name": "b", "args": {"x": [1]}}],
        extra_args={"y": 2},
        repetition_detection={"max_pattern_size": 3, "min_count": 4},
        dry_multiplier=1,
        dry_sequence_breakers="x",
        logprob_token_ids=(3, 4),
    )
    assert params.logits_processors[1].args == {"x": [1]} and params.repetition_detection.min_count == 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params

"""`best_of` and `BeamSearchParams`: what is accepted, and which field every refusal names."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from quire import BeamSearchParams, SamplingParams
from quire.errors import RequestError, UnsupportedError
from quire.sampling_params import BEAM_FIELDS, RequestOutputKind


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
        ({"best_of": 129}, "integer_above_max_value", "best_of must be at most 128"),
        ({"best_of": 2.0}, "invalid_type", "best_of must be an integer"),
        ({"best_of": True}, "invalid_type", "best_of must be an integer"),
        ({"n": 3, "best_of": 2}, "invalid_value", r"best_of must be at least n \(3\), got 2"),
        ({"best_of": 2, "temperature": 0.0}, "invalid_value", "best_of must equal n .* temperature 0"),
        ({"best_of": 2, "output_kind": RequestOutputKind.DELTA}, "invalid_value", "best_of must equal n .* stream"),
    ],
)
def test_best_of_that_makes_no_sense(fields: dict[str, Any], code: str, match: str) -> None:
    with pytest.raises(RequestError, match=match) as caught:
        SamplingParams(**fields)
    assert (caught.value.param, caught.value.code) == ("best_of", code)


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
    with pytest.raises(RequestError) as caught:
        BeamSearchParams(**{"beam_width": 4, **fields})
    assert (caught.value.param, caught.value.code) == (param, code)


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
    assert BeamSearchParams.from_fields(fields, most_tokens=40) == expected
    assert BeamSearchParams.from_fields({"n": 3, "max_tokens": 8}, most_tokens=40) == BeamSearchParams(
        beam_width=3, max_tokens=8
    )


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
}


@pytest.mark.parametrize("name", NOT_FOR_BEAMS)
def test_what_beams_cannot_honour_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name) as caught:
        BeamSearchParams.from_fields({"n": 2, name: NOT_FOR_BEAMS[name]}, most_tokens=9)
    assert caught.value.param == name


def test_every_sampling_field_is_honoured_by_beams_or_refused() -> None:
    elsewhere = {"best_of", "output_kind"}
    assert set(SamplingParams.__struct_fields__) == {*NOT_FOR_BEAMS, *elsewhere} | BEAM_FIELDS

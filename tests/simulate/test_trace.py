"""Traces are read as they are meant, bad lines are named, and drawn loads are what was asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.simulate.trace import OWN_TOKENS, Synthetic, TraceRequest, draw, parse_synthetic, read_trace

GOOD = {"arrival": 0.5, "prompt_tokens": 10, "output_tokens": 2}


def write(path: Path, *items: object) -> str:
    file = path / "trace.jsonl"
    file.write_text("".join((item if isinstance(item, str) else json.dumps(item)) + "\n" for item in items))
    return str(file)


def test_mooncake_lines_become_shared_blocks(tmp_path):
    lines = [
        {"timestamp": 2000, "input_length": 700, "output_length": 5, "hash_ids": [7, 8]},
        {"timestamp": 1000, "input_length": 600, "output_length": 0, "hash_ids": [7, 9]},
    ]
    first, second = read_trace(write(tmp_path, *lines), time_scale=0.5)
    assert (first.number, first.arrival, first.num_prompt_tokens, first.num_output_tokens) == (1, 0.5, 600, 1)
    assert second.prefix == ((7, 512), (8, 188))
    one, two = first.prompt_token_ids(), second.prompt_token_ids()
    assert len(one) == 600 and len(two) == 700
    assert one[:512] == two[:512] and one[512] != two[512]


def test_our_own_lines_share_named_parts_and_nothing_else(tmp_path):
    lines = [
        {**GOOD, "prefix": [["system", 4], ["doc", 3]], "priority": -1, "tenant": "a"},
        {**GOOD, "prefix": [["system", 4], ["other", 3]]},
    ]
    first, second = read_trace(write(tmp_path, *lines))
    assert (first.priority, first.tenant, second.priority, second.tenant) == (-1, "a", 0, "")
    one, two = first.prompt_token_ids(), second.prompt_token_ids()
    assert [a == b for a, b in zip(one, two, strict=True)] == [True] * 4 + [False] * 6


def test_the_limit_counts_lines_in_the_order_of_the_file(tmp_path):
    lines = [{**GOOD, "arrival": when} for when in (3, 1, 2)]
    assert [request.arrival for request in read_trace(write(tmp_path, *lines), limit=2)] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[1]", "line 2: Expected `object`, got `array`"),
        ("{", "line 2: Input data was truncated"),
        ({**GOOD, "prompt_tokens": 0}, "Expected `int` >= 1 - at `..prompt_tokens`"),
        ({**GOOD, "prompt_tokens": True}, "prompt_tokens"),
        ({**GOOD, "arrival": -1}, "Expected `float` >= 0.0 - at `..arrival`"),
        ({**GOOD, "arrival": float("nan")}, "JSON is malformed"),
        ({**GOOD, "prefix": [["a", 11]]}, "prefix is longer than prompt_tokens, 10"),
        ({**GOOD, "prefix": [["a"]]}, "prefix"),
        ({**GOOD, "tenant": 3}, "Expected `str`, got `int` - at `..tenant`"),
        ({"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [-1]}, "hash_ids"),
    ],
    ids=str,
)
def test_a_bad_line_is_named(tmp_path, line, words):
    with pytest.raises(ConfigError, match=words) as caught:
        read_trace(write(tmp_path, GOOD, line))
    assert "trace.jsonl: line 2" in str(caught.value)


def test_no_file_and_no_request_are_errors(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="holds no request"):
        read_trace(write(tmp_path, ""))


def test_a_drawn_load_keeps_its_rate_lengths_and_prefixes():
    load = parse_synthetic("poisson:rate=5,num=4000,prompt=100,output=20,spread=0.5,prefix=40,groups=3,seed=1")
    requests = draw([load])
    assert requests == draw([load])
    assert len(requests) / requests[-1].arrival == pytest.approx(5, rel=0.05)
    assert {request.num_prompt_tokens for request in requests} == set(range(50, 151))
    assert {request.prefix for request in requests} == {((group, 40),) for group in range(3)}
    own = [request.prompt_token_ids()[40] for request in requests]
    assert len(set(own)) == len(own) and min(own) >= OWN_TOKENS


def test_several_loads_are_merged_by_arrival_and_share_nothing():
    loads = [Synthetic("burst", num=1, start=2.0, prefix=9, prompt=9), Synthetic("uniform", rate=1, num=3, prefix=9)]
    requests = draw(loads)
    assert [request.arrival for request in requests] == [1.0, 2.0, 2.0, 3.0]
    assert [request.number for request in requests] == [0, 1, 2, 3]
    long = next(request for request in requests if request.num_prompt_tokens == 9)
    assert all(other.prefix != long.prefix for other in requests if other is not long)


@pytest.mark.parametrize(
    "text",
    ["", "gauss:rate=1", "poisson:rate", "poisson:rate=0", "burst:num=1.5", "burst:num=2,num=3", "burst:prefix=513"],
)
def test_a_bad_load_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        parse_synthetic(text)
    assert caught.value.param == "synthetic"


def test_prompts_for_a_model_stay_within_its_vocabulary_and_share_the_same_parts():
    requests = [TraceRequest(number, 0.0, 30, 1, ((5, 20),)) for number in range(2)]
    one, two = (request.prompt_token_ids(vocab_size=100) for request in requests)
    assert one[:20] == two[:20] and one[20:] != two[20:]
    assert set(one) | set(two) <= set(range(100))

"""`quire generate`: what goes in, what comes out, what happens to bad prompts."""

from __future__ import annotations

import asyncio
import json

import pytest

from quire.cli.generate import read_prompts
from quire.cli.offline import READY_PER_RUNNING
from quire.errors import ModelError, RequestError
from quire.ordered import WINDOW
from quire.sampling_params import RequestOutputKind, SamplingParams


def lines_of(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def test_one_prompt_streams_plain_text(quire, fake_llm):
    result = quire("generate", "--prompt", "there and", "--temperature", "0")
    assert (result.code, result.out, result.err) == (0, "there and back\n", "")
    assert fake_llm.closed and fake_llm.closed_streams == 1
    (_, params), *_ = fake_llm.requests
    assert (params.temperature, params.max_tokens) == (0.0, 256)


def test_the_engine_runs_in_this_process_with_the_given_options(quire, fake_llm):
    quire("generate", "folder", "-p", "x", "--max-num-seqs", "3")
    assert fake_llm.config.model.model == "folder"
    assert fake_llm.config.server.engine == "inline"
    assert fake_llm.config.scheduler.max_num_seqs == 3


def test_recommended_sampling_is_taken_unless_overridden(quire, fake_llm):
    fake_llm.recommended = {"temperature": 0.6, "top_k": 20}
    quire("generate", "-p", "x", "--top-k", "5")
    (_, params), *_ = fake_llm.requests
    assert (params.temperature, params.top_k) == (0.6, 5)


def test_seed_serves_for_sampling_unless_it_has_its_own(quire, fake_llm):
    quire("generate", "-p", "x", "--seed", "3")
    quire("generate", "-p", "x", "--seed", "3", "--sampling-seed", "4")
    assert [params.seed for _, params in fake_llm.requests] == [3, 4]


def test_lines_of_text_become_lines_of_json_in_order(quire, fake_llm, type_in):
    type_in("one", "", "two {", "three")
    result = quire("generate")
    results = lines_of(result.out)
    assert [item["index"] for item in results] == [0, 1, 2]
    assert [item["outputs"][0]["text"] for item in results] == ["one back", "two { back", "three back"]
    assert results[0]["usage"] == {"prompt_tokens": 3, "completion_tokens": 3, "cached_tokens": 0}
    assert results[0]["outputs"][0]["finish_reason"] == "stop"


def test_json_lines_with_messages_ids_and_their_own_sampling(quire, fake_llm, tmp_path):
    source = tmp_path / "in.jsonl"
    source.write_text(
        '{"prompt": "one", "id": "a"}\n'
        '{"messages": [{"role": "user", "content": "hi"}], "sampling_params": {"max_tokens": 3, "n": 2}}\n'
        '{"prompt_token_ids": [5, 6]}\n'
    )
    target = tmp_path / "out.jsonl"
    result = quire("generate", "--input", str(source), "-o", str(target), "--max-tokens", "9")
    assert (result.code, result.out) == (0, "")
    first, second, third = lines_of(target.read_text())
    assert (first["id"], first["prompt"]) == ("a", "one")
    assert second["messages"] == [{"role": "user", "content": "hi"}]
    assert len(second["outputs"]) == 2
    assert third["prompt_token_ids"] == [5, 6]
    asked = {str(prompt): params for prompt, params in fake_llm.requests}
    assert asked["user:hi"].max_tokens == 3
    assert asked["one"].max_tokens == 9


def test_a_prompt_that_fails_is_reported_in_its_line_and_the_others_go_on(quire, fake_llm, type_in):
    type_in("one", "too long", "three")
    result = quire("generate")
    assert result.code == 1
    assert result.err == "error: 1 of 3 prompts failed; their lines say why\n"
    first, second, third = lines_of(result.out)
    assert second["error"] == {
        "message": "the prompt does not fit",
        "param": "prompt",
        "code": "context_length_exceeded",
    }
    assert first["outputs"] and third["outputs"]


def test_results_are_written_while_a_bounded_number_of_prompts_is_in_flight(
    quire, fake_llm, tmp_path, monkeypatch, num_prompts=200
):
    """One prompt that takes long holds up a few others only, and then all come in order."""
    source, target = tmp_path / "in.txt", tmp_path / "out.jsonl"
    source.write_text("".join(f"{number}\n" for number in range(num_prompts)))
    submit = fake_llm.submit
    written_at_start = {}

    async def slow(prompt, params):
        written_at_start[int(prompt)] = len(target.read_text().splitlines())
        stream = await submit(prompt, params)
        for _ in range(1000 if prompt == "50" else 1):
            await asyncio.sleep(0)
        return stream

    monkeypatch.setattr(fake_llm, "submit", slow)
    assert quire("generate", "-i", str(source), "-o", str(target), "--max-num-seqs", "2").code == 0
    assert [item["prompt"] for item in lines_of(target.read_text())] == [str(number) for number in range(num_prompts)]
    unwritten = [number - written for number, written in written_at_start.items()]
    assert max(unwritten[:50]) <= max(unwritten[51:]) < READY_PER_RUNNING * 2 * WINDOW


def test_half_a_surrogate_pair_is_repeated_as_it_came(quire, fake_llm, type_in):
    type_in('{"prompt": "too long", "id": "\\ud800"}', '{"prompt": "\u00e9"}')
    first, second = quire("generate").out.splitlines()
    assert '"\\ud800"' in first
    assert '"\u00e9"' in second


def test_several_completions_of_one_prompt_come_as_json(quire, fake_llm):
    (item,) = lines_of(quire("generate", "-p", "x", "--n", "2").out)
    assert len(item["outputs"]) == 2


def test_a_request_that_fails_in_the_engine_is_an_error(quire, fake_llm, type_in):
    type_in("one", "failing", "three")
    result = quire("generate")
    assert result.code == 1
    assert [item.get("error", {}).get("message") for item in lines_of(result.out)] == [
        None,
        "logits are not finite",
        None,
    ]
    alone = quire("generate", "-p", "failing")
    assert (alone.code, alone.err) == (1, "error: logits are not finite\n")


def test_the_best_of_several_is_one_text_at_the_end(quire, fake_llm):
    result = quire("generate", "-p", "there and", "--best-of", "3")
    assert (result.code, result.out) == (0, "there and back\n")
    (_, params), *_ = fake_llm.requests
    assert (params.n, params.best_of, params.output_kind) == (1, 3, RequestOutputKind.FINAL_ONLY)


def test_beams(quire, fake_llm):
    fake_llm.recommended = {"temperature": 0.6, "top_k": 20}
    words = ["--use-beam-search", "--length-penalty", "2", "--early-stopping", "true", "--max-tokens", "9"]
    (item,) = lines_of(quire("generate", "-p", "x", *words, "--n", "2", "--best-of", "3").out)
    assert len(item["outputs"]) == 2
    assert item["usage"]["completion_tokens"] == 9
    assert quire("generate", "-p", "x", *words, "--best-of", "2").out == "x back\n"
    wide = SamplingParams(n=2, best_of=3, max_tokens=9, use_beam_search=True, length_penalty=2.0, early_stopping=True)
    assert [params for _, params in fake_llm.requests] == [wide, wide.clone(n=1, best_of=2)]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["-p", "x", "--n", "3", "--best-of", "2"], "best_of must be at least n"),
        (["-p", "x", "--best-of", "2", "--temperature", "0"], "best_of must equal n"),
        (["-p", "x", "--use-beam-search", "--top-p", "0.5"], "top_p is not supported with beam search"),
        (["-p", "x", "--use-beam-search", "--temperature", "0.5"], "temperature must be 0, 1 or absent"),
        (["-p", "x", "--length-penalty", "2"], "length_penalty has no effect without use_beam_search"),
        (["-p", "x", "--early-stopping", "never"], "early_stopping has no effect without use_beam_search"),
        (["-p", "x", "-i", "y"], "prompt contradicts input"),
        (["-i", "/no/such/file"], "/no/such/file"),
        (["-p", ""], "--prompt"),
        (["-p", "x", "--temperature", "inf"], "temperature"),
        (["-p", "x", "--top-p", "0"], "top_p"),
        (["-p", "x", "--min-tokens", "9", "--max-tokens", "3"], "min_tokens"),
        (["-p", "x", "--stop", ""], "stop"),
        (["-p", "x", "--logit-bias", '{"a": 1}'], "logit_bias"),
        (["-p", "x", "--port", "3"], "unknown option --port"),
        (["-p", "x", "-o", "/no/such/folder/out"], "/no/such/folder/out"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_end_with_code_2_before_a_model_is_loaded(quire, fake_llm, words, part):
    result = quire("generate", *words)
    assert result.code == 2
    assert part in result.err and result.err.count("\n") == 1
    assert not fake_llm.started


def test_nothing_to_complete_at_a_terminal_is_an_error(quire, fake_llm, type_in):
    type_in(tty=True)
    result = quire("generate")
    assert result.code == 2
    assert "--prompt" in result.err


def test_a_model_that_cannot_be_loaded_ends_the_command(quire, fake_llm):
    fake_llm.fail_start = ModelError("config.json is missing")
    result = quire("generate", "-p", "x")
    assert (result.code, result.err) == (2, "error: config.json is missing\n")
    assert fake_llm.closed


@pytest.mark.parametrize(
    ("second", "part"),
    [
        ("plain", "Expecting value"),
        ("[1]", "Expected `object`"),
        ('{"text": "x"}', "unknown field `text`"),
        ('{"id": "x"}', "exactly one of"),
        ('{"prompt": "x", "messages": []}', "exactly one of"),
        ('{"prompt": 3}', "Expected `str`, got `int` - at `$.prompt`"),
        ('{"messages": "x"}', "Expected `array`, got `str` - at `$.messages`"),
        ('{"prompt": "x", "sampling_params": 3}', "Expected `object`, got `int` - at `$.sampling_params`"),
        ('{"prompt": "x", "sampling_params": {"temp": 3}}', "'temp'"),
    ],
)
def test_a_bad_line_is_named_before_anything_runs(second, part):
    with pytest.raises(RequestError) as caught:
        read_prompts(['{"prompt": "x"}\n', "\n", second + "\n"], "in.jsonl")
    assert caught.value.message.startswith("in.jsonl: line 3: ")
    assert part in caught.value.message


def test_braces_in_plain_text_stay_plain_text():
    prompts = read_prompts(["{a}\n", '{"b": 1}\n'], "in.txt")
    assert [prompt.value for prompt in prompts] == ["{a}", '{"b": 1}']


def test_an_input_without_a_prompt_is_refused():
    with pytest.raises(RequestError, match="no prompt"):
        read_prompts(["\n", "  \n"], "in.txt")


def test_every_sampling_field_is_offered_or_left_out_on_purpose():
    from quire.sampling_params import OPTIONS

    in_files_only = {"structured_outputs", "repetition_detection", "logits_processors", "extra_args"}
    for_programs = {"detokenize", "output_kind", "stream_interval", "flat_logprobs", "skip_clone"}
    for_programs |= {"skip_reading_prefix_cache", "guided_decoding"}
    refused = {name for name, option in OPTIONS.items() if option.refused}
    left_out = in_files_only | for_programs | refused
    assert {name for name, option in OPTIONS.items() if not option.help} == left_out

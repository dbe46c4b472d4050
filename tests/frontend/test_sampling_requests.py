"""What the front makes of sampling options: bounds of the model, what the engine is told, and how outputs look."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from quire.engine_request import EngineRequest
from quire.errors import EngineDeadError, RequestError
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.input_processor import InputProcessor
from quire.outputs import FlatLogprobs, Logprob, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer
from tests.frontend.conftest import MAKERS, NAMED
from tests.frontend.test_output_processor import Rig
from tests.helpers.errors import refused
from tests.helpers.fake_engine import fake_async_llm, small_tokenizer
from tests.helpers.requests import engine_requests, input_processor

CUMULATIVE, DELTA = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA


def processor(**options: Any) -> InputProcessor:
    return input_processor(small_tokenizer(), **options)


def build(front: InputProcessor, **fields: Any) -> EngineRequest:
    [add] = engine_requests(front, "hello world", SamplingParams(**fields), "r", arrival_time=0.0)
    return add


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
def test_log_probabilities_are_bounded_by_the_model_option(name: str) -> None:
    for front, most in ((processor(), 20), (processor(max_logprobs=5), 5)):
        build(front, **{name: most})
        for asked, shown in ((most + 1, f"got {most + 1}"), (-1, "got -1 .the whole vocabulary, 268")):
            with refused(
                name, "integer_above_max_value", match=f"{name} must be at most {most} .max_logprobs.*{shown}"
            ):
                build(front, **{name: asked})
    for bound in (-1, 268, 1000):
        build(processor(max_logprobs=bound), **{name: -1})
    with pytest.raises(RequestError, match=name):
        build(processor(max_logprobs=267), **{name: -1})


def test_ids_positions_and_names_that_do_not_exist() -> None:
    front = processor(logits_processors=("mine", "yours"))
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"logprob_token_ids": [3, 268]}, "logprob_token_ids[1]", ">= vocab 268"),
        ({"prompt_logprobs": 1, "prompt_logprob_start": 3}, "prompt_logprob_start", "at most 2, the last position"),
        ({"logits_processors": ["theirs"]}, "logits_processors", "'theirs'; this engine has mine, yours"),
    ]
    for fields, param, message in cases:
        with refused(param, match=message):
            build(front, **fields)
    build(front, logits_processors=["yours"], prompt_logprobs=1, prompt_logprob_start=1)
    with pytest.raises(RequestError, match="this engine has none"):
        build(processor(), logits_processors=["mine"])


def test_the_engine_is_told_how_breakers_are_spelled() -> None:
    front = processor()
    assert build(front).dry_breakers == []
    tokenizer = small_tokenizer()
    newline, colon, quote, star = (tokenizer.encode(text, add_special_tokens=False)[0] for text in '\n:"*')
    [(heads, tail)] = build(front, dry_multiplier=1.0).dry_breakers
    assert {newline, colon, quote, star} <= set(heads) and tail == []
    add = build(front, dry_multiplier=1.0, dry_sequence_breakers=["*"])
    assert add.dry_breakers == [([star], [])]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(add), type=EngineRequest) == add
    assert build(front, dry_multiplier=1.0, dry_sequence_breakers=[]).dry_breakers == []
    bare = input_processor(None, vocab_size=100)
    with pytest.raises(RequestError, match=r"dry_sequence_breakers must be \[\]"):
        engine_requests(bare, [1, 2], SamplingParams(dry_multiplier=1.0), "r", arrival_time=0.0)
    engine_requests(bare, [1, 2], SamplingParams(dry_multiplier=1.0, dry_sequence_breakers=[]), "r", arrival_time=0.0)


def test_skip_clone_hands_on_the_object_itself() -> None:
    front = processor()
    for skip in (False, True):
        params = SamplingParams(skip_clone=skip)
        [add] = engine_requests(front, "hello", params, "r", arrival_time=0.0)
        assert (add.sampling_params is params) == skip
    several = engine_requests(front, "hello", SamplingParams(skip_clone=True, n=2, best_of=3), "r", arrival_time=0.0)
    assert several[0].sampling_params.n == 1


def test_options_of_outputs_do_not_trouble_several_sequences() -> None:
    front = processor(max_num_seqs=2)
    params = SamplingParams(n=5, prompt_logprobs=1, prompt_logprob_start=1, flat_logprobs=True, stream_interval=3)
    adds = engine_requests(front, "hello world", params, "r", arrival_time=0.0)
    assert [add.sampling_params.prompt_logprobs for add in adds] == [1, None, None]
    best = SamplingParams(n=1, best_of=2, logprob_token_ids=[3, 4])
    assert engine_requests(front, "hello", best, "r", arrival_time=0.0)[0].sampling_params.logprobs is None
    beam = engine_requests(front, "hello", SamplingParams(n=2, use_beam_search=True), "r", arrival_time=0.0)
    assert beam[0].dry_breakers == []


@pytest.mark.parametrize("interval", [1, 2, 3, 5, 100])
@pytest.mark.parametrize("kind", [CUMULATIVE, DELTA])
def test_a_stream_has_an_output_every_so_many_tokens(interval: int, kind: RequestOutputKind) -> None:
    rig = Rig("abcdefghij")
    outputs = rig.run(rig.add(output_kind=kind, stream_interval=interval))
    texts = [output.outputs[0].text for output in outputs]
    counts = [output.num_generated_tokens for output in outputs]
    assert counts == [1, *range(1 + interval, 11, interval), 11]
    assert ("".join(texts) if kind == DELTA else texts[-1]) == "abcdefghij"
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_what_an_interval_held_back_comes_before_an_error() -> None:
    rig = Rig("abcdefghij")
    state = rig.add(output_kind=DELTA, stream_interval=8)
    texts = []
    for _ in range(5):
        rig.step()
        output = state.take()
        texts += [] if output is None else [output.outputs[0].text]
    assert texts == ["a"]
    rig.outputs.fail_all(EngineDeadError("gone"))
    output = state.take()
    assert output is not None and output.outputs[0].text == "bcde" and not output.finished


def test_a_stream_with_an_interval_ends() -> None:
    async def run() -> list[RequestOutput]:
        async with fake_async_llm()[0] as llm, asyncio.timeout(60):
            params = SamplingParams(max_tokens=20, output_kind=DELTA, stream_interval=6)
            return [output async for output in llm.generate("hello", params)]

    outputs = asyncio.run(run())
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 20
    assert len(outputs) <= 5 and outputs[-1].finished


def test_intervals_count_for_each_completion() -> None:
    rig = Rig("abcdefgh||xy")
    outputs = rig.run(rig.add(n=2, output_kind=DELTA, stream_interval=3))
    texts: dict[int, list[str]] = {0: [], 1: []}
    for output in outputs:
        for item in output.outputs:
            texts[item.index].append(item.text)
    assert texts[0] == ["a", "bcd", "efg", "h"]
    assert texts[1] == ["x", "y"]


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_flat_logprobs_say_the_same_in_few_objects(kind: RequestOutputKind) -> None:
    positions = {}
    for flat in (False, True):
        rig = Rig("hello world, hello")
        outputs = rig.run(
            rig.add(output_kind=kind, logprobs=2, prompt_logprobs=1, flat_logprobs=flat, prompt="hello world")
        )
        pieces = [output.outputs[0].logprobs for output in outputs]
        assert all(isinstance(piece, FlatLogprobs if flat else list) for piece in pieces)
        whole = [entry for piece in pieces for entry in piece] if kind == DELTA else list(pieces[-1])
        prompt = outputs[0 if kind == DELTA else -1].prompt_logprobs
        assert isinstance(prompt, FlatLogprobs if flat else list)
        positions[flat] = whole, [entry or None for entry in prompt]
    assert positions[True] == positions[False] and len(positions[True][0]) > 5


def test_flat_logprobs_read_like_a_list() -> None:
    flat = FlatLogprobs()
    flat.add([5, 6], [-0.5, -1.0], [1, 2], ["a", "b"])
    copy = flat.copy()
    flat.add([7], [-0.1], [None], [None])
    assert (len(flat), len(copy)) == (2, 1)
    assert flat[0] == {5: Logprob(-0.5, 1, "a"), 6: Logprob(-1.0, 2, "b")} and flat[-1] == {7: Logprob(-0.1)}
    assert flat[1:] == [flat[1]] and list(flat) == flat[:]
    with pytest.raises(IndexError):
        flat[2]


def test_special_tokens_without_blanks_beside_them() -> None:
    tokenizer = Tokenizer(MAKERS["wordpiece"](), special_tokens=NAMED["wordpiece"])
    separator = tokenizer.token_to_id("[SEP]")
    words = [tokenizer.encode(text, add_special_tokens=False) for text in ("the quick", "fox")]
    ids = [*words[0], separator, separator, *words[1]]

    def text(**options: bool) -> str:
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False, **options)
        return "".join([*(detokenizer.add(token) for token in ids), detokenizer.flush()])

    assert text() == tokenizer.decode(ids, skip_special_tokens=False)
    assert "[SEP] [SEP]" in text()
    assert text(spaces_between_special_tokens=False) == "the quick[SEP][SEP]fox"

"""Beam search through the whole engine against transformers' `generate(num_beams=k)`: tokens and scores.

Also where it is hard: prompts in chunks, searches side by side and beside sampling, and so few blocks that searches are
preempted and computed again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine_request import EngineRequest
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.step import BeamOutput
from tests.helpers.checkpoints import write_checkpoint

FAMILIES = {"llama": {"num_key_value_heads": 2}, "gpt2": {}}
# Each width and each device once. Searches know nothing of the family.
WIDTHS = pytest.mark.parametrize(("device", "width"), [("cpu", 4), ("reference", 2)])
# Lengths on both sides of a block's border; the last two begin alike.

PROMPTS = [
    [7, 3, 9],
    list(range(20, 43)),
    [11] * 8,
    [5, 6, 7, 8, 9, 10, 11, 12, 13],
    [5, 6, 7, 8, 9, 10, 11, 12, 99, 4],
]
MAX_TOKENS = 18

Beams = list[tuple[list[int], float]]  # generated tokens and score, best first


class Model(NamedTuple):
    """A checkpoint whose EOS tokens are likely, and what transformers finds with it: [width][prompt]."""

    folder: Path
    eos_ids: list[int]
    expected: dict[int, list[Beams]]


@pytest.fixture(scope="module", params=["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    import torch
    from transformers import AutoModelForCausalLM

    folder = write_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=1, **FAMILIES[request.param])
    oracle = AutoModelForCausalLM.from_pretrained(folder).eval()

    def generate(prompt: list[int], width: int, eos_ids: list[int]) -> Beams:
        output = oracle.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=eos_ids or None,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
        )
        rows = output.sequences[:, len(prompt) :].tolist()
        ends = [next((at + 1 for at, token in enumerate(row) if token in eos_ids), len(row)) for row in rows]
        return [
            (row[:end], score) for row, end, score in zip(rows, ends, output.sequences_scores.tolist(), strict=True)
        ]

    # Tokens that the best beams have early and late when nothing ends them.
    free = [generate(prompt, 2, [])[0][0] for prompt in PROMPTS[:2]]
    eos_ids = sorted({free[0][9], free[1][5], 2})  # 2: config.json's, which `LLM` heeds as well
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos_ids}))
    expected = {width: [generate(prompt, width, eos_ids) for prompt in PROMPTS] for width in (2, 4)}
    return Model(folder, eos_ids, expected)


def check(beams: list[BeamOutput], expected: Beams) -> None:
    assert [beam.token_ids for beam in beams] == [token_ids for token_ids, _ in expected]
    assert [beam.score for beam in beams] == pytest.approx([score for _, score in expected], abs=1e-4)


def search(index: int, model: Model, width: int) -> EngineRequest:
    """A search after PROMPTS[index]."""
    return EngineRequest(
        request_id=f"{index}",
        prompt_token_ids=PROMPTS[index],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        arrival_time=float(index),
        sequence_ids=[f"{index}"],
        seeds=[0],
        stop_ids=model.eos_ids,
        max_tokens=MAX_TOKENS,
        beam=BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS),
    )


def run(core: EngineCore, requests: list[EngineRequest]) -> dict[str, list[BeamOutput]]:
    """Run them together; check that nothing is left behind."""
    for request in requests:
        core.add(request)
    beams = {}
    while core.has_unfinished():
        for output in core.step().outputs:
            assert output.error is None
            if output.beams is not None:
                beams[output.sequence_id] = output.beams
    assert core.call("check_integrity") == {"ok": True}
    stats = core.call("stats")
    assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
    assert stats["num_free_blocks"] == stats["num_blocks"]
    return beams


def make_core(folder: Path, device: str, **options: object) -> EngineCore:
    config = EngineConfig.from_kwargs(
        model=str(folder), device=device, dtype="float32", block_size=4, skip_tokenizer_init=True, **options
    )
    return EngineCore(config)


def test_the_expected_beams_end_in_both_ways(model: Model) -> None:
    """Or else the comparisons below would show little."""
    lengths = {len(token_ids) for width in (2, 4) for beams in model.expected[width] for token_ids, _ in beams}
    ended = [token_ids[-1] in model.eos_ids for beams in model.expected[4] for token_ids, _ in beams]
    assert len(lengths) > 3 and MAX_TOKENS in lengths
    assert any(ended) and not all(ended)


@WIDTHS
def test_the_beams_are_those_of_transformers(model: Model, device: str, width: int) -> None:
    params = BeamSearchParams(beam_width=width, max_tokens=MAX_TOKENS, include_stop_str_in_output=True)
    with LLM(str(model.folder), device=device, dtype="float32", skip_tokenizer_init=True) as llm:
        found = llm.beam_search([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    for prompt, output, expected in zip(PROMPTS, found, model.expected[width], strict=True):
        assert [beam.tokens for beam in output.sequences] == [prompt + token_ids for token_ids, _ in expected]
        assert [beam.score for beam in output.sequences] == pytest.approx([s for _, s in expected], abs=1e-4)
        for beam, (token_ids, _) in zip(output.sequences, expected, strict=True):
            assert beam.finish_reason == ("stop" if token_ids[-1] in model.eos_ids else "length")


@WIDTHS
def test_with_prompts_in_chunks(model: Model, device: str, width: int) -> None:
    core = make_core(model.folder, device, max_num_seqs=5, max_num_batched_tokens=5)
    beams = run(core, [search(index, model, width) for index in range(len(PROMPTS))])
    for index, expected in enumerate(model.expected[width]):
        check(beams[f"{index}"], expected)


@pytest.mark.parametrize(
    ("device", "width", "enable_prefix_caching"), [("cpu", 4, True), ("cpu", 2, False), ("reference", 4, False)]
)
def test_with_preemption(model: Model, device: str, width: int, enable_prefix_caching: bool) -> None:
    """A pool in which the largest search alone just fits."""
    num_blocks = 8 + 6 * width
    core = make_core(
        model.folder, device, num_gpu_blocks_override=num_blocks, enable_prefix_caching=enable_prefix_caching
    )
    beams = run(core, [search(index, model, width) for index in range(len(PROMPTS))])
    for index, expected in enumerate(model.expected[width]):
        check(beams[f"{index}"], expected)
    assert core.call("stats")["num_preemptions"] > 0


@WIDTHS
def test_with_swapping(model: Model, device: str, width: int) -> None:
    """Searches leave for the host and come back."""
    core = make_core(model.folder, device, num_gpu_blocks_override=8 + 6 * width, swap_space="1MiB")
    beams = run(core, [search(index, model, width) for index in range(len(PROMPTS))])
    for index, expected in enumerate(model.expected[width]):
        check(beams[f"{index}"], expected)
    assert core.call("stats")["num_swapped_out"] > 0


def test_beside_sampled_requests(model: Model) -> None:
    """Neither side sees the other."""
    sampled = EngineRequest(
        request_id="sampled",
        prompt_token_ids=PROMPTS[3],
        sampling_params=SamplingParams(temperature=1.0, max_tokens=MAX_TOKENS),
        arrival_time=0.5,
        sequence_ids=["sampled"],
        seeds=[3],
        stop_ids=[],
        max_tokens=MAX_TOKENS,
    )

    def tokens_of(requests: list[EngineRequest]) -> tuple[list[int], dict[str, list[BeamOutput]]]:
        core = make_core(model.folder, "cpu")
        for request in requests:
            core.add(request)
        tokens: list[int] = []
        beams: dict[str, list[BeamOutput]] = {}
        while core.has_unfinished():
            for output in core.step().outputs:
                if output.sequence_id == "sampled":
                    tokens += output.new_token_ids
                elif output.beams is not None:
                    beams[output.sequence_id] = output.beams
        return tokens, beams

    alone, _ = tokens_of([sampled])
    beside, beams = tokens_of([search(3, model, 4), sampled, search(4, model, 4)])
    assert beside == alone and len(alone) == MAX_TOKENS
    check(beams["3"], model.expected[4][3])
    check(beams["4"], model.expected[4][4])

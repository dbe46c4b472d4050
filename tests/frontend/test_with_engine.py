"""The frontend on a real engine, in the same process and in another: same texts, nothing left after a disconnect."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, SamplingParams
from quire.errors import RequestError
from quire.frontend.input_processor import child_seed
from quire.sampling_params import RequestOutputKind
from tests.frontend.conftest import train_byte_level, write_folder
from tests.helpers.checkpoints import write_checkpoint

TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>' }}{% endfor %}"
PROMPTS = ["The quick brown fox", "日本語 😀", "<html>"]
PARAMS = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose vocabulary is that of a real tokenizer."""
    path = tmp_path_factory.mktemp("model")
    write_checkpoint(path, "llama", vocab_size=train_byte_level().get_vocab_size())
    write_folder(path, "byte_level", chat_template=TEMPLATE)
    (path / "generation_config.json").write_text(json.dumps({"temperature": 0.0, "max_new_tokens": 5}))
    return path


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[str]:
    """What the synchronous engine answers."""
    with LLM(str(folder), device="reference") as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        again = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [output.outputs[0].text for output in again] == [output.outputs[0].text for output in outputs]
        [default] = llm.chat([{"role": "user", "content": "hi"}], use_tqdm=False)
        assert len(default.outputs[0].token_ids) <= 5
        tokenizer = llm.get_tokenizer()
        for output in outputs:
            completion = output.outputs[0]
            assert completion.finish_reason == "length"
            assert completion.text == tokenizer.decode(completion.token_ids)
        return [output.outputs[0].text for output in outputs]


@pytest.mark.parametrize("engine", ["inline", "process"])
def test_streams_say_what_the_synchronous_engine_says(folder: Path, texts: list[str], engine: str) -> None:
    async def text_of(llm: AsyncLLM, prompt: str) -> str:
        params = PARAMS.clone(output_kind=RequestOutputKind.DELTA)
        return "".join([output.outputs[0].text async for output in llm.generate(prompt, params)])

    async def run() -> None:
        async with asyncio.timeout(120), AsyncLLM(model=str(folder), device="reference", engine=engine) as llm:
            assert await asyncio.gather(*(text_of(llm, prompt) for prompt in PROMPTS)) == texts
            streams = [await llm.submit(prompt, PARAMS.clone(max_tokens=200)) for prompt in PROMPTS]
            for stream in streams:
                await anext(stream)
                await stream.aclose()
            stats = await llm.call("stats")
            assert (stats["num_running"], stats["num_waiting"]) == (0, 0)
            assert stats["num_free_blocks"] == stats["num_blocks"]
            assert llm.stats.num_running == 0
            await llm.check_health()

    asyncio.run(run())


def test_completions_that_share_a_prompt_are_those_of_separate_requests(folder: Path) -> None:
    """Also with more of them than run at a time, and whichever are returned."""
    params = SamplingParams(n=5, seed=3, temperature=1.0, max_tokens=12, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    with LLM(str(folder), device="reference", max_num_seqs=3, enable_prefix_caching=False) as llm:
        [together] = llm.generate(PROMPTS[0], params, use_tqdm=False)
        alone = [
            llm.generate(PROMPTS[0], params.clone(n=1, seed=child_seed(3, index)), use_tqdm=False)[0]
            for index in range(5)
        ]
        assert [item.token_ids for item in together.outputs] == [item.outputs[0].token_ids for item in alone]
        assert len({item.text for item in together.outputs}) == 5
        assert len(together.prompt_logprobs or []) == len(together.prompt_token_ids)
        sums = [item.cumulative_logprob or 0.0 for item in together.outputs]
        best = sorted(range(5), key=lambda index: -sums[index])[:2]
        [ranked] = llm.generate(PROMPTS[0], params.clone(n=2, best_of=5, logprobs=None), use_tqdm=False)
        assert [item.token_ids for item in ranked.outputs] == [together.outputs[index].token_ids for index in best]
        assert ranked.num_generated_tokens == 60


def test_a_search_with_one_beam_is_greedy_and_more_beams_come_best_first(folder: Path) -> None:
    with LLM(str(folder), device="reference", max_num_seqs=4) as llm:
        [greedy] = llm.generate(PROMPTS[0], PARAMS.clone(logprobs=0), use_tqdm=False)
        params = BeamSearchParams(beam_width=1, max_tokens=24, ignore_eos=True)
        [one] = llm.beam_search(PROMPTS[0], params)
        assert one.sequences[0].tokens == greedy.prompt_token_ids + greedy.outputs[0].token_ids
        assert one.sequences[0].cum_logprob == pytest.approx(greedy.outputs[0].cumulative_logprob, abs=1e-3)
        outputs = llm.beam_search(PROMPTS, params.clone(beam_width=4))
        for output in outputs:
            scores = [beam.score for beam in output.sequences]
            assert scores == sorted(scores, reverse=True)
            assert len({tuple(beam.tokens) for beam in output.sequences}) == 4
            assert all(beam.finish_reason == "length" for beam in output.sequences)


def test_completions_that_do_not_fit_side_by_side_run_in_turns(folder: Path) -> None:
    options: dict[str, Any] = {"device": "reference", "max_num_seqs": 8, "max_model_len": 64}
    prompts = ["abc", list(range(5, 60))]  # the second has three blocks and a bit when its completions begin
    params = SamplingParams(n=8, max_tokens=50, ignore_eos=True, seed=3, logprobs=1, prompt_logprobs=1)
    with LLM(str(folder), **options) as llm:
        expected = llm.generate(prompts, params, use_tqdm=False)
    with LLM(str(folder), **options, num_gpu_blocks_override=6) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [item.outputs for item in outputs] == [item.outputs for item in expected]
        assert [item.prompt_logprobs for item in outputs] == [item.prompt_logprobs for item in expected]
        with pytest.raises(RequestError, match="6 blocks"):
            llm.beam_search("abc", BeamSearchParams(beam_width=8, max_tokens=50, ignore_eos=True))

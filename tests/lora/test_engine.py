"""Adapters in the engine: slots, preemption, shared prefixes, errors."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.engine_request import LoRARequest
from quire.errors import ConfigError, RequestError, UnsupportedError
from quire.sampling_params import BeamSearchParams
from tests.lora.conftest import PROMPTS, World, answers, check_same, open_llm

NAMES = ["few", None, "all", "tables", "few", "all", None, "tables"]


@pytest.fixture(scope="module")
def expected(world: World) -> list[object]:
    """What each of PROMPTS with NAMES gives, alone."""
    with open_llm(world.base, enable_lora=True) as llm:
        return [answers(llm, [world.request(name)], [PROMPTS[i]])[0] for i, name in enumerate(NAMES)]


@pytest.mark.parametrize("scheduler", ["unified", "prefill-first"])
def test_more_adapters_than_slots(world: World, expected: list[object], scheduler: str) -> None:
    for max_loras, max_cpu_loras in ((1, 1), (2, 2), (1, 3)):
        options = {"max_loras": max_loras, "max_cpu_loras": max_cpu_loras, "scheduler": scheduler}
        with open_llm(world.base, enable_lora=True, **options) as llm:
            requests = [world.request(name) for name in NAMES]
            outputs = answers(llm, requests)
            assert [output.lora_request for output in outputs] == requests
            assert [output.outputs[0].lora_request for output in outputs] == requests
            for got, reference in zip(outputs, expected, strict=True):
                check_same(got, reference)  # type: ignore[arg-type]
            llm.llm_engine.core.call("check_integrity")


def test_preempted_requests_continue_with_their_adapter(world: World, expected: list[object]) -> None:
    for mode in ("recompute", "swap"):
        options = {"num_gpu_blocks_override": 18, "preemption_mode": mode, "swap_space": "4MiB"}
        with open_llm(world.base, enable_lora=True, max_loras=3, **options) as llm:
            outputs = answers(llm, [world.request(name) for name in NAMES])
            assert llm.llm_engine.core.call("stats")["num_preemptions"] > 0
        for got, reference in zip(outputs, expected, strict=True):
            check_same(got, reference)  # type: ignore[arg-type]


def test_prefixes_are_never_shared_across_adapters(world: World) -> None:
    prompt = {"prompt_token_ids": list(range(40))}
    with open_llm(world.base, enable_lora=True, max_loras=3, max_cpu_loras=3) as llm:

        def cached(name: str | None, number: int | None = None) -> int:
            (output,) = answers(llm, [world.request(name, number)], [prompt], max_tokens=1)
            return output.num_cached_tokens

        assert [cached(name) for name in (None, "few", "all", "tables")] == [0, 0, 0, 0]
        assert all(cached(name) > 30 for name in (None, "few", "all", "tables"))
        assert cached("few", 77) > 30  # the same name and content under another number


def test_an_adapter_that_changed_on_disk_has_prefixes_of_its_own(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(world.adapters["few"], folder)
    prompt = {"prompt_token_ids": list(range(40))}
    with open_llm(world.base, enable_lora=True) as llm:
        first = answers(llm, [LoRARequest("it", 1, str(folder))], [prompt])[0]
        shutil.rmtree(folder)
        shutil.copytree(world.adapters["tables"], folder)
        second = answers(llm, [LoRARequest("it", 2, str(folder))], [prompt])[0]
        other = answers(llm, [world.request("tables", 3)], [prompt])[0]
    assert second.num_cached_tokens == 0 and first.outputs[0].token_ids != second.outputs[0].token_ids
    check_same(second, other)


def test_a_bad_adapter_fails_its_own_requests_only(world: World, tmp_path: Path) -> None:
    with open_llm(world.base, enable_lora=True, max_loras=2) as llm:
        bad = LoRARequest("bad", 9, str(tmp_path / "nowhere"))
        outputs = answers(llm, [world.request("few"), bad, None, bad])
        errors = [output.outputs[0].error for output in outputs]
        assert errors[0] is None and errors[2] is None
        for error in (errors[1], errors[3]):
            assert isinstance(error, RequestError) and "nowhere: no such folder" in error.message
        shutil.copytree(world.adapters["few"], tmp_path / "nowhere")
        (again,) = answers(llm, [bad])
        check_same(again, outputs[0])


def test_an_unloaded_adapter_is_read_again(world: World, tmp_path: Path) -> None:
    folder = tmp_path / "it"
    shutil.copytree(world.adapters["few"], folder)
    mine = LoRARequest("it", 9, str(folder))
    with open_llm(world.base, enable_lora=True) as llm:
        (first,) = answers(llm, [mine])
        (other,) = answers(llm, [world.request("all")])
        (again,) = answers(llm, [mine])
        check_same(again, first)
        answers(llm, [world.request("all")])
        shutil.rmtree(folder)
        assert "no such folder" in str(answers(llm, [mine])[0].outputs[0].error)
        check_same(answers(llm, [world.request("all")])[0], other)


def test_sleep_unloads_adapters_and_requests_load_them_again(world: World) -> None:
    with open_llm(world.base, enable_lora=True) as llm:
        (first,) = answers(llm, [world.request("few")])
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up()
            check_same(answers(llm, [world.request("few")])[0], first)


def test_beam_search_has_the_adapter(world: World) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    with open_llm(world.base, enable_lora=True) as llm:
        (got,) = llm.beam_search([PROMPTS[1]], params, lora_request=world.request("tables"))
    with open_llm(world.merged("tables")) as llm:
        (reference,) = llm.beam_search([PROMPTS[1]], params)
    assert [beam.tokens for beam in got.sequences] == [beam.tokens for beam in reference.sequences]


def test_requests_and_options_that_are_refused(world: World) -> None:
    with open_llm(world.base) as llm, pytest.raises(UnsupportedError, match="serves no LoRA adapters"):
        answers(llm, [world.request("few")])
    with open_llm(world.base, enable_lora=True) as llm:
        with pytest.raises(RequestError, match="must be a LoRARequest, got 'few'"):
            llm.generate([PROMPTS[0]], lora_request="few")  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="token id 160 >= vocab 160"):
            answers(llm, [world.request("few")], [{"prompt_token_ids": [160]}])
    with open_llm(world.base, enable_lora=True, lora_extra_vocab_size=4) as llm:
        (output,) = answers(llm, [world.request("few")], [{"prompt_token_ids": [160]}])
        assert "token id 160 is not below its vocabulary of 160" in str(output.outputs[0].error)
    for bad in (("", 1, "/x"), ("a\n", 1, "/x"), ("a", 0, "/x"), ("a", True, "/x"), ("a", 1, "")):
        with pytest.raises(RequestError, match="must be a"):
            LoRARequest(*bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_cpu_loras is 1; it must be at least max_loras, 2"):
        LLM(str(world.base), max_loras=2, max_cpu_loras=1)


def test_calls_load_and_unload_adapters_beside_requests(world: World) -> None:
    with open_llm(world.base, enable_lora=True, max_cpu_loras=2) as llm:
        engine = llm.llm_engine.core
        assert engine is not None
        folder = str(world.adapters["few"])
        loaded: list[Any] = []
        engine.load_lora({"lora_name": "few", "lora_int_id": 1, "lora_path": folder}, loaded.append)
        while engine.has_unfinished():
            engine.step()
        assert loaded[0]["vocab_size"] == 160 and loaded[0]["digest"]
        (first,) = answers(llm, [world.request("few")])
        engine.call("unload_lora", {"lora_int_id": 1})
        check_same(answers(llm, [world.request("few")])[0], first)

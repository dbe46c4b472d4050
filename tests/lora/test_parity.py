"""A batch of several adapters and none gives what the merged models give, each alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import SamplingParams
from tests.helpers.adapters import factors, merge, read_tensors, write_adapter
from tests.helpers.checkpoints import plain_tensors, write_checkpoint
from tests.lora.conftest import PROMPTS, World, answers, check_same, lora_request, open_llm, scores

NAMES = [None, "few", "all", "tables", "few", None, "tables", "all"]


@pytest.mark.parametrize("device", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_a_mixed_batch_is_each_merged_model(world: World, device: str) -> None:
    with open_llm(world.base, device, enable_lora=True, max_loras=3) as llm:
        got = answers(llm, [world.request(name) for name in NAMES])
    for name in dict.fromkeys(NAMES):
        places = [i for i, other in enumerate(NAMES) if other == name]
        with open_llm(world.base if name is None else world.merged(name), device) as llm:
            reference = answers(llm, [None] * len(places), [PROMPTS[i] for i in places])
        for place, output in zip(places, reference, strict=True):
            check_same(got[place], output)


def test_requests_without_adapter_are_as_without_lora_to_the_bit(world: World) -> None:
    with open_llm(world.base, enable_lora=True, max_loras=3) as llm:
        got = answers(llm, [world.request(name) for name in NAMES])
    with open_llm(world.base) as llm:
        reference = answers(llm, [None, None], [PROMPTS[0], PROMPTS[5]])
    for place, output in zip((0, 5), reference, strict=True):
        np.testing.assert_array_equal(scores(got[place]), scores(output))


FAMILIES: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("phi3", ("qkv_proj", "gate_up_proj", "o_proj"), {}),
    ("gpt_neox", ("query_key_value", "dense_h_to_4h", "dense_4h_to_h"), {}),
    ("gpt2", ("attn.c_attn", "mlp.c_proj"), {"transposed": True}),
    ("qwen3_next", ("q_proj", "v_proj"), {}),
]
MORE: list[tuple[str, tuple[str, ...], dict[str, Any]]] = [
    ("falcon", ("query_key_value", "dense"), {}),
    ("bloom", ("query_key_value", "dense_4h_to_h"), {}),
    ("opt", ("q_proj", "v_proj", "fc1", "fc2"), {}),
    ("qwen3", ("q_proj", "k_proj", "down_proj"), {}),
    ("gptj", ("q_proj", "fc_in", "fc_out"), {}),
    ("cohere", ("q_proj", "up_proj"), {}),
    ("granite", ("o_proj", "gate_proj"), {}),
    ("gemma2", ("q_proj", "down_proj"), {}),
    ("starcoder2", ("c_fc", "c_proj"), {}),
]


def check_family(tmp_path: Path, family: str, suffixes: tuple[str, ...], options: dict[str, Any]) -> None:
    base = write_checkpoint(tmp_path / "base", family)
    given = factors(read_tensors(base), suffixes, rank=4, seed=5, **options)
    adapter = write_adapter(tmp_path / "adapter", given, fan_in_fan_out=bool(options), target_modules=list(suffixes))
    model = merge(base, adapter, tmp_path / "merged", **options)
    lora = lora_request({"it": adapter}, "it")
    with open_llm(base, enable_lora=True) as llm:
        got = answers(llm, [None, lora, lora])
    with open_llm(model) as llm:
        reference = answers(llm, [None, None], PROMPTS[1:])
    with open_llm(base) as llm:
        reference = [*answers(llm, [None]), *reference]
    for a, b in zip(got, reference, strict=True):
        check_same(a, b)


@pytest.mark.parametrize(("family", "suffixes", "options"), FAMILIES, ids=[item[0] for item in FAMILIES])
def test_fused_grouped_and_transposed_layers(
    tmp_path: Path, family: str, suffixes: tuple[str, ...], options: dict[str, Any]
) -> None:
    check_family(tmp_path, family, suffixes, options)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "suffixes", "options"), MORE, ids=[item[0] for item in MORE])
def test_more_families(tmp_path: Path, family: str, suffixes: tuple[str, ...], options: dict[str, Any]) -> None:
    check_family(tmp_path, family, suffixes, options)


@pytest.mark.parametrize("device", ["cpu", pytest.param("reference", marks=pytest.mark.slow)])
def test_an_adapter_may_enlarge_the_vocabulary(world: World, device: str) -> None:
    """Its tokens are generated and read by its own requests; no other request ever sees them."""
    rng, weights = np.random.default_rng(9), plain_tensors()
    tables = {
        name: np.concatenate([weights[name], rng.standard_normal((5, 32)).astype(np.float32) * 3])
        for name in ("model.embed_tokens.weight", "lm_head.weight")
    }
    saved = {f"base_model.model.{name}": table for name, table in tables.items()}
    if "more" not in world.adapters:
        linear = factors(weights, ("q_proj", "lm_head"), rank=4, seed=4)
        linear = {
            name: np.concatenate([value, np.zeros((5, 4), np.float32)]) if "lm_head.lora_B" in name else value
            for name, value in linear.items()
        }
        world.add("more", {**linear, **saved})
    prompts = [PROMPTS[0], {"prompt_token_ids": [3, 161, 5, 164]}, PROMPTS[2]]
    loras = [None, world.request("more"), world.request("few")]
    options = {"enable_lora": True, "max_loras": 2, "lora_extra_vocab_size": 8}
    with open_llm(world.base, device, **options) as llm:
        got = answers(llm, loras, prompts)
        hot = llm.generate(
            [PROMPTS[0]], SamplingParams(temperature=2.0, max_tokens=40, ignore_eos=True, seed=1), use_tqdm=False
        )
    assert max(hot[0].outputs[0].token_ids) < 160
    with open_llm(world.merged("more"), device) as llm:
        reference = answers(llm, [None], prompts[1:])
    own = got[1].outputs[0].token_ids
    assert list(own) == list(reference[0].outputs[0].token_ids)
    assert max(own) >= 160, "the test shows nothing if no new token is generated"
    np.testing.assert_allclose(scores(got[1])[:, :165], scores(reference[0]), atol=1e-4)
    for name, output in ((None, got[0]), ("few", got[2])):
        with open_llm(world.base if name is None else world.merged(name), device) as llm:
            (alone,) = answers(llm, [None], [prompts[0 if name is None else 2]])
        assert list(output.outputs[0].token_ids) == list(alone.outputs[0].token_ids)


def test_over_quantized_weights_an_adapter_changes_what_it_should(world: World) -> None:
    with open_llm(world.base, enable_lora=True, quantization="int8") as llm:
        base, adapted = answers(llm, [None, world.request("few")], [PROMPTS[0], PROMPTS[0]])
    with open_llm(world.merged("few"), quantization="int8-weight-only") as llm:
        (merged,) = answers(llm, [None])
    near = np.abs(scores(adapted)[0] - scores(merged)[0]).mean()
    assert near < 0.1 * np.abs(scores(adapted)[0] - scores(base)[0]).mean()


def test_prompt_logprobs_forks_and_beams_have_the_adapter(world: World) -> None:
    lora = world.request("tables")
    with open_llm(world.base, enable_lora=True) as llm:
        got = answers(llm, [None, lora], prompt_logprobs=2, n=2, temperature=0.9, seed=5)
    with open_llm(world.merged("tables")) as llm:
        reference = answers(llm, [None], PROMPTS[1:], prompt_logprobs=2, n=2, temperature=0.9, seed=5)
    for a, b in zip(got[1].outputs, reference[0].outputs, strict=True):
        assert list(a.token_ids) == list(b.token_ids)
    ours, theirs = got[1].prompt_logprobs, reference[0].prompt_logprobs
    assert ours is not None and theirs is not None
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        assert mine is not None and other is not None and list(mine) == list(other)
        for token in mine:
            assert mine[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)

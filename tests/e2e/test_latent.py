"""A model with a latent cache through the whole engine: whatever becomes of its blocks, it says the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import SamplingParams
from quire.checkpoint.hf_config import load_model_info
from quire.config import EngineConfig
from quire.engine.resolve import resolve_config
from quire.worker.footprint import Footprint
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.engine_driver import EngineDriver, Request, Result, alone

GREEDY = SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True)
RANDOM = SamplingParams(temperature=0.8, logprobs=2, ignore_eos=True)


@pytest.fixture(scope="session")
def tiny_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer DeepSeek-V3, float32, without a tokenizer."""
    return write_checkpoint(tmp_path_factory.mktemp("tiny-deepseek"), "deepseek_v3")


def prompt_of(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 160) for _ in range(length)]


ASKS = {f"{i}": Request(prompt_of(i, 21 + 7 * i), GREEDY, max_tokens=17) for i in range(4)}


@pytest.fixture(scope="module")
def truth(tiny_deepseek: Path) -> dict[str, Result]:
    """What each request says by itself."""
    return alone(tiny_deepseek, ASKS.values())


@pytest.mark.parametrize(
    ("mode", "counter"), [("recompute", "num_preemptions"), ("swap", "num_swapped_out")], ids=["recompute", "swap"]
)
def test_preempted_requests_go_on_as_if_nothing_had_been(
    tiny_deepseek: Path, mode: str, counter: str, truth: dict[str, Result]
) -> None:
    engine = EngineDriver(
        tiny_deepseek, num_gpu_blocks_override=24, preemption_mode=mode, swap_space="16MiB", watermark=0.0
    )
    for name, ask in ASKS.items():
        engine.add(name, ask)
    engine.run()
    assert engine.core.call("stats")[counter] > 0
    assert engine.results == truth
    engine.check_all_free()


def test_a_beginning_that_was_seen_before_is_not_computed_again(tiny_deepseek: Path, truth: dict[str, Result]) -> None:
    engine = EngineDriver(tiny_deepseek)
    told = []
    for name in ("first", "second"):
        engine.add(name, ASKS["3"])
        engine.run()
        told.append(engine.results[name])
    assert (told[0].num_cached, told[1].num_cached) == (0, len(ASKS["3"].prompt) - 1)
    assert told[0] == told[1] == truth["3"]


def test_sequences_of_one_prompt_share_its_blocks_until_they_write(tiny_deepseek: Path) -> None:
    ask = Request(prompt_of(9, 18), RANDOM, max_tokens=9, seeds=(1, 2, 3))  # the last block is half full
    engine = EngineDriver(tiny_deepseek)
    engine.add("0", ask)
    engine.run()
    assert engine.results == alone(tiny_deepseek, [ask])
    assert len({tuple(told.tokens) for told in engine.results.values()}) == 3


def test_what_left_the_device_comes_back_from_disk(
    tiny_deepseek: Path, tmp_path: Path, truth: dict[str, Result]
) -> None:
    engine = EngineDriver(
        tiny_deepseek, num_gpu_blocks_override=18, swap_space=0, kv_disk_space="16MiB", kv_disk_dir=str(tmp_path)
    )
    for name in ("3", "2", "1"):  # each pushes out what the one before left
        engine.add(name, ASKS[name])
        engine.run()
    engine.add("again", ASKS["3"])
    engine.run()
    stats = engine.core.call("stats")
    assert stats["disk_cache_hits"] > 0
    assert engine.results["again"] == truth["3"]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_a_token_costs_one_vector_and_the_plan_says_so(tiny_deepseek: Path, kv_dtype: str) -> None:
    info = load_model_info(tiny_deepseek)
    rank, rope = (info.fields.integer(key) for key in ("kv_lora_rank", "qk_rope_head_dim"))
    size = {"float32": 4, "bfloat16": 2, "float16": 2}[kv_dtype]

    def bytes_per_token(**options: Any) -> float:
        given = EngineConfig.from_kwargs(model=str(tiny_deepseek), kv_cache_dtype=kv_dtype, **options)
        spec = Footprint(resolve_config(given, info), info).spec
        return spec.block_bytes(16, 256) / 16

    latent, heads = bytes_per_token(), bytes_per_token(latent_cache=False)
    print(f"{kv_dtype}: {latent:.0f} bytes per token, {heads:.0f} with the keys and values of all heads")
    assert latent == info.num_hidden_layers * (rank + rope) * size
    key = rope + info.fields.integer("qk_nope_head_dim")
    assert heads == info.num_hidden_layers * 2 * info.num_attention_heads * key * size

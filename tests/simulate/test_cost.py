"""The fit finds what it was made of; models survive their file; steps are read for what they hold."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.config import EngineConfig
from quire.engine.resolve import load_info, resolve_config
from quire.engine_request import EngineRequest
from quire.errors import ConfigError
from quire.sampling_params import SamplingParams
from quire.simulate.contents import StepContents, StepReader, attended, windows_of
from quire.simulate.cost import (
    DEVICE_FEATURES,
    HOST_FEATURES,
    FittedCost,
    RooflineCost,
    load_cost,
    parse_roofline,
    token_weights,
)
from quire.simulate.driver import VirtualClock
from quire.simulate.executor import SimulatedExecutor
from quire.simulate.fit import Measured, fit_device, fit_host, nnls
from quire.step import ContinuingSequenceData, NewSequenceData, SchedulerOutput
from quire.worker.footprint import Footprint


def made_up_cost() -> FittedCost:
    return FittedCost(
        model="none",
        machine="none",
        dtype="float32",
        kv_dtype="float32",
        knots=(1, 8, 64),
        knot_seconds=(1e-3, 1.5e-3, 9e-3),
        device=(1e-5, 2e-5, 1e-8, 3e-8, 5e-5, 1e-8, 1e-3),
        host_base=1e-5,
        host=(2e-6, 1e-5, 1e-8, 1e-8),
        num_shapes=96,
        memory=2**30,
    )


def random_contents(rng: np.random.Generator) -> StepContents:
    tokens = int(rng.choice([1, 8, 64, 20, 128]))
    sequences = int(rng.integers(1, tokens + 1))
    return StepContents(
        num_tokens=tokens,
        num_sequences=sequences,
        num_sampled=int(rng.integers(0, sequences + 1)),
        prefill_pairs=float(rng.integers(0, 100000)),
        decode_context=float(rng.integers(0, 100000)),
        num_new=int(rng.integers(0, sequences + 1)),
        num_new_known_tokens=int(rng.integers(0, 1000)),
        is_new_shape=bool(rng.integers(0, 2)),
    )


def test_nnls_agrees_with_trying_every_set_of_columns():
    rng = np.random.default_rng(0)
    for _ in range(30):
        matrix, target = rng.normal(size=(12, 5)), rng.normal(size=12)
        best = np.inf
        for columns in itertools.chain.from_iterable(itertools.combinations(range(5), k) for k in range(6)):
            part = np.zeros(5)
            if columns:
                part[list(columns)] = np.linalg.lstsq(matrix[:, columns], target, rcond=None)[0]
            if (part >= 0).all():
                best = min(best, float(np.linalg.norm(matrix @ part - target)))
        found = nnls(matrix, target)
        assert (found >= 0).all()
        assert np.linalg.norm(matrix @ found - target) == pytest.approx(best, rel=1e-9)


def test_nnls_gives_nothing_to_a_column_of_zeros():
    assert nnls(np.array([[0.0, 2.0], [0.0, 2.0]]), np.array([1.0, 1.0])) == pytest.approx([0.0, 0.5])


def test_the_fit_finds_the_model_that_the_steps_came_from_in_spite_of_disturbed_ones():
    rng, true = np.random.default_rng(0), made_up_cost()
    steps = []
    for _ in range(400):
        contents = random_contents(rng)
        disturbed = 10.0 if rng.random() < 0.05 else 1.0
        steps.append(Measured(contents, true.device_seconds(contents) * disturbed))
    knots, knot_seconds, rates = fit_device(steps, (1, 8, 64, 4096))
    assert knots == (1, 8, 64)
    found = FittedCost(
        model="", machine="", dtype="", kv_dtype="", knots=knots, knot_seconds=knot_seconds, device=rates,
        host_base=0.0, host=(0.0,) * len(HOST_FEATURES),
    )  # fmt: skip
    for _ in range(50):
        contents = random_contents(rng)
        assert found.device_seconds(contents) == pytest.approx(true.device_seconds(contents), rel=0.02)


def test_the_host_fit_finds_its_model_too():
    rng, true = np.random.default_rng(1), made_up_cost()
    steps = [Measured(contents, true.host_seconds(contents)) for contents in (random_contents(rng) for _ in range(100))]
    base, rates = fit_host(steps)
    assert base == pytest.approx(true.host_base, rel=1e-3)
    assert rates == pytest.approx(true.host, rel=1e-3)


def test_times_between_knots_lie_on_a_line_and_grow_in_proportion_beyond():
    assert token_weights(8, (1, 8, 64)) == [0.0, 1.0, 0.0]
    assert token_weights(36, (1, 8, 64)) == [0.0, 0.5, 0.5]
    assert token_weights(128, (1, 8, 64)) == [0.0, 0.0, 2.0]
    assert token_weights(1, (8, 64)) == [1.0, 0.0]


def test_a_cost_model_survives_its_file(tmp_path):
    (tmp_path / "cost.json").write_text(json.dumps(msgspec.to_builtins(made_up_cost())))
    assert load_cost(tmp_path / "cost.json") == made_up_cost()


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"knots": [1, 8]},
        {"knots": [8, 1, 64]},
        {"knot_seconds": [0, 0, 0]},
        {"device": [1.0]},
        {"host_base": -1},
        {"host_base": "x"},
        {"unknown": 1},
    ],
    ids=str,
)
def test_a_damaged_file_is_refused(tmp_path, change):
    path = tmp_path / "cost.json"
    path.write_text(json.dumps(msgspec.to_builtins(made_up_cost()) | change))
    with pytest.raises(ConfigError) as caught:
        load_cost(path)
    assert caught.value.param == "cost_model" and str(path) in str(caught.value)


@pytest.mark.parametrize(("start", "count", "window"), [(0, 5, 3), (10, 4, 3), (2, 6, 5), (0, 4, 100), (7, 1, 4)])
def test_attention_counts_what_each_query_sees(start, count, window):
    windows = windows_of([None, window, window, None])
    assert windows == ((window, 0.5),)
    seen = [position + 1 for position in range(start, start + count)]
    assert attended(start, count) == sum(seen)
    assert attended(start, count, windows) == sum(0.5 * keys + 0.5 * min(keys, window) for keys in seen)


def step_of(new=(), continuing=(), scheduled=None, finished=()) -> SchedulerOutput:
    scheduled = scheduled or {}
    return SchedulerOutput(list(new), list(continuing), scheduled, sum(scheduled.values()), list(finished), [])


def new_sequence(name: str, num_tokens: int, num_computed: int = 0) -> NewSequenceData:
    return NewSequenceData(name, EngineRequest(name, [0] * num_tokens, SamplingParams()), [[0]], num_computed)


def test_the_reader_samples_at_the_end_of_what_is_known():
    reader = StepReader(num_shapes=2, first_token=100)
    contents, sampled = reader.read(step_of([new_sequence("a", 5), new_sequence("b", 9, 4)], (), {"a": 3, "b": 5}))
    assert sampled == {"b": [101]}
    assert (contents.num_tokens, contents.num_sequences, contents.num_sampled, contents.num_new) == (8, 2, 1, 2)
    assert contents.prefill_pairs == (1 + 2 + 3) + (5 + 6 + 7 + 8 + 9)
    going = [ContinuingSequenceData("a", [], 3), ContinuingSequenceData("b", [], 9)]
    contents, sampled = reader.read(step_of((), going, {"a": 2, "b": 1}))
    assert sampled == {"a": [100], "b": [101]}
    assert (contents.prefill_pairs, contents.decode_context, contents.num_new) == (4 + 5, 10, 0)


def test_a_shape_is_new_until_seen_and_again_when_forgotten():
    reader = StepReader(num_shapes=2)
    reader.read(step_of([new_sequence("a", 100)], (), {"a": 1}))
    found = []
    computed = 1
    for count in (1, 2, 1, 3, 2):
        contents, _ = reader.read(step_of((), [ContinuingSequenceData("a", [], computed)], {"a": count}))
        computed += count
        found.append(contents.is_new_shape)
    assert found == [False, True, False, True, True]


def roofline_of(text: str, **options: Any) -> tuple[RooflineCost, int]:
    config = EngineConfig.from_kwargs(**options)
    info = load_info(config)
    return parse_roofline(text, resolve_config(config, info), info)


def test_a_roofline_reads_weights_once_a_step_and_computes_per_token():
    text = "roofline:bandwidth=10,gflops=100,memory=1,params=0.1,host=0,overhead=5"
    cost, memory = roofline_of(text)
    weights = 0.1e9 * 2
    assert memory == 2**30 - weights
    one = cost.seconds(StepContents(num_tokens=1, num_sequences=1))
    assert one == pytest.approx(weights / 10e9 + 5e-6)
    assert cost.seconds(StepContents(num_tokens=2, num_sequences=1)) == one
    many = cost.seconds(StepContents(num_tokens=1000, num_sequences=1))
    assert many == pytest.approx(1000 * cost.work.token.flops / 100e9 + 5e-6)
    read = StepContents(num_tokens=1, num_sequences=1, decode_context=1000)
    assert cost.seconds(read) - one == pytest.approx(1000 * cost.token_kv_bytes / 10e9)
    moved = StepContents(num_moved_blocks=2, num_disk_blocks=1)
    assert cost.seconds(moved) == pytest.approx(cost.block_bytes * (2 / 25e9 + 1 / 2e9))


@pytest.mark.parametrize(
    "text",
    [
        "roofline:",
        "roofline:bandwidth=1,gflops=1",
        "roofline:bandwidth=0,gflops=1,memory=1",
        "roofline:speed=3",
        "roofline:bandwidth=1,gflops=1,memory=1,params=70",
        "roofline:bandwidth=1,gflops=1,memory=x",
    ],
)
def test_a_bad_roofline_is_refused(text):
    with pytest.raises(ConfigError) as caught:
        roofline_of(text)
    assert caught.value.param == "cost_model"


def test_there_is_a_rate_for_every_feature():
    assert len(made_up_cost().device) == len(DEVICE_FEATURES)
    assert len(made_up_cost().host) == len(HOST_FEATURES)


# ---- what the model itself does, of shapes without weights ----

PLAIN = {
    "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "eos_token_id": 2, "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
MIXTRAL = PLAIN | {
    "architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2, "head_dim": 16,
}  # fmt: skip
LATENT = PLAIN | {
    "architectures": ["DeepseekV3ForCausalLM"], "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 4, "v_head_dim": 16, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.0,
}  # fmt: skip
HYBRID = PLAIN | {
    "architectures": ["Qwen3NextForCausalLM"], "head_dim": 16, "num_experts": 0, "mlp_only_layers": [0, 1, 2],
    "layer_types": ["linear_attention", "full_attention", "linear_attention"], "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
    "num_experts_per_tok": 1, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
RATES = "roofline:bandwidth=1,gflops=1e9,memory=1,host=0"  # nothing but bytes takes time
ARITHMETIC = "roofline:bandwidth=1e9,gflops=1,memory=1,host=0"


@pytest.fixture
def shapes(tmp_path: Path) -> Callable[[dict[str, Any]], str]:
    """Write a config.json and return its folder."""

    def write(config: dict[str, Any]) -> str:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return write


def nanoseconds(cost: RooflineCost, **contents: float) -> float:
    """Return bytes at 1 GB/s, or operations at 1 GFLOP/s, of a step."""
    return cost.seconds(StepContents(**{"num_sequences": 1} | contents)) * 1e9


def test_of_experts_those_are_read_that_a_step_is_expected_to_touch(shapes):
    model = shapes(MIXTRAL)
    cost, _ = roofline_of(RATES, model=model, dtype="float32", simd_level="generic")
    per_layer = 3 * 64 * 96 * 8 * 4
    dense = 4 * (512 * 64 + 7 * 64 + 3 * (64 * (64 + 32 + 32 + 64) + 64 * 32))  # routers have rows for 32
    for tokens in (1, 7, 1000):
        share = 1 - (1 - 2 / 8) ** tokens
        read = nanoseconds(cost, num_tokens=tokens, num_sampled=tokens)
        assert read == pytest.approx(dense + 3 * per_layer * share)
    # Without a wanted row, neither the head nor what follows the last attention is read.
    assert nanoseconds(cost, num_tokens=1) < nanoseconds(cost, num_tokens=1, num_sampled=1) - 4 * 512 * 64
    cost, _ = roofline_of(ARITHMETIC, model=model, dtype="float32")
    active = 3 * (64 * (64 + 32 + 32 + 64) + 8 * 64 + 2 * 3 * 64 * 96) + 512 * 64
    assert nanoseconds(cost, num_tokens=5, num_sampled=5) == pytest.approx(5 * 2 * active, rel=1e-3)


def test_latent_attention_reads_one_vector_a_token_and_compares_in_its_space(shapes):
    model = shapes(LATENT)
    options = {"model": model, "dtype": "float32", "kv_cache_dtype": "float32"}
    cost, _ = roofline_of(RATES, **options)
    heads, _ = roofline_of(RATES, **options, latent_cache=False)
    assert (cost.token_kv_bytes, heads.token_kv_bytes) == (3 * (32 + 4) * 4, 3 * 2 * 4 * 16 * 4)
    assert (cost.work.pair_flops, heads.work.pair_flops) == (3 * 4 * 2 * (36 + 32), 3 * 4 * 2 * (16 + 16))
    assert cost.block_bytes == 16 * cost.token_kv_bytes


def test_states_take_memory_and_are_read_and_written_for_each_sequence(shapes):
    model = shapes(HYBRID)
    state = 2 * 4 * (4 * 16 * 16 + 3 * (2 * 32 + 64))
    few, much = roofline_of(RATES, model=model, dtype="float32", max_num_seqs=4)
    _, little = roofline_of(RATES, model=model, dtype="float32", max_num_seqs=64)
    assert (few.state_bytes, much - little) == (state, 60 * state)
    assert few.token_kv_bytes == 2 * 2 * 16 * {"float32": 4, "bfloat16": 2}["float32"]
    one, three = (nanoseconds(few, num_tokens=3, num_sequences=number) for number in (1, 3))
    assert three - one == pytest.approx(2 * 2 * state)


def test_sliding_windows_and_quantized_weights_are_counted_as_they_are_held(shapes):
    gemma = PLAIN | {"architectures": ["Gemma2ForCausalLM"], "head_dim": 16, "sliding_window": 32}
    model = shapes(gemma | {"query_pre_attn_scalar": 16, "hidden_activation": "gelu_pytorch_tanh"})
    config = EngineConfig.from_kwargs(model=model, max_num_seqs=4)
    info = load_info(config)
    executor = SimulatedExecutor(
        Footprint(resolve_config(config, info), info).spec, made_up_cost(), VirtualClock(), 2**30
    )
    assert [layer.sliding_window for layer in executor.kv_cache_spec().layers] == [32, None, 32]
    wide, left = roofline_of(RATES, model=model, dtype="float32")
    narrow, more = roofline_of(RATES, model=model, dtype="float32", quantization="int8")
    assert more > left
    saved = nanoseconds(wide, num_tokens=1, num_sampled=1) - nanoseconds(narrow, num_tokens=1, num_sampled=1)
    assert 0 < saved <= more - left + 1e-6  # the tied table is read by the head


def test_a_model_of_transformers_reads_all_of_its_weights(shapes):
    model = shapes(PLAIN | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"})
    cost, left = roofline_of(RATES, model=model, dtype="float32", model_impl="transformers")
    own, left_of_own = roofline_of(RATES, model=model, dtype="float32")
    assert left == left_of_own
    table = 512 * 64
    assert cost.work.token.num_bytes == own.work.token.num_bytes + own.work.sample.num_bytes + 4 * table
    assert cost.work.token.flops == own.work.token.flops + own.work.sample.flops + 2 * table
    assert (cost.work.pair_flops, cost.token_kv_bytes) == (own.work.pair_flops, own.token_kv_bytes)

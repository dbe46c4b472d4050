"""config.json and generation_config.json become a ModelInfo with the meaning their authors gave them."""

from __future__ import annotations

import copy
import json
import logging
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.checkpoint.families import FAMILIES
from quire.checkpoint.hf_config import ModelInfo, load_model_info
from quire.config import EngineConfig
from quire.engine.resolve import load_info, resolve_config
from quire.errors import ConfigError, ModelError
from quire.models.registry import options_of
from quire.worker.footprint import Footprint
from tests.helpers.checkpoints import FAMILIES as SHAPES
from tests.helpers.checkpoints import PLAIN_CONFIG

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

ROPE_KEYS = {"rope_type", "type", "factor", "rope_theta", "short_factor", "full_attention", "low_freq_factor"}
CONFIG_KEYS = sorted(
    {
        *PLAIN_CONFIG,
        *ROPE_KEYS,
        *("rope_scaling", "rope_parameters", "sliding_window", "layer_types", "max_window_layers", "dtype"),
        *("torch_dtype", "quantization_config", "auto_map", "head_dim", "num_key_value_heads", "n_inner", "ffn_dim"),
        *("original_max_position_embeddings", "partial_rotary_factor", "tie_word_embeddings", "hidden_act"),
        *("rotary_pct", "rotary_dim", "rotary_emb_base", "n_embed", "expansion_ratio", "num_kv_heads", "alibi"),
        *("multi_query", "new_decoder_architecture", "ffn_hidden_size"),
    }
)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """Return a function that reads PLAIN_CONFIG with changes, and a generation_config.json if given."""

    def function(
        generation: dict[str, Any] | None = None, overrides: dict[str, Any] | None = None, **config: Any
    ) -> ModelInfo:
        (tmp_path / "config.json").write_text(json.dumps({**PLAIN_CONFIG, **config}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_info(tmp_path, overrides)

    return function


def test_every_supported_architecture_has_options() -> None:
    assert all(callable(options_of(architecture)) for architecture in FAMILIES)


def test_sizes_of_a_llama(read: Any) -> None:
    info = read(num_key_value_heads=2, head_dim=16)
    assert (info.architecture, info.model_type) == ("LlamaForCausalLM", "llama")
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == (4, 2, 16)
    assert (info.vocab_size, info.hidden_size, info.intermediate_size, info.num_hidden_layers) == (160, 32, 48, 2)
    assert (info.max_position_embeddings, info.max_model_len, info.longest_model_len) == (256, 256, 256)
    assert info.layer_windows == (None, None)


def test_what_a_llama_config_may_leave_out(read: Any) -> None:
    info = read()
    assert (info.num_key_value_heads, info.head_dim) == (4, 8)
    assert (info.norm_eps, info.hidden_act, info.tie_word_embeddings, info.dtype) == (1e-6, "silu", False, "float32")
    assert (info.rope.rope_type, info.rope.theta) == ("default", 10000.0)


def test_gpt2_names_its_sizes_differently(read: Any) -> None:
    shape = {"n_embd": 24, "n_layer": 3, "n_head": 2, "n_positions": 64, "vocab_size": 99}
    info = read(architectures=["GPT2LMHeadModel"], **shape)
    assert (info.hidden_size, info.num_hidden_layers, info.num_attention_heads, info.head_dim) == (24, 3, 2, 12)
    assert (info.max_model_len, info.rope, info.intermediate_size) == (64, None, 96)
    assert (info.tie_word_embeddings, info.hidden_act, info.norm_eps) == (True, "gelu_new", 1e-5)


def test_opt_ties_its_embeddings_unless_told_otherwise(read: Any) -> None:
    assert read(architectures=["OPTForCausalLM"], ffn_dim=64).tie_word_embeddings
    assert not read(architectures=["OPTForCausalLM"], ffn_dim=64, tie_word_embeddings=False).tie_word_embeddings


def test_model_type_decides_without_architectures(read: Any) -> None:
    assert read(architectures=None, model_type="qwen3").architecture == "Qwen3ForCausalLM"


def test_the_first_known_architecture_is_taken(read: Any) -> None:
    assert read(architectures=["Newer", "Qwen2ForCausalLM"]).architecture == "Qwen2ForCausalLM"


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"architectures": ["MistralForCausalLM"]}, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": None}, (None, None)),
        ({"architectures": ["MistralForCausalLM"], "sliding_window": 7}, (7, 7)),
        ({"architectures": ["LlamaForCausalLM"], "sliding_window": 7}, (None, None)),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 7}, (None, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            (None, 7),
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            (7, None),
        ),
        ({"architectures": ["SmolLM3ForCausalLM"], "sliding_window": 7}, (None, None)),
        (
            {
                "architectures": ["SmolLM3ForCausalLM"],
                "sliding_window": 7,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            (None, 7),
        ),
    ],
)
def test_sliding_windows(read: Any, config: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read(num_key_value_heads=2, **config).layer_windows == windows


def test_smollm3_names_the_layers_of_its_window(read: Any) -> None:
    with pytest.raises(ModelError, match=r"layer_types is missing \(expected a list of num_hidden_layers, 2, names"):
        read(architectures=["SmolLM3ForCausalLM"], num_key_value_heads=2, sliding_window=7, use_sliding_window=True)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (
            {"layer_types": ["full_attention"]},
            'layer_types is ["full_attention"] (expected a list of num_hidden_layers, 2',
        ),
        ({"layer_types": ["full_attention", "linear"]}, "(expected names among full_attention, sliding_attention)"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window is missing (expected a window"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0 (expected an integer from 1"),
    ],
)
def test_windows_that_make_no_sense(read: Any, config: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(architectures=["Qwen2ForCausalLM"], **{"sliding_window": None, **config})
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("rope", "default", "longest"),
    [
        ({}, 256, 256),
        ({"rope_type": "linear", "factor": 4}, 1024, 1024),
        ({"rope_type": "dynamic", "factor": 2.0}, 256, 512),
        (YARN, 128, 128),
        ({"rope_type": "yarn", "factor": 2.0}, 512, 512),
        (
            {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1,
                "high_freq_factor": 4,
                "original_max_position_embeddings": 32,
            },
            256,
            256,
        ),
        (
            {
                "rope_type": "longrope",
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
                "original_max_position_embeddings": 64,
            },
            64,
            256,
        ),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_context_length_follows_the_rope(read: Any, key: str, rope: dict[str, Any], default: int, longest: int) -> None:
    info = read(**{key: rope})
    assert (info.max_model_len, info.longest_model_len) == (default, longest)


def test_old_and_new_rope_keys_mean_the_same(read: Any) -> None:
    old = read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0}).rope
    new = read(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5}).rope
    both = read(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_theta": 5e5}).rope
    assert old == new == both
    assert (old.theta, old.factor, old.rotary_dim) == (5e5, 2.0, 8)


def test_original_context_beside_the_rope_object_wins(read: Any) -> None:
    rope = {"rope_type": "su", "short_factor": [1] * 4, "long_factor": [2] * 4, "original_max_position_embeddings": 9}
    info = read(rope_scaling=rope, original_max_position_embeddings=64)
    assert info.rope.rope_type == "longrope"
    assert (info.rope.original_max_position_embeddings, info.rope.factor) == (64, 4.0)


def test_layers_of_each_type_rotate_as_the_file_says(read: Any) -> None:
    info = read(
        architectures=["Qwen3ForCausalLM"],
        head_dim=16,
        use_sliding_window=True,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={"sliding_attention": {"rope_theta": 100.0}, "full_attention": {**YARN, "rope_theta": 5e5}},
    )
    assert [(rope.rope_type, rope.theta) for rope in info.layer_ropes] == [("default", 100.0), ("yarn", 5e5)]
    assert info.rope == info.layer_ropes[1]
    assert info.max_model_len == min(rope.default_max_len for rope in info.layer_ropes) == 128


def test_rope_given_per_layer_type_must_agree(read: Any) -> None:
    same = {"full_attention": YARN, "sliding_attention": YARN}
    assert read(rope_parameters=same).rope.rope_type == "yarn"
    with pytest.raises(ModelError, match="rope_parameters differs by layer type"):
        read(rope_parameters={**same, "sliding_attention": {"rope_type": "default"}})


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        ({"rope_type": "banana"}, "rope_scaling.rope_type 'banana' is not supported (supported: default, linear"),
        ({"rope_type": 3}, "rope_scaling.rope_type is 3 (expected a string)"),
        ({"rope_type": "linear"}, "rope_scaling.factor is missing (expected a number above 0)"),
        ({"rope_type": "linear", "factor": -2}, "rope_scaling.factor is -2 (expected a number above 0)"),
        ({"rope_type": "yarn", "factor": 1e999}, "rope_scaling.factor is inf"),
        ({"rope_type": "yarn", "factor": 2.0, "beta_fast": -0.5}, "rope_scaling.beta_fast is -0.5 (expected a number"),
        ({"rope_type": "yarn", "factor": 2.0, "mscale": 1e300}, "rope_scaling.mscale is 1e+300 (expected a number up"),
        ({"rope_type": "linear", "factor": 1e30}, "rope_scaling.factor is 1e+30 (expected a stretch to a context of 1"),
        ({"rope_type": "yarn", "factor": 1e-3}, "rope_scaling.factor is 0.001 (expected a stretch to a context of 1"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling.low_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4 (expected more than low_freq_factor, 4)",
        ),
        ({"rope_type": "longrope"}, "rope_scaling.short_factor is missing (expected a list of 4 numbers)"),
        (
            {"rope_type": "longrope", "short_factor": [1, 1, 0, 1], "long_factor": [1] * 4},
            "rope_scaling.short_factor.2 is 0 (expected a number above 0)",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5 (expected 1.0"),
        ("linear", "rope_scaling is 'linear' (expected an object)"),
    ],
)
def test_rope_that_makes_no_sense(read: Any, rope: object, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(rope_scaling=rope)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("config", "rotary_dim"),
    [
        ({}, 8),
        ({"partial_rotary_factor": 0.75}, 6),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, 4),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}, "rope_scaling": {"rope_type": "default"}}, 4),
    ],
)
def test_the_rotated_part_of_a_head(read: Any, config: dict[str, Any], rotary_dim: int) -> None:
    assert read(architectures=["Phi3ForCausalLM"], **config).rope.rotary_dim == rotary_dim


def test_gpt_neox_names_its_rotation_differently(read: Any) -> None:
    neox = {"architectures": ["GPTNeoXForCausalLM"], "hidden_size": 64}
    assert (read(**neox).rope.rotary_dim, read(**neox).rope.theta) == (4, 10000.0)
    old = read(**neox, rotary_pct=0.5, rotary_emb_base=2e4)
    new = read(**neox, rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 2e4})
    assert (old.rope.rotary_dim, old.rope.theta) == (new.rope.rotary_dim, new.rope.theta) == (8, 20000.0)


def test_gptj_says_how_many_values_it_rotates(read: Any) -> None:
    gptj = {"architectures": ["GPTJForCausalLM"], "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    assert read(**gptj, rotary_dim=4).rope.rotary_dim == 4
    with pytest.raises(ModelError, match=r"rotary_dim is 64 \(expected an integer from 2 to 8\)"):
        read(**gptj, rotary_dim=64)


def test_bloom_has_two_names_for_its_sizes(read: Any) -> None:
    sizes = {"n_embed": 48, "num_attention_heads": 6, "num_hidden_layers": 3, "seq_length": 64}
    info = read(architectures=["BloomForCausalLM"], **sizes)
    assert (info.hidden_size, info.num_attention_heads, info.num_hidden_layers) == (48, 6, 3)
    assert (info.intermediate_size, info.max_model_len, info.rope) == (192, 64, None)


def test_mpt_gives_its_width_as_a_multiple(read: Any) -> None:
    mpt = {"architectures": ["MptForCausalLM"], "d_model": 32, "n_layers": 2, "n_heads": 4}
    assert (read(**mpt).intermediate_size, read(**mpt, expansion_ratio=3).intermediate_size) == (128, 96)
    with pytest.raises(ModelError, match=r"expansion_ratio is 2.5 \(expected an integer"):
        read(**mpt, expansion_ratio=2.5)


@pytest.mark.parametrize(
    ("config", "kv_heads"),
    [
        ({}, 1),
        ({"multi_query": False}, 4),
        ({"num_kv_heads": 2}, 1),
        ({"num_kv_heads": 2, "new_decoder_architecture": True}, 2),
        ({"new_decoder_architecture": True}, 4),
    ],
)
def test_kv_heads_of_falcon(read: Any, config: dict[str, Any], kv_heads: int) -> None:
    info = read(architectures=["FalconForCausalLM"], num_key_value_heads=None, **config)
    assert (info.num_key_value_heads, info.intermediate_size, info.rope.rotary_dim) == (kv_heads, 128, 8)


def test_falcon_with_alibi_does_not_rotate(read: Any) -> None:
    assert read(architectures=["FalconForCausalLM"], alibi=True).rope is None
    with pytest.raises(ModelError, match=r"num_kv_heads is 3 \(expected a divisor of num_attention_heads, 4\)"):
        read(architectures=["FalconForCausalLM"], num_kv_heads=3, new_decoder_architecture=True)


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (1.5, "partial_rotary_factor is 1.5 (expected a share of each head, above 0 and up to 1)"),
        (0.4, "the rotated part of a head, set by partial_rotary_factor, is 3 (expected an even number from 2"),
        (True, "partial_rotary_factor is true (expected a number above 0)"),
    ],
)
def test_a_part_that_no_head_has(read: Any, share: object, words: str) -> None:
    with pytest.raises(ModelError) as caught:
        read(architectures=["Phi3ForCausalLM"], partial_rotary_factor=share)
    assert words in caught.value.message


def test_overrides_are_merged_key_by_key(read: Any) -> None:
    config = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "attention_bias": True}
    info = read(overrides={"rope_parameters": YARN, "vocab_size": 200, "attention_bias": None}, **config)
    assert (info.rope.rope_type, info.rope.theta, info.vocab_size) == ("yarn", 5e5, 200)
    assert "attention_bias" not in info.raw


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "torch.float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
    ],
)
def test_dtype(read: Any, config: dict[str, Any], dtype: str) -> None:
    assert read(**config).dtype == dtype


def test_end_ids_come_from_both_files(read: Any) -> None:
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read(eos_token_id=[7, 8]).eos_token_ids == (7, 8)
    assert read(eos_token_id=7, generation={"eos_token_id": [9, 7]}).eos_token_ids == (9, 7)
    assert read(eos_token_id=None, generation={}).eos_token_ids == ()


def test_ids_outside_the_vocabulary_are_none(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        info = read(eos_token_id=[5, 50256], bos_token_id=-1)
    assert (info.eos_token_ids, info.bos_token_id) == ((5,), None)
    assert "eos_token_id [50256] lies outside the vocabulary of 160" in caplog.text
    assert "bos_token_id" not in caplog.text


def test_an_id_of_the_generation_config_hides_that_of_the_config(read: Any, caplog: pytest.LogCaptureFixture) -> None:
    for hidden in (None, "<s>", 50256):
        assert read(bos_token_id=hidden, generation={"bos_token_id": 3}).bos_token_id == 3
    assert "bos_token_id" not in caplog.text


def test_sampling_defaults(read: Any) -> None:
    generation = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "do_sample": True,
        "max_new_tokens": 64,
        "min_p": None,
    }
    assert read(generation=generation).sampling_defaults == {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "max_tokens": 64,
    }


def test_a_sampling_default_that_is_no_number(read: Any) -> None:
    with pytest.raises(ModelError, match=r"generation_config\.json: top_p is 'high' \(expected a number\)"):
        read(generation={"top_p": "high"})


def test_family_options_are_read_with_their_type(read: Any) -> None:
    fields = read(mlp_bias=True, n_ctx=3).fields
    assert fields.flag("mlp_bias") is True
    assert fields.flag("absent", False) is False
    assert fields.integer("n_ctx") == 3
    with pytest.raises(ModelError, match=r"config\.json: n_ctx is 3 \(expected true or false\)"):
        fields.flag("n_ctx")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("sliding_attention"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(sorted(ROPE_KEYS)), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(architecture=st.sampled_from(sorted(FAMILIES)), key=st.sampled_from(CONFIG_KEYS), value=JSON, use=st.booleans())
def test_any_value_is_understood_or_refused(
    architecture: str, key: str, value: Any, use: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    config = {**PLAIN_CONFIG, "architectures": [architecture], "ffn_dim": 48, "use_sliding_window": use, key: value}
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4}
    mpt = {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}
    (folder / "config.json").write_text(json.dumps({**gpt2, **mpt, **config}))
    try:
        assert load_model_info(folder).max_model_len >= 1
    except ModelError as error:
        assert "\n" not in error.message


def test_every_size_of_every_kind_is_understood_or_refused(tmp_path: Path) -> None:
    """From a config that is good, through the shapes of all weights, one value at a time."""
    check_sizes(tmp_path, ("gpt_oss", "deepseek_v3", "qwen3_5_moe", "lfm2", "gemma2"), (-1, 3, "x"))


@pytest.mark.slow
def test_any_size_of_any_family_is_understood_or_refused(tmp_path: Path) -> None:
    values = (None, True, 0, 1, 7, 2**31 - 1, 10**400, -0.5, 1e300, math.nan, math.inf, [], [1], ["x"], {}, {"a": 1})
    check_sizes(tmp_path, tuple(SHAPES), (-1, 3, 0.5, "x", [None], *values))


def check_sizes(folder: Path, model_types: tuple[str, ...], values: tuple[Any, ...]) -> None:
    """Replace each value of the tiny config of each of these by all of `values`, and plan the model's memory."""
    for model_type in model_types:
        architecture = next(name for name, row in FAMILIES.items() if row.model_type == model_type)
        good = {"architectures": [architecture], "model_type": model_type, **SHAPES[model_type]}
        plan_memory(folder, good)
        paths = [(key,) for key in good if key not in ("architectures", "vision_config")]
        paths += [(outer, key) for outer in ("rope_parameters", "text_config") for key in good.get(outer, ())]
        for path in paths:
            for value in values:
                bad = copy.deepcopy(good)
                (bad if len(path) == 1 else bad[path[0]])[path[-1]] = value
                try:
                    plan_memory(folder, bad)
                except (ModelError, ConfigError) as error:
                    assert "\n" not in error.message, (path, value)


def plan_memory(folder: Path, config: dict[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    requested = EngineConfig.from_kwargs(model=str(folder), max_num_batched_tokens=64, max_num_seqs=2)
    info = load_info(requested)
    Footprint(resolve_config(requested, info), info)

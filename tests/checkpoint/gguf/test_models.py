"""Models from GGUF files compute what transformers computes of the same weights, whatever they are stored in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.open import open_weights
from quire.checkpoint.tensor import HostTensor
from quire.errors import ModelError
from quire.kernels.cpu.linear_int import IntLinear
from tests.helpers.checkpoints import oracle_logits, write_checkpoint
from tests.helpers.gguf_files import ARCHITECTURES, finish, write_gguf
from tests.parity.harness import BACKENDS, assert_close, driver, tokens

gguf = pytest.importorskip("gguf")
# What ggml has in its code, so that converters write nothing of it -> config, and metadata
FIXED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen3_moe": ({"norm_topk_prob": True}, {}),
    "gemma2": ({"query_pre_attn_scalar": 12}, {}),
    "gemma3_text": ({"query_pre_attn_scalar": 12}, {"gemma3.attention.sliding_window_pattern": 2}),
    "smollm3": ({"num_hidden_layers": 4, "no_rope_layer_interval": 4}, {}),
}
WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # for blocks of 256
QUICK_FAMILIES = ("llama", "mixtral", "gemma2", "gpt2", "gpt_neox", "phi3")
PROMPT = tokens(20)


@pytest.mark.parametrize(
    "family", [pytest.param(f, marks=() if f in QUICK_FAMILIES else (pytest.mark.slow,)) for f in ARCHITECTURES]
)
def test_every_architecture(tmp_path: Path, family: str) -> None:
    config, extra = FIXED.get(family, ({}, {}))
    write_checkpoint(tmp_path, family, seed=2, **config)
    write_gguf(tmp_path, tmp_path / "m.gguf", extra=extra)
    assert_close(driver(tmp_path / "m.gguf", "cpu").step({"a": PROMPT})["a"], oracle_logits(tmp_path, PROMPT))


def quantized_model(folder: Path, family: str, kind: str, **config: Any) -> Path:
    """Write a model twice: into a GGUF file, and as transformers' folder of the weights that the file stands for."""
    from safetensors.numpy import save_file

    write_checkpoint(folder, family, seed=3, **config)
    back = write_gguf(folder, folder / "m.gguf", kind)
    same = {name: np.ascontiguousarray(value) for name, value in back.items()}
    save_file(same, folder / "model.safetensors", metadata={"format": "pt"})
    return folder / "m.gguf"


@pytest.mark.parametrize("device", BACKENDS)
@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q8_0"),
        ("llama", "Q4_0"),
        ("llama", "Q4_K"),
        ("llama", "Q6_K"),
        *(
            pytest.param(family, kind, marks=pytest.mark.slow)
            for family, kind in (
                ("llama", "F16"),
                ("llama", "BF16"),
                ("llama", "Q4_1"),
                ("llama", "Q5_0"),
                ("llama", "Q5_1"),
                ("llama", "Q5_K"),
                ("llama", "Q2_K"),
                ("llama", "Q3_K"),
                ("gpt2", "Q8_0"),
                ("gpt_neox", "Q4_0"),
                ("phi3", "Q4_1"),
                ("mixtral", "Q8_0"),
                ("qwen2_moe", "Q4_0"),
            )
        ),
    ],
)
def test_quantized_weights(tmp_path: Path, family: str, kind: str, device: str) -> None:
    config: dict[str, Any] = {}
    if kind.endswith("_K"):
        config = WIDE
    elif family not in ("gpt2", "qwen2_moe"):
        config = {"intermediate_size": 64}
    if family == "qwen2_moe":
        config = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}
    path = quantized_model(tmp_path, family, kind, **config)
    assert_close(driver(path, device).step({"a": PROMPT})["a"], oracle_logits(tmp_path, PROMPT))


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_1", "Q4_K", "Q6_K"])
def test_weights_stay_quantized(tmp_path: Path, kind: str) -> None:
    """In bfloat16, products take the integers as they are, and round their inputs to eight bits."""
    path = quantized_model(tmp_path, "llama", kind, **(WIDE if kind.endswith("_K") else {"intermediate_size": 64}))
    model = driver(path, "cpu", "bfloat16")
    assert isinstance(model.model.layers[0].mixer.o_proj.weight, IntLinear)  # type: ignore[attr-defined]
    assert_close(model.step({"a": PROMPT})["a"], oracle_logits(tmp_path, PROMPT), 0.1)


def test_mixed_types_keep_their_bits(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", **WIDE)
    kinds = {"attn_v": "Q6_K", "token_embd": "Q8_0", "ffn_down": "F16"}

    def choose(name: str, values: np.ndarray) -> str:
        return next((kind for part, kind in kinds.items() if part in name), "Q4_K")

    write_gguf(tmp_path, tmp_path / "m.gguf", choose)
    info = load_model_info(tmp_path / "m.gguf")
    tensors = open_weights(info).tensors
    assert info.dtype == "bfloat16"
    layouts = {name.split(".")[-2]: stored.layout for name, stored in tensors.items()}
    query, value = layouts["q_proj"], layouts["v_proj"]
    assert query is not None and value is not None and layouts["down_proj"] is None
    assert [(layout.bits, layout.group) for layout in (query, value)] == [(4, 32), (8, 16)]
    assert isinstance(tensors["model.layers.0.mlp.down_proj.weight"].read(), HostTensor)


def test_scaled_rotary_embeddings_of_llama_3(tmp_path: Path) -> None:
    """The factors of each pair's speed stand in a tensor, whatever formula they were made by."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    write_checkpoint(tmp_path, "llama", rope_parameters=rope)
    from transformers import AutoConfig

    slow, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path), torch.device("cpu"))
    plain = 10000.0 ** -(np.arange(0, 8, 2) / 8)
    added = gguf.GGUFWriter.write_header_to_file

    def with_factors(writer: Any, *args: Any, **options: Any) -> None:
        writer.add_tensor("rope_freqs.weight", (plain / slow.numpy()).astype(np.float32))
        added(writer, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", with_factors)
        write_gguf(tmp_path, tmp_path / "m.gguf")
    prompt = tokens(90)
    assert_close(driver(tmp_path / "m.gguf", "cpu").step({"a": prompt})["a"], oracle_logits(tmp_path, prompt), 3e-5)


def test_a_model_in_several_files(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama")
    path = tmp_path / "m-00001-of-00003.gguf"
    original = gguf.GGUFWriter

    def split(file: Path, architecture: str) -> Any:
        return original(tmp_path / "m.gguf", architecture, split_max_tensors=9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFWriter", split)
        write_gguf(tmp_path, path)
    assert path.exists()
    assert_close(driver(path, "cpu").step({"a": PROMPT})["a"], oracle_logits(tmp_path, PROMPT))
    second = tmp_path / "m-00002-of-00003.gguf"
    with pytest.raises(ModelError, match=r"general.architecture None is not supported|is not the first of 3 files"):
        open_weights(load_model_info(second))


def test_what_the_metadata_says_becomes_the_config(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "qwen3")
    extra = {f"tokenizer.ggml.{name}_token_id": number for name, number in (("bos", 5), ("eos", 6), ("eot", 7))}
    write_gguf(tmp_path, tmp_path / "m.gguf", "F16", {**extra, "tokenizer.ggml.padding_token_id": 8})
    info, original = load_model_info(tmp_path / "m.gguf"), load_model_info(tmp_path)
    same = ("architecture", "vocab_size", "hidden_size", "num_key_value_heads", "head_dim", "intermediate_size")
    same += ("max_model_len", "rope", "norm_eps", "hidden_act", "tie_word_embeddings", "layer_windows")
    assert {name: getattr(info, name) for name in same} == {name: getattr(original, name) for name in same}
    assert (info.bos_token_id, info.eos_token_ids, info.raw["pad_token_id"], info.dtype) == (5, (6, 7), 8, "float16")
    changed = load_model_info(tmp_path / "m.gguf", {"max_position_embeddings": 64})
    assert changed.max_model_len == 64


def test_what_is_not_supported_is_named(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, "llama", num_hidden_layers=1)
    path = tmp_path / "m.gguf"
    write_gguf(tmp_path, path, extra={"llama.rope.scaling.type": "strange"})
    with pytest.raises(
        ModelError, match=r"m.gguf: llama.rope.scaling.type is 'strange' \(expected none, linear or yarn"
    ):
        load_model_info(path)
    writer = gguf.GGUFWriter(path, "rwkv6")
    finish(writer)
    with pytest.raises(ModelError, match=r"m.gguf: general.architecture 'rwkv6' is not supported \(supported: llama, "):
        load_model_info(path)

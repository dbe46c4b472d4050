"""An adapter that does not fit is refused before anything of it is used, with file, tensor, and what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.errors import ModelError
from quire.kernels.cpu.backend import CPUBackend
from quire.layers.lora import LoRASlots, LoRATarget
from quire.lora import peft_config
from quire.lora.adapter import Adapter, read_adapter
from quire.models.loader import load_model
from tests.helpers.adapters import PREFIX, Tensors, factors, write_adapter
from tests.helpers.checkpoints import plain_tensors, write_plain

Q = f"{PREFIX}model.layers.0.self_attn.q_proj."


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoRATarget]:
    """What adapters may change of a small Llama."""
    info = load_model_info(write_plain(tmp_path_factory.mktemp("plain")))
    backend = CPUBackend(num_threads=1)
    slots = LoRASlots(backend, num_slots=1, max_rank=8, vocab_size=160, extra_vocab=0, max_tokens=8, max_rows=8)
    load_model(info, backend, load_format="dummy", lora=slots)
    return slots.targets


def read(folder: Path, targets: dict[str, LoRATarget], extra_vocab: int = 4) -> Adapter:
    return read_adapter(folder, targets, max_rank=8, vocab_size=160, extra_vocab=extra_vocab)


def good() -> Tensors:
    return factors(plain_tensors(), ("q_proj", "v_proj"), rank=4, seed=0)


def test_the_scale_is_part_of_b_and_follows_the_patterns(tmp_path: Path, targets: dict[str, LoRATarget]) -> None:
    tensors = good()
    config: dict[str, Any] = {"r": 2, "lora_alpha": 6, "rank_pattern": {"q_proj|v_proj": 4}}
    adapter = read(
        write_adapter(tmp_path / "a", tensors, **config, alpha_pattern={"^.*1.self_attn.q_proj": 2}), targets
    )
    assert sorted(adapter.changes) == [f"model.layers.{i}.self_attn.{n}" for i in (0, 1) for n in ("q_proj", "v_proj")]
    for layer, alpha in ((0, 6), (1, 2)):
        name = f"model.layers.{layer}.self_attn.q_proj"
        expected = tensors[f"{PREFIX}{name}.lora_B.weight"] * np.float32(alpha / 4)
        np.testing.assert_array_equal(adapter.changes[name].b, expected)
    rslora = read(write_adapter(tmp_path / "b", tensors, lora_alpha=6, use_rslora=True), targets)
    np.testing.assert_array_equal(
        rslora.changes["model.layers.0.self_attn.q_proj"].b, tensors[f"{Q}lora_B.weight"] * np.float32(3)
    )
    assert adapter.digest != rslora.digest


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_the_language_model_of_a_multimodal_model(tmp_path: Path, targets: dict[str, LoRATarget], prefix: str) -> None:
    tensors = {name.replace(f"{PREFIX}model.", f"{PREFIX}{prefix}"): value for name, value in good().items()}
    assert len(read(write_adapter(tmp_path, tensors), targets).changes) == 4


def test_a_scale_that_makes_infinities(tmp_path: Path, targets: dict[str, LoRATarget]) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json: with this lora_alpha, model\.layers.* is too large"):
        read(write_adapter(tmp_path, good(), lora_alpha=1e300), targets)


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": r".*\.(q|v)_proj"},
        {"target_modules": ["q_proj", "v_proj", "k_proj"], "exclude_modules": ["k_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": r"model\.layers\.\d+\.self_attn\..*", "exclude_modules": r".*\.(k|o)_proj"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 1], "layers_pattern": "layers"},
        {"bias": "none", "lora_dropout": 0.1, "revision": None, "fan_in_fan_out": True, "use_dora": False},
    ],
)
def test_ways_to_name_the_same_modules(tmp_path: Path, targets: dict[str, LoRATarget], config: dict[str, Any]) -> None:
    assert len(read(write_adapter(tmp_path, good(), **config), targets).changes) == 4


def test_half_the_layers(tmp_path: Path, targets: dict[str, LoRATarget]) -> None:
    tensors = {name: value for name, value in good().items() if ".layers.1." in name}
    assert len(read(write_adapter(tmp_path, tensors, layers_to_transform=[1]), targets).changes) == 2


BAD_CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"use_dora": True}, "use_dora is true: DoRA rescales"),
    ({"lora_bias": True}, "lora_bias is true"),
    ({"bias": "all"}, "bias is 'all' \\(expected none"),
    ({"peft_type": "IA3"}, "peft_type is 'IA3' \\(expected LORA"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the model's own weights"),
    ({"trainable_token_indices": [1]}, "single trained tokens"),
    ({"target_parameters": ["experts"]}, "target_parameters"),
    ({"r": 9}, "r is 9 \\(expected at most 8, --max-lora-rank"),
    ({"rank_pattern": {"q_proj": 64}}, "rank_pattern.q_proj is 64 \\(expected at most 8"),
    ({"r": 0}, "r is 0 \\(expected an integer from 1"),
    ({"r": "four"}, "r is 'four'"),
    ({"lora_alpha": None, "r": None}, "r is missing"),
    ({"lora_alpha": -1}, "lora_alpha is -1"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": ["q_proj", "v_proj", "c_attn"]}, "has 'c_attn', which this model has not"),
    ({"target_modules": ["W_pack"]}, "of which this model has none \\(expected some of .*q_proj"),
    ({"target_modules": "("}, "expected a regular expression"),
    ({"target_modules": ["q_proj", 3]}, "expected a list of names"),
    ({"target_modules": ["q_proj", "v_proj", "o_proj"]}, "no tensors for model.layers.0.self_attn.o_proj"),
    ({"target_modules": ["q_proj"]}, "tensors for model.layers.0.self_attn.v_proj, which target_modules"),
    ({"rank_pattern": {"(": 3}}, "expected a regular expression"),
    ({"layers_to_transform": ["0"]}, "layers_to_transform is"),
]


@pytest.mark.parametrize("field", ["rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"])
def test_expressions_that_take_long_together(
    tmp_path: Path, targets: dict[str, LoRATarget], field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_config, "MAX_WORK", 70_000)
    text = "(?:.*(?<!x))" * 150
    folder = write_adapter(tmp_path, good(), **{field: text if "modules" in field else {text: 2}})
    with pytest.raises(ModelError, match=f"{field} is .*fewer or simpler regular expressions"):
        read(folder, targets)


@pytest.mark.parametrize(("config", "message"), BAD_CONFIGS, ids=[str(item[0])[:40] for item in BAD_CONFIGS])
def test_bad_configs(tmp_path: Path, targets: dict[str, LoRATarget], config: dict[str, Any], message: str) -> None:
    folder = write_adapter(tmp_path, good(), **config)
    with pytest.raises(ModelError, match=message) as caught:
        read(folder, targets)
    assert caught.value.message.startswith(str(folder))


def change(**values: Any) -> Callable[[Tensors], Tensors]:
    """Return a function that puts tensors in the place of others; None removes, names are below q_proj of layer 0."""

    def apply(tensors: Tensors) -> Tensors:
        for name, value in values.items():
            key = name if name.startswith("base_model") else Q + name.replace("__", ".")
            if value is None:
                del tensors[key]
            else:
                tensors[key] = value
        return tensors

    return apply


def full(*shape: int, value: float = 0.0) -> np.ndarray:
    return np.full(shape, value, np.float32)


BAD_TENSORS: list[tuple[Callable[[Tensors], Tensors], str]] = [
    (change(lora_A__weight=full(3, 32)), r"lora_A.weight' has shape \[3, 32\] \(expected \[4, 32\]"),
    (change(lora_A__weight=full(4, 31)), r"lora_A.weight' has shape \[4, 31\] \(expected \[4, 32\]"),
    (change(lora_B__weight=full(64, 4)), r"lora_B.weight' has shape \[64, 4\] \(expected \[32, 4\]"),
    (change(lora_A__weight=full(4, 32, value=np.nan)), "has 128 values that are NaN or infinite"),
    (change(lora_B__weight=None), "lora_A.weight' has no counterpart"),
    (change(lora_magnitude_vector=full(32)), "belongs to DoRA"),
    (change(lora_embedding_A=full(4, 32)), "is a linear layer"),
    (change(weight=full(32, 32)), "is held whole"),
    (change(lora_B__bias=full(32)), "is no part of an adapter that is supported"),
    (change(**{f"{PREFIX}model.layers.7.self_attn.q_proj.lora_A.weight": full(4, 32)}), "has no such layer"),
    (
        change(**{f"{PREFIX}model.layers.0.mlp.experts.3.up_proj.lora_A.weight": full(4, 32)}),
        "experts cannot be changed by adapters",
    ),
    (change(**{f"{PREFIX}lm_head.weight": full(165, 32)}), "has 165 rows, 5 more than the model .*--lora-extra-vocab"),
    (change(**{f"{PREFIX}lm_head.weight": full(164, 32)}), "the output head has 164 rows, but the embedding has 160"),
    (change(**{f"{PREFIX}lm_head.weight": full(150, 32)}), r"has shape \[150, 32\] \(expected \[160, 32\]"),
    (change(**{f"{PREFIX}model.norm.weight": full(32)}), "has no such layer"),
    (lambda tensors: {}, "holds no tensors"),
]


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS, ids=[item[1][:40] for item in BAD_TENSORS])
def test_bad_tensors(
    tmp_path: Path, targets: dict[str, LoRATarget], change: Callable[[Tensors], Tensors], message: str
) -> None:
    folder = write_adapter(tmp_path, change(good()), target_modules=["q_proj", "v_proj"])
    with pytest.raises(ModelError, match=message) as caught:
        read(folder, targets)
    assert str(folder / "adapter_model.safetensors") in caught.value.message


def test_missing_and_broken_files(tmp_path: Path, targets: dict[str, LoRATarget]) -> None:
    with pytest.raises(ModelError, match=r"nowhere: no such folder \(expected one with adapter_config.json"):
        read(tmp_path / "nowhere", targets)
    folder = write_adapter(tmp_path / "a", good())
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="is truncated"):
        read(folder, targets)
    weights.rename(folder / "adapter_model.bin")
    with pytest.raises(ModelError, match=re.escape("adapter_model.bin: pickle weights are not supported")):
        read(folder, targets)
    (folder / "adapter_model.bin").unlink()
    with pytest.raises(ModelError, match=r"adapter_model.safetensors: no such file"):
        read(folder, targets)
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError, match="file is not JSON"):
        read(folder, targets)
    (folder / "adapter_config.json").unlink()
    with pytest.raises(ModelError, match=r"adapter_config.json: No such file"):
        read(folder, targets)


def test_the_digest_is_of_the_content(tmp_path: Path, targets: dict[str, LoRATarget]) -> None:
    first, second = (read(write_adapter(tmp_path / name, good()), targets) for name in "ab")
    assert first.digest == second.digest
    tensors = good()
    tensors[f"{Q}lora_A.weight"][0, 0] += 1e-3
    assert read(write_adapter(tmp_path / "c", tensors), targets).digest != first.digest
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 9}))
    assert read(tmp_path / "a", targets).digest != first.digest

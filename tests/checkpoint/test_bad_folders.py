"""Every way in which a model folder can be bad ends in one line that names the file and what is wrong with it."""

from __future__ import annotations

import json
import logging
import mmap
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.errors import ModelError
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from tests.helpers.checkpoints import PLAIN_CONFIG, plain_tensors, safetensors_bytes, write_plain

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def load(folder: Path, **options: Any) -> Any:
    info = load_model_info(folder)
    return load_model(info, create_backend("reference", "float32", "float32", num_threads=1), **options)


def refusal(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load(folder)
    assert "\n" not in caught.value.message
    return caught.value.message.replace(f"{folder}{os.sep}", "").replace(str(folder), "FOLDER")


def write_config(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(text)


def write_raw(folder: Path, header: object, data: bytes = b"") -> None:
    """Write a weights file with this header, as JSON or as raw bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(len(text).to_bytes(8, "little") + text + data)


def write_shards(folder: Path, homes: dict[str, str], files: dict[str, dict[str, np.ndarray]]) -> None:
    (folder / WEIGHTS).unlink()
    for name, tensors in files.items():
        (folder / name).write_bytes(safetensors_bytes(tensors))
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": homes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a good model folder, for a test to spoil."""
    return write_plain(tmp_path)


def test_the_folder_is_good_before_it_is_spoilt(folder: Path) -> None:
    assert load(folder).vocab_size == PLAIN_CONFIG["vocab_size"]


def test_missing_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    assert refusal(folder) == "config.json: config.json is missing (expected in a model folder)"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{\n  "vocab_size": 5,,\n}', "config.json: file is not JSON: Expecting property name"),
        ('{\n  "vocab_size": 5,,\n}', "at line 2, column 19"),
        ("", "file is not JSON: Expecting value at line 1, column 1"),
        ("[1, 2]", "file holds a list (expected a JSON object)"),
        ("[" * 200_000, "file is nested too deeply"),
        ('{"vocab_size": ' + "9" * 5000 + "}", "file holds a number of too many digits"),
        ('{"a": 1, "a": 2}', "file names 'a' twice"),
        ('{"a": {"__float__": "inf"}}', "file: __float__ is 'inf' (expected Infinity, -Infinity or NaN)"),
        ('{"' + "k" * 999 + '": 1, "' + "k" * 999 + '": 2}', "file names '" + "k" * 199 + "... twice"),
        ("{" + "".join(f'"{key}": 1, ' for key in range(200_000)) + '"7": 1}', "file names '7' twice"),
        ('{"a": [' + "1," * 2**18 + "1]}", "file holds too many values (expected at most 262144)"),
    ],
)
def test_config_that_is_not_json(folder: Path, text: str, words: str) -> None:
    write_config(folder, text)
    assert words in refusal(folder)


def test_files_for_which_the_memory_does_not_suffice(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **options: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(json, "loads", fail)
        assert refusal(folder).startswith("config.json: not enough memory to parse the ")
    monkeypatch.setattr(Path, "read_bytes", fail)
    assert refusal(folder).startswith("config.json: not enough memory to read its ")


def test_ids_outside_the_vocabulary_are_warned_of_in_a_short_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(1000, 101_000))}))
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "eos_token_id a list of 100000 items lies outside" in caplog.text


def test_config_that_is_not_text(folder: Path) -> None:
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')
    assert refusal(folder) == "config.json: file is not UTF-8 at byte 7 (expected JSON text)"


def test_unknown_architecture_lists_the_known_ones(folder: Path) -> None:
    write_plain(folder, architectures=["MambaForCausalLM"])
    message = refusal(folder)
    assert message.startswith("config.json: architecture 'MambaForCausalLM' is not supported (supported: Llama")
    assert "GPT2LMHeadModel" in message


def test_unknown_model_type_lists_the_known_ones(folder: Path) -> None:
    write_plain(folder, architectures=None, model_type="mamba")
    assert "model_type 'mamba' is not supported (supported: llama, mistral" in refusal(folder)


def test_code_of_an_unknown_architecture_is_not_run(folder: Path, tmp_path: Path) -> None:
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    write_plain(folder, architectures=["Evil"], auto_map={"AutoModelForCausalLM": "evil.Evil"})
    assert "architecture 'Evil' is not supported; its own code (auto_map) is not run" in refusal(folder)
    assert not (tmp_path / "PWNED").exists()


def test_code_beside_a_known_architecture_is_ignored(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'PWNED')!r}, 'w')")
    write_plain(folder, auto_map={"AutoConfig": "evil.Evil"})
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "auto_map" in caplog.text
    assert not (tmp_path / "PWNED").exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights(folder: Path, share: float) -> None:
    path = folder / WEIGHTS
    whole = path.stat().st_size
    os.truncate(path, int(whole * share))
    message = refusal(folder)
    assert message.startswith("model.safetensors: file is truncated (expected ")
    assert f"got {int(whole * share)}" in message
    if share >= 0.5:
        assert f"expected {whole} bytes" in message


def test_weights_with_a_tail(folder: Path) -> None:
    with open(folder / WEIGHTS, "ab") as file:
        file.write(b"tail")
    size = (folder / WEIGHTS).stat().st_size
    assert refusal(folder) == (
        f"model.safetensors: file has bytes that belong to no tensor (expected {size - 4} bytes, got {size})"
    )


def test_header_too_large(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + b"{}" * 100)
    assert refusal(folder) == (
        "model.safetensors: safetensors header too large (expected at most 100000000 bytes, got 4611686018427387904)"
    )


F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": F32, "b": {**F32, "data_offsets": [4, 12]}}, "'b': data_offsets [4, 12] overlaps tensor 'a'"),
        ({"a": F32, "b": F32}, "'b': data_offsets [0, 8] overlaps tensor 'a'"),
        ({"a": {**F32, "data_offsets": [4, 12]}}, "'a': data_offsets [4, 12] leaves a hole after the header"),
        ({"a": {**F32, "shape": [400], "data_offsets": [0, 1600]}}, "tensor 'a' ends there"),
        ({"a": {**F32, "data_offsets": [-8, 0]}}, "'a': bad data_offsets [-8, 0] (expected [begin, end]"),
        ({"a": {**F32, "data_offsets": [0]}}, "'a': bad data_offsets [0]"),
        ({"a": {**F32, "data_offsets": [8, 0]}}, "(expected 8 bytes, got -8)"),
        ({"a": {**F32, "data_offsets": [0, 2**62]}}, "'a': data_offsets [0, 4611686018427387904] do not fit shape [2]"),
        ({"a": {**F32, "shape": [2**33, 2**33]}}, "(expected 295147905179352825856 bytes, got 8)"),
        ({"a": {**F32, "shape": [2**64]}}, "do not fit shape"),
        ({"a": {**F32, "shape": [-1]}}, "'a': bad shape [-1] (expected a list of sizes)"),
        ({"a": {**F32, "shape": [True, 2]}}, "'a': bad shape [true, 2]"),
        ({"a": {**F32, "shape": "2"}}, "'a': bad shape '2'"),
        ({"a": {**F32, "dtype": "F31"}}, "'a': unknown dtype 'F31' (expected one of F64, F32"),
        ({"a": {**F32, "dtype": ["F32"]}}, "'a': unknown dtype [\"F32\"]"),
        ({"a": [1]}, "'a': bad header entry [1] (expected dtype, shape and data_offsets)"),
        ({"a": {"dtype": "F32"}}, "'a': bad header entry"),
        (b'{"a": 1', "model.safetensors: safetensors header is not JSON"),
        (b"[]", "safetensors header holds a list"),
        (b'{"a\\nb": 1}', "tensor 'a\\nb': bad header entry 1"),
        (b"[" * 100_000, "safetensors header is nested too deeply"),
        (b'{"a": {}, "a": {}}', "safetensors header names 'a' twice"),
    ],
)
def test_lying_headers(folder: Path, header: object, words: str) -> None:
    write_raw(folder, header, bytes(16))
    message = refusal(folder)
    assert message.startswith("model.safetensors: ")
    assert words in message


def test_wrong_shape_names_the_tensor_and_both_shapes(folder: Path) -> None:
    write_plain(folder, {**plain_tensors(), Q_PROJ: np.zeros((32, 31), np.float32)})
    assert refusal(folder) == (
        f"model.safetensors: tensor '{Q_PROJ}' has the wrong shape (expected [32, 32], got [32, 31])"
    )


def test_integers_where_weights_should_be(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    at = raw.index(b'"F32"', raw.index(Q_PROJ.encode()))
    (folder / WEIGHTS).write_bytes(raw[:at] + b'"I32"' + raw[at + 5 :])
    assert f"tensor '{Q_PROJ}' has the wrong dtype (expected F64, F32, F16, BF16, got I32)" in refusal(folder)


def test_missing_tensors_are_all_listed(folder: Path) -> None:
    tensors = plain_tensors()
    del tensors[Q_PROJ]
    write_plain(folder, tensors)
    assert refusal(folder) == f"FOLDER: 1 tensor is missing from the weights: '{Q_PROJ}'"
    del tensors["model.norm.weight"], tensors["model.layers.0.mlp.up_proj.weight"]
    write_plain(folder, tensors)
    message = refusal(folder)
    assert message.startswith("FOLDER: 3 tensors are missing from the weights: ")
    assert all(name in message for name in (Q_PROJ, "model.norm.weight", "model.layers.0.mlp.up_proj.weight"))


def test_many_missing_tensors_are_counted(folder: Path) -> None:
    write_plain(folder, plain_tensors(), num_hidden_layers=40)
    message = refusal(folder)
    assert "342 tensors are missing" in message
    assert message.endswith("and 322 more")


def test_untied_head_that_is_not_there(folder: Path) -> None:
    tensors = plain_tensors()
    del tensors["lm_head.weight"]
    write_plain(folder, tensors)
    assert refusal(folder) == "FOLDER: 1 tensor is missing from the weights: 'lm_head.weight'"
    write_plain(folder, tensors, tie_word_embeddings=True)
    load(folder)


def test_extra_tensor_is_named_and_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_plain(folder, {**plain_tensors(), "model.vision.weight": np.zeros(3, np.float32)})
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert "ignored 1 tensors that this architecture does not have: 'model.vision.weight'" in caplog.text


def test_leftovers_of_old_files_are_ignored_silently(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4, np.float32)}
    write_plain(folder, {**plain_tensors(), **old}, tie_word_embeddings=True)
    with caplog.at_level(logging.WARNING):
        load(folder)
    assert caplog.text == ""


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite(folder: Path, value: float, caplog: pytest.LogCaptureFixture) -> None:
    tensors = plain_tensors()
    tensors[Q_PROJ][3, 5] = tensors[Q_PROJ][31, 31] = value
    write_plain(folder, tensors)
    message = refusal(folder)
    assert message.startswith(f"model.safetensors: tensor '{Q_PROJ}' holds 2 NaN or infinite values of 1024")
    with caplog.at_level(logging.WARNING):
        load(folder, allow_nonfinite=True)
    assert "holds 2 NaN or infinite values" in caplog.text


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickles_are_named_and_never_opened(folder: Path, name: str, tmp_path: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch " + str(tmp_path / "PWNED").encode() + b"'\ntR.")
    assert (
        refusal(folder)
        == f"{name}: pickle weights are not supported without --load-format pt (expected *.safetensors files)"
    )
    assert not (tmp_path / "PWNED").exists()


def test_no_weights_at_all(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    assert refusal(folder) == (
        "FOLDER: no safetensors weights (expected model.safetensors, or model.safetensors.index.json and its shards)"
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [({"quant_method": "banana", "bits": 3}, "'banana'"), ({"bits": 3}, "null"), ("banana", "'banana'")],
)
def test_unknown_quantization(folder: Path, value: object, shown: str) -> None:
    write_plain(folder, quantization_config=value)
    assert refusal(folder).startswith(
        f"config.json: quantization method {shown} is not supported (supported: awq, gptq, "
    )


def test_missing_shard(folder: Path) -> None:
    tensors = plain_tensors()
    write_shards(
        folder, {**dict.fromkeys(tensors, "a.safetensors"), Q_PROJ: "b.safetensors"}, {"a.safetensors": tensors}
    )
    assert refusal(folder) == "b.safetensors: no such shard (expected by model.safetensors.index.json)"


def test_shard_without_its_tensor(folder: Path) -> None:
    tensors = plain_tensors()
    one = {Q_PROJ: tensors.pop(Q_PROJ)}
    homes = {**dict.fromkeys(tensors, "a.safetensors"), Q_PROJ: "a.safetensors", "model.norm.weight": "b.safetensors"}
    write_shards(folder, homes, {"a.safetensors": tensors, "b.safetensors": one})
    assert "is not in this file (expected by model.safetensors.index.json)" in refusal(folder)


def test_tensor_in_two_shards(folder: Path) -> None:
    tensors = plain_tensors()
    homes = {**dict.fromkeys(tensors, "a.safetensors"), Q_PROJ: "b.safetensors"}
    write_shards(folder, homes, {"a.safetensors": tensors, "b.safetensors": {Q_PROJ: tensors[Q_PROJ]}})
    assert refusal(folder) == f"b.safetensors: tensor '{Q_PROJ}' is already in a.safetensors (expected it once)"


@pytest.mark.parametrize("path", ["../../etc/passwd", "/etc/passwd", "..", "", "a/b.safetensors", "a\\b", "a\0b", 7])
def test_shard_path_that_leaves_the_folder(folder: Path, path: object) -> None:
    tensors = plain_tensors()
    write_shards(folder, {**dict.fromkeys(tensors, "a.safetensors"), Q_PROJ: path}, {"a.safetensors": tensors})  # type: ignore[dict-item]
    message = refusal(folder)
    assert message.startswith("model.safetensors.index.json: shard path ")
    assert message.endswith("escapes the model folder (expected a plain file name)")


@pytest.mark.parametrize("weight_map", [None, {}, ["a"]])
def test_index_without_a_map(folder: Path, weight_map: object) -> None:
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    assert refusal(folder).startswith("model.safetensors.index.json: weight_map is missing or empty")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1 (expected an integer from 1 to 4096)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0 (expected an integer"),
        ({"num_hidden_layers": True}, "num_hidden_layers is true (expected an integer"),
        ({"hidden_size": 10**9}, "hidden_size is 1000000000 (expected an integer from 1 to 1048576)"),
        ({"hidden_size": 10**400}, "hidden_size is a very large integer"),
        ({"hidden_size": 30}, "hidden_size is 30 (expected a multiple of num_attention_heads, 4)"),
        ({"hidden_size": None}, "hidden_size is missing (expected an integer"),
        ({"hidden_size": "32"}, "hidden_size is '32' (expected an integer"),
        ({"num_attention_heads": 5}, "hidden_size is 32 (expected a multiple of num_attention_heads, 5)"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3 (expected a divisor of num_attention_heads, 4)"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8 (expected a divisor of num_attention_heads, 4)"),
        ({"head_dim": 7}, "head_dim is 7 (expected an even number from 2, for rotary embeddings)"),
        ({"vocab_size": 0}, "vocab_size is 0 (expected an integer from 1"),
        ({"intermediate_size": -5}, "intermediate_size is -5"),
        ({"max_position_embeddings": 0}, "max_position_embeddings is 0"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps is -1e-06 (expected a number above 0)"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan (expected a number above 0)"),
        ({"rope_theta": 0}, "rope_theta is 0 (expected a number above 1)"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes' (expected true or false)"),
        ({"attention_bias": 1}, "attention_bias is 1 (expected true or false)"),
        ({"hidden_act": "mish"}, "activation 'mish' is not supported (supported: relu, relu2"),
        (
            {"torch_dtype": "float8_e4m3fn"},
            "torch_dtype is 'float8_e4m3fn' (expected one of float32, bfloat16, float16)",
        ),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>' (expected a token id or a list of token ids)"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM' (expected a list of names)"),
    ],
)
def test_config_values_that_make_no_sense(folder: Path, config: dict[str, Any], words: str) -> None:
    write_plain(folder, **config)
    message = refusal(folder)
    assert message.startswith("config.json: ")
    assert words in message


def replace_by_directory(path: Path) -> None:
    path.mkdir()


def replace_by_loop(path: Path) -> None:
    path.symlink_to(path.name)


def replace_by_dangling_link(path: Path) -> None:
    path.symlink_to("nowhere")


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", WEIGHTS, INDEX])
@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (replace_by_directory, "is a directory (expected a file)"),
        (os.mkfifo, "is not a regular file (expected a file, got a pipe, socket, or device)"),
        (replace_by_loop, "Too many levels of symbolic links (expected a readable file)"),
        (replace_by_dangling_link, "No such file or directory (expected a readable file)"),
    ],
)
def test_files_that_are_no_files(folder: Path, name: str, replace: Callable[[Path], None], words: str) -> None:
    (folder / name).unlink(missing_ok=True)
    if name == INDEX:
        (folder / WEIGHTS).unlink()
    replace(folder / name)
    assert refusal(folder) == f"{name}: {words}"


@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_files_that_may_not_be_read(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / name).chmod(0)
    if os.geteuid() == 0:  # root may read everything, so the answer that others get is played

        def denied(path: object, *args: Any, **kwargs: Any) -> Any:
            raise PermissionError(13, "Permission denied", str(path))

        if name == WEIGHTS:
            monkeypatch.setattr(mmap, "mmap", denied)
        else:
            monkeypatch.setattr(Path, "read_bytes", denied)
    assert refusal(folder) == f"{name}: Permission denied (expected a readable file)"


def test_model_that_does_not_fit_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = create_backend("reference", "float32", "float32", num_threads=1)
    monkeypatch.setattr(backend, "available_memory", lambda: 1000)
    with pytest.raises(ModelError, match=r"weights need 0\.0 GiB in float32, 0\.0 GiB are available"):
        load_model(load_model_info(folder), backend)
    quantized = create_backend("reference", "float32", "float32", num_threads=1, quantization="int4")
    monkeypatch.setattr(quantized, "available_memory", lambda: 1000)
    with pytest.raises(ModelError, match=r"weights need 0\.0 GiB in int4, 0\.0 GiB are available"):
        load_model(load_model_info(folder), quantized)


def test_config_and_weights_may_be_links_as_in_the_hub_cache(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    for name in ("config.json", WEIGHTS):
        shutil.move(folder / name, blobs / name)
        (folder / name).symlink_to(blobs / name)
    load(folder)

"""`quire convert`: the folders that it writes answer as the models that they were made of."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.checkpoint.open import is_packed
from quire.checkpoint.packed import PackedFile
from quire.cli.main import main
from quire.errors import ModelError
from quire.kernels.create import create_backend
from quire.models.loader import load_model
from quire.tokenizer.tokenizer import Tokenizer
from tests.helpers.checkpoints import write_checkpoint, write_plain
from tests.helpers.model_driver import ModelDriver

PROMPT = [5, 3, 99, 4, 17, 2, 8]
SIZES = {"hidden_size": 64, "intermediate_size": 128}
Convert = Callable[..., Path]


@pytest.fixture
def convert(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Convert:
    """Run the command on a folder; return what it wrote."""

    def run(source: Path, *words: str, out: str = "out") -> Path:
        code = main(["convert", str(source), str(tmp_path / out), "--skip-tokenizer-init", *words])
        captured = capsys.readouterr()
        assert code == 0, captured.err
        assert str(tmp_path / out) in captured.out
        return tmp_path / out

    return run


def model(folder: Path, dtype: str = "float32", quantization: str | None = None) -> ModelDriver:
    backend = create_backend("cpu", dtype, "float32", 1, quantization)
    return ModelDriver(load_model(load_model_info(folder), backend), backend)


def made(folder: Path, family: str = "llama", **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    return write_checkpoint(folder, family, seed=4, **config)


@pytest.mark.parametrize(
    ("family", "dtype", "quantization"),
    [
        ("llama", "float32", None),
        ("llama", "bfloat16", "int4"),
        ("mixtral", "bfloat16", "int8"),
        pytest.param("gpt2", "bfloat16", None, marks=pytest.mark.slow),
        pytest.param("gemma3_text", "float32", None, marks=pytest.mark.slow),
        pytest.param("qwen3_next", "bfloat16", "int8-weight-only", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", "bfloat16", None, marks=pytest.mark.slow),
    ],
)
def test_packed_weights_are_those_that_would_be_packed(
    tmp_path: Path, convert: Convert, family: str, dtype: str, quantization: str | None
) -> None:
    source = made(tmp_path / "in", family)
    words = ["--dtype", dtype, *(["--quantization", quantization] if quantization else [])]
    out = convert(source, *words)
    info = load_model_info(out)
    assert is_packed(info) and info.dtype == dtype and not list(out.glob("*.safetensors"))
    backends = [create_backend("cpu", dtype, "float32", 1, quantization) for _ in range(2)]
    records: list[list[Any]] = []
    from quire.kernels.cpu.packed_weights import recording_weights

    for backend, folder in zip(backends, (source, out)):
        kept: list[Any] = []
        if folder == source:
            with recording_weights(backend, kept):
                load_model(load_model_info(folder), backend)
        else:
            load_model(load_model_info(folder), backend)
            kept = list(PackedFile(out / "model.quire").records)
        records.append(kept)
    assert len(records[0]) == len(records[1]) > 5
    for first, second in zip(*records):
        assert (first["op"], first["kind"]) == (second["op"], second["kind"])
        for name, value in first["fields"].items():
            np.testing.assert_array_equal(second["fields"][name], value)


@pytest.mark.parametrize("quantization", [None, "int4"])
def test_packed_models_write_the_same_text(tmp_path: Path, convert: Convert, quantization: str | None) -> None:
    source = made(tmp_path / "in", **SIZES)
    out = convert(source, "--dtype", "bfloat16", *(["--quantization", quantization] if quantization else []))
    expected = model(source, "bfloat16", quantization)
    found = model(out, "bfloat16", quantization)
    np.testing.assert_array_equal(found.step({"a": PROMPT})["a"], expected.step({"a": PROMPT})["a"])
    assert found.greedy(PROMPT, 32) == expected.greedy(PROMPT, 32)


@pytest.mark.slow
def test_the_engine_knows_how_a_model_is_packed(tmp_path: Path, convert: Convert) -> None:
    from quire import LLM, SamplingParams

    source = made(tmp_path / "in", **SIZES)
    out = convert(source, "--dtype", "bfloat16", "--quantization", "int8")
    options: dict[str, Any] = {"skip_tokenizer_init": True, "num_gpu_blocks_override": 32, "max_model_len": 128}
    texts = []
    for folder, more in ((source, {"dtype": "bfloat16", "quantization": "int8"}), (out, {})):
        with LLM(model=str(folder), **options, **more) as llm:
            [answer] = llm.generate(
                {"prompt_token_ids": PROMPT}, SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
            )
            texts.append(list(answer.outputs[0].token_ids))
    assert texts[0] == texts[1] and len(texts[0]) == 16


def test_what_does_not_fit_this_machine_is_refused(tmp_path: Path, convert: Convert) -> None:
    source = made(tmp_path / "in")
    out = convert(source, "--dtype", "bfloat16")
    again = rf"convert again: quire convert {source} {out} --format packed --force"
    with pytest.raises(ModelError, match=rf"was packed for dtype 'bfloat16', and this is 'float32'; {again}"):
        model(out)
    with pytest.raises(ModelError, match=r"was packed for quantization null, and this is 'int8'"):
        model(out, "bfloat16", "int8")
    with pytest.raises(ModelError, match=r"was packed for config '.*', and this is '"):
        backend = create_backend("cpu", "bfloat16", "float32", 1)
        load_model(load_model_info(out, {"rms_norm_eps": 0.5}), backend)
    content = (out / "model.quire").read_bytes()
    for damaged in (content[:9], content[:-100], b"X" + content[1:], content[:16] + b"[" + content[17:]):
        (out / "model.quire").write_bytes(damaged)
        with pytest.raises(ModelError, match=r"model.quire: "):
            model(out, "bfloat16")


def test_safetensors_in_another_type(tmp_path: Path, convert: Convert) -> None:
    source = made(tmp_path / "in", **SIZES)
    out = convert(source, "--format", "safetensors", "--dtype", "bfloat16")
    assert load_model_info(out).dtype == "bfloat16"
    expected, found = (model(folder, "bfloat16").greedy(PROMPT, 16) for folder in (source, out))
    assert found == expected


@pytest.mark.parametrize(("quantization", "tolerance"), [("int8", 0.02), ("int8-weight-only", 0.02), ("int4", 0.2)])
def test_quantized_safetensors(tmp_path: Path, convert: Convert, quantization: str, tolerance: float) -> None:
    """What is written stands for weights close to the original's, and can be read as any such checkpoint."""
    source = made(tmp_path / "in", **SIZES)
    out = convert(source, "--format", "safetensors", "--dtype", "float32", "--quantization", quantization)
    stored = load_model_info(out).stored_format
    assert stored is not None and stored.name == "compressed-tensors"
    from quire.checkpoint.open import open_weights

    before, after = (open_weights(load_model_info(folder)).tensors for folder in (source, out))
    assert set(before) == set(after)
    quantized = 0
    for name, stored_tensor in before.items():
        values, found = stored_tensor.read().to_float32(), after[name].read().to_float32()
        quantized += after[name].layout is not None
        assert np.abs(values - found).max() <= (tolerance * np.abs(values).max() if "_proj" in name else 0)
    assert quantized == 14
    model(out).step({"a": PROMPT})


def test_a_gguf_file_becomes_a_folder(
    tmp_path: Path, convert: Convert, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("gguf")
    from quire.demo import demo_model_path
    from tests.helpers.gguf_files import tokenizer_metadata, write_gguf

    path, out = tmp_path / "m.gguf", tmp_path / "whole"
    extra = {**tokenizer_metadata(demo_model_path(), "gpt2"), "tokenizer.ggml.pre": "gpt-2"}
    extra |= {"tokenizer.chat_template": "{{ messages }}", "tokenizer.ggml.eos_token_id": 5}
    write_gguf(demo_model_path(), path, "Q8_0", extra)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert main(["convert", str(path), str(out), "--format", "safetensors"]) == 0
    capsys.readouterr()
    assert len(list((tmp_path / "cache/quire/tokenizers").iterdir())) == 1, "the tokenizer was tried out"
    ours, original = Tokenizer.from_folder(out), Tokenizer.from_folder(path)
    assert ours.encode("Hello there, <|user|>!") == original.encode("Hello there, <|user|>!")
    assert (ours.chat_template, ours.eos_token_id) == ("{{ messages }}", 5)
    assert load_model_info(out).eos_token_ids == (5,)


def test_a_folder_with_files_in_it_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], convert: Convert
) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    write_plain(source)
    (source / "generation_config.json").write_text('{"temperature": 0.5}')
    out.mkdir()
    (out / "mine.txt").write_text("mine")
    assert main(["convert", str(source), str(out)]) == 2
    assert f"{out}: is not empty (--force writes into it)" in capsys.readouterr().err
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    convert(source, "--force")
    assert (out / "mine.txt").read_text() == "mine" and is_packed(load_model_info(out))
    assert json.loads((out / "generation_config.json").read_text()) == {"temperature": 0.5}
    assert not list(out.glob("*.partial"))
    convert(source, "--force", "--format", "safetensors")
    assert not is_packed(load_model_info(out)), "an earlier packed file would be loaded in its place"
    convert(source, "--force")
    assert main(["convert", str(source), str(source), "--force"]) == 2
    assert "is the model's own folder" in capsys.readouterr().err
    assert main(["convert", str(out), str(tmp_path / "other")]) == 2
    assert "is packed already" in capsys.readouterr().err


def test_a_folder_does_not_fill_the_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    write_plain(source)
    sparse = source / "special_tokens_map.json"
    sparse.touch()
    os.truncate(sparse, 2**33)
    assert main(["convert", str(source), str(out), "--skip-tokenizer-init"]) == 2
    assert "take 8589934592 bytes (expected at most 1073741824)" in capsys.readouterr().err
    assert not (out / sparse.name).exists()

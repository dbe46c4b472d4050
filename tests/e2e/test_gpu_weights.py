"""Every form of weights and of caches, and models that write no texts, through the engine on a GPU's kernels.

Compared with the reference backend in float32, where what a format stands for is the same on both; see
`test_gpu_engine.py` for what else engines do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.cli.main import main
from quire.pooling_params import PoolingParams
from tests.e2e.test_gpu_engine import OPTIONS, SMALL
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import write_gguf
from tests.helpers.pooling_checkpoints import ENCODER, write_model
from tests.helpers.quantizers import quantize_folder
from tests.parity.test_formats import write_gpt_oss

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
SIZES = {**SMALL, "hidden_size": 64, "intermediate_size": 64}
SERVED: dict[str, Any] = {**OPTIONS, "skip_tokenizer_init": True}
PROMPTS = [{"prompt_token_ids": ids} for ids in ([3, 4, 5, 6, 7], [9, 8])]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
# Formats in which checkpoints are published; and the largest difference of log-probabilities that rounding makes:
# with inputs of 8 bits, one that falls to the other side of a border is a 127th of its row's largest.
STORED = ("awq", "gptq-order", "w4a16", "w8a8", "ct-fp8", "fp8-block", "nf4-double", "bnb8", "nvfp4")
TURNED = {"int8": 0.1, "int8-weight-only": 1e-3, "int4": 0.1, "fp8": 0.1}
CACHES = {"int8": 1e-3, "fp8": 1e-3, "float16": 1e-3, "bfloat16": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of one layer."""
    return write_checkpoint(tmp_path_factory.mktemp("llama"), "llama", **SIZES)


def texts(model: Path, device: str, **options: Any) -> list[tuple[list[int], np.ndarray]]:
    """Return what is said after each prompt: tokens, and their log-probabilities."""
    with LLM(str(model), device=device, **{**SERVED, **options}) as llm:
        items = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert [item.error for item in items] == [None] * len(items)
    return [
        (item.token_ids, np.array([place[token].logprob for token, place in zip(item.token_ids, item.logprobs or [])]))
        for item in items
    ]


def compare(model: Path, tolerance: float = 1e-3, **options: Any) -> None:
    """Check that the GPU says what the reference says."""
    for (ours, scores), (theirs, expected) in zip(
        texts(model, "cuda", **options), texts(model, "reference", **options), strict=True
    ):
        assert ours == theirs
        np.testing.assert_allclose(scores, expected, atol=tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORED)
def test_stored_formats(folder: Path, tmp_path: Path, kind: str) -> None:
    quantize_folder(folder, tmp_path, kind)
    compare(tmp_path, 0.1 if kind == "w8a8" else 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K"])
def test_gguf(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 256, "intermediate_size": 256} if kind.endswith("_K") else {}
    write_checkpoint(tmp_path, "llama", **{**SIZES, **sizes})
    write_gguf(tmp_path, tmp_path / "m.gguf", kind)
    compare(tmp_path / "m.gguf")


@pytest.mark.slow
def test_experts_of_four_bits(tmp_path: Path) -> None:
    write_gpt_oss(tmp_path)
    compare(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("quantization", TURNED)
def test_weights_turned_while_they_are_loaded(folder: Path, quantization: str) -> None:
    compare(folder, TURNED[quantization], quantization=quantization)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_experts_turned_while_they_are_loaded(tmp_path: Path, kind: str) -> None:
    compare(write_checkpoint(tmp_path, "mixtral", **SIZES), TURNED[kind], quantization=kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CACHES)
def test_caches(folder: Path, kind: str) -> None:
    compare(folder, CACHES[kind], kv_cache_dtype=kind)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "latent"), [("fp8", True), ("float16", True), ("int8", False)])
def test_caches_of_latent_attention(tmp_path: Path, kind: str, latent: bool) -> None:
    path = write_checkpoint(tmp_path, "deepseek_v3", vocab_size=64)
    compare(path, CACHES[kind], kv_cache_dtype=kind, latent_cache=latent)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_halves(folder: Path, dtype: str) -> None:
    """Rounding differs between devices; texts stay finite, and their scores near."""
    (ours, _), (theirs, _) = (
        zip(*texts(folder, device, dtype=dtype, kv_cache_dtype=dtype), strict=True) for device in ("cuda", "reference")
    )
    assert [tokens[0] for tokens in ours] == [tokens[0] for tokens in theirs]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["persimmon", "gemma2", "mixtral"])
def test_code_of_transformers(tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.helpers import checkpoints
    from tests.parity.test_fallback import FOREIGN

    monkeypatch.setitem(checkpoints.FAMILIES, family, FOREIGN[family])
    path = write_checkpoint(tmp_path, family)
    compare(path, model_impl="transformers")
    if family == "persimmon":
        compare(path, TURNED["int8-weight-only"], model_impl="transformers", quantization="int8-weight-only")


POOLED: dict[str, tuple[str, dict[str, Any]]] = {
    "encoder": ("BertModel", {}),
    "classifier": ("BertForSequenceClassification", {"num_labels": 3}),
    "windows on both sides": (
        "ModernBertModel",
        {"local_attention": 8, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "decoder": ("Qwen3Model", {"num_key_value_heads": 2, "head_dim": 16}),
    "decoder that judges": (
        "Qwen3ForSequenceClassification",
        {"num_key_value_heads": 2, "head_dim": 16, "num_labels": 3},
    ),
}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) for name in POOLED])
def test_vectors_and_scores(tmp_path: Path, name: str) -> None:
    architecture, config = POOLED[name]
    path = write_model(tmp_path, architecture, **{**ENCODER, "hidden_size": 16, "num_attention_heads": 2, **config})
    texts = [list(range(5, 5 + length)) for length in (17, 1, 6)]
    found = []
    for device in ("cpu", "cuda"):
        options = {"dtype": "float32", "block_size": 4, "num_gpu_blocks_override": 64, "enforce_eager": True}
        with LLM(str(path), device=device, skip_tokenizer_init=True, max_num_batched_tokens=32, **options) as llm:
            outputs = llm.encode(texts, use_tqdm=False)
            if name == "decoder":
                outputs += llm.encode(texts, PoolingParams(task="token_embed"), use_tqdm=False)
        found.append([output.outputs.data for output in outputs])
    for expected, got in zip(*found, strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-4)


# Commands


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3_5_text"])
def test_verify(tmp_path: Path, family: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_checkpoint(tmp_path, family, vocab_size=64)
    words = ["--skip-tokenizer-init", "--prompt-len", "6", "--num-tokens", "2", "--all-layers"]
    assert main(["verify", "--model", str(path), "--device", "cuda", *words]) == 0, capsys.readouterr().out


@pytest.mark.slow
def test_generate(capsys: pytest.CaptureFixture[str]) -> None:
    limits = ["--max-model-len", "64", "--num-gpu-blocks-override", "8", "--max-num-seqs", "2"]
    words = ["-p", "The sky", "--temperature", "0", "--max-tokens", "3", "--dtype", "float32", *limits]
    said = []
    for device in ("cpu", "cuda"):
        assert main(["generate", *words, "--max-num-batched-tokens", "16", "--device", device]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1] != ""


@pytest.mark.slow
def test_bench(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--input-len", "4", "--output-len", "2", "--batch-size", "1"]
    limits = ["--max-model-len", "32", "--num-gpu-blocks-override", "16", "--max-num-batched-tokens", "16"]
    words = [
        "--skip-tokenizer-init",
        *lengths,
        *limits,
        "--enforce-eager",
        "--num-iters",
        "1",
        "--num-iters-warmup",
        "1",
    ]
    assert main(["bench", "latency", "--model", str(folder), "--device", "cuda", *words]) == 0
    assert capsys.readouterr().out

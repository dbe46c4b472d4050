"""One GGUF file is a whole model: the demo model, written as one, answers as it does from its folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.checkpoint.folder import resolve_model
from quire.cli.main import main
from quire.demo import demo_model_path
from quire.errors import ModelError
from tests.helpers.checkpoints import write_checkpoint
from tests.helpers.gguf_files import tokenizer_metadata, write_gguf

pytest.importorskip("gguf")

GREEDY = SamplingParams(temperature=0.0, max_tokens=24)
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of two files of the demo model."""
    folder, demo = tmp_path_factory.mktemp("demo"), demo_model_path()
    extra = tokenizer_metadata(demo, "gpt2")
    config = json.loads((demo / "tokenizer_config.json").read_text())
    extra |= {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_bos_token": True}
    extra |= {f"tokenizer.ggml.{name}_token_id": number for name, number in (("bos", 1), ("eos", 5), ("padding", 0))}
    for kind in ("F32", "Q8_0"):
        write_gguf(
            demo, folder / f"demo-{kind}.gguf", kind, {**extra, "tokenizer.chat_template": config["chat_template"]}
        )
    return folder


def test_a_file_answers_as_the_folder_does(folder: Path) -> None:
    answers = []
    for model in ("quire-demo", str(folder / "demo-F32.gguf")):
        with LLM(model=model, dtype="float32", max_model_len=256, num_gpu_blocks_override=64) as llm:
            [answer] = llm.chat(MESSAGES, GREEDY)
            answers.append((answer.prompt_token_ids, answer.outputs[0].token_ids, answer.outputs[0].text))
    assert answers[0] == answers[1]


def test_the_command_takes_a_file_of_a_folder(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-model-len", "128", "--num-gpu-blocks-override", "32", "--temperature", "0", "--max-tokens", "8"]
    assert main(["generate", "--model", f"{folder}:q8_0", "-p", "The sky is", *words]) == 0
    assert capsys.readouterr().out.strip()


def test_a_plan_knows_what_the_file_holds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {}
    for kind in ("F32", "Q8_0"):
        assert main(["plan", "--model", str(folder / f"demo-{kind}.gguf"), "--json"]) == 0
        plan = json.loads(capsys.readouterr().out)
        assert plan["architecture"] == "LlamaForCausalLM"
        sizes[kind] = sum(plan["on_disk"].values()), plan["weights"]
    assert sizes["F32"][0] > 3.5 * sizes["Q8_0"][0] and sizes["F32"][1] > 3.5 * sizes["Q8_0"][1]


def test_choices(folder: Path, tmp_path: Path) -> None:
    assert resolve_model(f"{folder}:F32") == folder / "demo-F32.gguf"
    with pytest.raises(ModelError, match=r"several GGUF files: 'demo-F32.gguf', 'demo-Q8_0.gguf' \(expected a file's"):
        resolve_model(str(folder))
    with pytest.raises(ModelError, match=r"no GGUF file's name ends in 'Q4_K_M' \(there are 'demo-F32.gguf'"):
        resolve_model(f"{folder}:Q4_K_M")
    (tmp_path / "only-00001-of-00002.gguf").touch()
    (tmp_path / "only-00002-of-00002.gguf").touch()
    assert resolve_model(str(tmp_path)) == tmp_path / "only-00001-of-00002.gguf"
    (tmp_path / "model.safetensors").touch()
    assert resolve_model(str(tmp_path)) == tmp_path


def test_verify_compares_a_file_with_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_checkpoint(tmp_path, "qwen2")
    write_gguf(tmp_path, tmp_path / "m.gguf", "F16")
    words = ["--skip-tokenizer-init", "--prompt-len", "16", "--num-tokens", "8"]
    assert main(["verify", str(tmp_path / "m.gguf"), *words]) == 0
    assert "it was given the weights as this package reads them" in capsys.readouterr().out

"""What commands say of GPUs: that there is none, that packages are missing, what only GPUs or only CPUs can do."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from quire.checkpoint.hf_config import load_model_info
from quire.cli import serve
from quire.cli.main import main
from quire.config import EngineConfig
from quire.engine import resolve as resolving
from quire.engine.resolve import resolve_config
from quire.errors import ConfigError
from quire.kernels.create import create_backend
from quire.kernels.gpu import probe
from quire.kernels.gpu.probe import GPU
from tests.helpers.checkpoints import write_plain

CARD = GPU(0, "a card", 80 * 2**30, (9, 0))
NONE_FOUND = "error: device 'cuda' needs an NVIDIA GPU and its driver; none was found\n"
SMALL = ["--max-model-len", "32", "--num-gpu-blocks-override", "8"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    return write_plain(path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> list[GPU]:
    """The GPUs of this machine: none, until a test adds some; and no interpreter in their place."""
    gpus: list[GPU] = []
    monkeypatch.setattr(probe, "find_gpus", lambda: gpus)
    monkeypatch.setattr(probe, "interpreted", lambda: False)
    monkeypatch.setattr(serve, "has_driver", lambda: bool(gpus))
    return gpus


@pytest.mark.parametrize(
    "words",
    [
        ["generate", "-p", "x"],
        ["plan"],
        ["verify"],
        ["bench", "latency"],
        ["serve", "--port", "0"],
        ["convert", "{model}", "{out}", "--format", "packed"],
    ],
    ids=lambda words: words[0],
)
def test_without_a_gpu_every_command_says_so_in_one_line(
    words: list[str], folder: Path, tmp_path: Path, machine: list[GPU], capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(model=folder, out=tmp_path / "out") for word in words]
    assert main([*words, "--device", "cuda"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", NONE_FOUND)


def test_a_gpu_that_is_too_old_is_named(machine: list[GPU], capsys: pytest.CaptureFixture[str]) -> None:
    machine.append(GPU(0, "an old card", 2**33, (7, 5)))
    assert main(["generate", "-p", "x", "--device", "cuda"]) == 2
    assert "capability 8.0 or newer; an old card has 7.5" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("missing", "words"), [(("torch", "triton"), "torch and triton, which are"), (("triton",), "triton, which is")]
)
def test_missing_packages_are_named_with_their_extra(
    missing: tuple[str, ...],
    words: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in missing else find(name, *rest))
    for command in (["generate", "-p", "x"], ["plan"]):
        assert main([*command, "--device", "cuda"]) == 2
        assert f"needs {words} not installed: pip install 'quire[gpu]'" in capsys.readouterr().err
    assert resolve_config(EngineConfig.from_kwargs(model=str(folder)), load_model_info(folder)).device.device == "cpu"


def test_a_pytorch_for_cpus_is_not_taken_for_one_that_knows_gpus(
    folder: Path, machine: list[GPU], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.append(CARD)
    versions, version = {"torch": "2.11.0+cpu"}, importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: versions.get(name) or version(name))
    assert main(["generate", "-p", "x", "--device", "cuda"]) == 2
    assert "installed is 2.11.0+cpu, which was built for CPUs" in capsys.readouterr().err
    assert resolve_config(EngineConfig.from_kwargs(model=str(folder)), load_model_info(folder)).device.device == "cpu"
    versions["torch"] = "2.11.0+cu130"
    assert probe.usable_gpu() == CARD
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match="cannot use it; it was built without CUDA, or for a newer driver"):
        create_backend("cuda", "float32", "float32")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--device", "cuda", "--simd-level", "avx2"],
            "simd_level: 'avx2' is not allowed; device 'cuda' has no levels",
        ),
        (["--device", "cuda", "--tensor-parallel-size", "2"], "2 is not allowed; it must be at most 1"),
        (["--device", "cpu", "--quantization", "fp8"], "quantization: fp8 needs a GPU (--device cuda)"),
        (["--device", "cpu", "--kv-cache-dtype", "fp8"], "kv_cache_dtype: fp8 needs a GPU (--device cuda)"),
    ],
    ids=lambda value: value[2] if isinstance(value, list) else "",
)
def test_what_a_device_cannot_do_is_refused_by_name(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "-p", "x", *SMALL, *words]) == 2
    assert said in capsys.readouterr().err


def test_packed_weights_are_for_the_cpu_of_a_machine_with_a_gpu(
    folder: Path,
    tmp_path: Path,
    machine: list[GPU],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(resolving, "usable_gpu", lambda: CARD)
    machine.append(CARD)
    plain = EngineConfig.from_kwargs(model=str(folder))
    assert resolve_config(plain, load_model_info(folder)).device.device == "cuda"
    out = tmp_path / "packed"
    assert main(["convert", str(folder), str(out), "--skip-tokenizer-init"]) == 0
    packed = EngineConfig.from_kwargs(model=str(out))
    assert resolve_config(packed, load_model_info(out)).device.device == "cpu"
    capsys.readouterr()
    monkeypatch.setattr(probe, "interpreted", lambda: True)
    words = ["convert", str(folder), str(tmp_path / "other"), "--device", "cuda", "--skip-tokenizer-init"]
    machine.clear()
    assert main(words) == 2
    assert "packed weights are for the CPU (device is cuda)" in capsys.readouterr().err


def test_what_only_loading_can_turn_weights_into_is_not_written_as_something_else(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--format", "safetensors", "--quantization", "fp8", "--skip-tokenizer-init"]
    assert main(["convert", str(folder), str(tmp_path / "out"), *words]) == 2
    assert "quantization: fp8 cannot be written (allowed: int8, int8-weight-only, int4)" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(bool(probe.find_gpus()), reason="there is a GPU")
def test_this_machine_has_no_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(probe, "interpreted", lambda: False)
    assert main(["generate", "-p", "x", "--device", "cuda"]) == 2
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("", NONE_FOUND)


@pytest.mark.skipif(bool(probe.find_gpus()), reason="there is a GPU")
def test_looking_for_a_gpu_imports_neither_torch_nor_triton(folder: Path) -> None:
    code = """
import sys
from quire.config import EngineConfig
from quire.engine.resolve import load_info, resolve_config
config = EngineConfig.from_kwargs(model=sys.argv[1])
settled = resolve_config(config, load_info(config))
print(settled.device.device, settled.scheduler.async_scheduling, sorted({"torch", "triton"} & sys.modules.keys()))
"""
    done = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, timeout=120)
    assert done.stdout == "cpu False []\n", done.stderr

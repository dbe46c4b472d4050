"""Names become folders; a name that cannot says why in one line."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from quire.checkpoint.folder import DOWNLOAD_PATTERNS, IGNORE_PATTERNS, resolve_model
from quire.demo import demo_model_path
from quire.errors import ModelError


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, **options)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_the_model_in_the_box() -> None:
    assert resolve_model("quire-demo") == demo_model_path()


def test_a_local_folder(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


def test_a_folder_below_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "m").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/m") == tmp_path / "m"


@pytest.mark.parametrize("name", ["./nothing", "/nothing/here", "a/b/c", "", "../x", "a b", "x\nERROR fake log line"])
def test_neither_a_folder_nor_an_id(name: str) -> None:
    expected = "(expected a model folder, a GGUF file, a Hugging Face id like owner/name, or quire-demo)"
    assert f"no such folder {expected}" in refusal(name)
    for absent in ("./absent.gguf", "absent.gguf"):
        assert f"no such file {expected}" in refusal(absent)


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").touch()
    assert "is a file (expected a model folder" in refusal(str(tmp_path / "model.onnx"))


def test_a_gguf_file_needs_its_ending(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"GGUF\x03")
    assert "give it a name that ends in .gguf" in refusal(str(tmp_path / "model.bin"))


def test_a_name_too_long_for_the_system() -> None:
    assert "File name too long" in refusal("a" * 5000)


def fill_cache(cache: Path, repo: str, commit: str = "c0ffee" * 6 + "beef") -> Path:
    """Lay out a hub cache that holds one snapshot."""
    root = cache / f"models--{repo.replace('/', '--')}"
    snapshot = root / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(commit)
    return snapshot


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set what HF_HUB_OFFLINE=1 sets."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def test_a_cached_model_is_found_offline(tmp_path: Path, offline: None) -> None:
    snapshot = fill_cache(tmp_path, "owner/tiny")
    assert resolve_model("owner/tiny", download_dir=str(tmp_path)) == snapshot
    assert resolve_model("owner/tiny", download_dir=str(tmp_path), revision=snapshot.name) == snapshot


def test_offline_and_not_cached(tmp_path: Path, offline: None) -> None:
    message = refusal("owner/tiny", download_dir=str(tmp_path))
    assert message.startswith("owner/tiny: no such local folder, not in the Hugging Face cache, and the hub cannot")
    assert message.endswith("(offline mode is on)")


def http_error(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    """Make the error that huggingface_hub raises for such an answer."""
    transport = import_module(errors.HfHubHTTPError.__bases__[0].__module__.split(".")[0])
    request = transport.Request("GET", "https://hub.invalid/api/models/owner/tiny")
    return kind("first line\n\nand more", response=transport.Response(status, request=request))


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (lambda: http_error(errors.RepositoryNotFoundError, 404), "neither a local folder nor a model on the Hugging"),
        (lambda: http_error(errors.RepositoryNotFoundError, 401), "(a private one needs HF_TOKEN)"),
        (lambda: http_error(errors.GatedRepoError, 403), "is restricted (expected a token with access"),
        (lambda: http_error(errors.RevisionNotFoundError, 404), "owner/tiny@v2: no such revision"),
        (lambda: http_error(errors.HfHubHTTPError, 500), "the Hugging Face hub refused the download (first line)"),
        (lambda: errors.HFValidationError("bad id"), "nor a valid hub id (bad id)"),
        (lambda: errors.LocalEntryNotFoundError("no network"), "the hub cannot be asked (no network)"),
        (lambda: ConnectionError("reset by peer"), "download failed (reset by peer)"),
        (lambda: OSError(28, "No space left on device"), "download failed ([Errno 28] No space left on device)"),
    ],
)
def test_what_the_hub_may_answer(error: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(*args: Any, **kwargs: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub, "snapshot_download", answer)
    message = refusal("owner/tiny", revision="v2")
    assert message.startswith("owner/tiny@v2: ")
    assert words in message


def test_downloads_take_data_only() -> None:
    files = [
        "config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "modules.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "1_Pooling/config.json",
        "2_Dense/config.json",
        "2_Dense/model.safetensors",
        "2_Dense/pytorch_model.bin",
        "adapter/model.safetensors",
        "pytorch_model.bin",
        "modeling_evil.py",
        "onnx/model.safetensors",
        "original/consolidated.00.pth",
        "consolidated.safetensors",
        "README.md",
    ]
    chosen = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=DOWNLOAD_PATTERNS, ignore_patterns=IGNORE_PATTERNS
    )
    assert list(chosen) == files[:13]

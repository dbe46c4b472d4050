"""`quire pull`: a model from a hub on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.utils import enable_progress_bars

COMMIT = "c0ffee" * 6 + "beef"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "modeling_evil.py": b"boo", "README.md": b"hello"}


class FakeHub:
    """Holds one version of "owner/tiny", which needs a token if `token` is set, and keeps what it was asked."""

    def __init__(self) -> None:
        self.files = dict(FILES)
        self.token: str | None = None
        self.asked: list[str] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fake.asked.append(self.path)
                path = self.path.partition("?")[0]
                name = path.rpartition("/")[2]
                if "owner/tiny" not in path:
                    self._answer(404, b"", {"X-Error-Code": "RepoNotFound"})
                elif fake.token is not None and self.headers["authorization"] != f"Bearer {fake.token}":
                    self._answer(401, b"", {"X-Error-Code": "RepoNotFound"})
                elif "/revision/" in path and name not in ("main", "v1", COMMIT):
                    self._answer(404, b"", {"X-Error-Code": "RevisionNotFound"})
                elif "/revision/" in path:
                    siblings = [{"rfilename": file} for file in fake.files]
                    self._answer(200, json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": siblings}).encode())
                elif "/tree/" in path:
                    sizes = {file: len(data) for file, data in fake.files.items()}
                    tree = [{"type": "file", "path": f, "size": sizes[f], "oid": "0" * 40} for f in sizes]
                    self._answer(200, json.dumps(tree).encode())
                else:
                    self._answer(200, fake.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})

            do_HEAD = do_GET

            def _answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub in the place of Hugging Face's, with an empty cache: what HF_ENDPOINT and HF_HUB_CACHE set."""
    fake = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", fake.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", fake.url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    enable_progress_bars()  # other tests turn them off for the process
    yield fake
    fake.server.shutdown()
    fake.server.server_close()


def test_data_is_downloaded_once_and_the_path_printed(quire, hub):
    result = quire("pull", "owner/tiny")
    assert result.code == 0
    folder = Path(result.out.removesuffix("\n"))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert "%" in result.err  # the progress bar
    count = len([path for path in hub.asked if "/resolve/" in path])
    assert quire("pull", "owner/tiny").out == result.out
    assert len([path for path in hub.asked if "/resolve/" in path]) == count


def test_a_folder_and_a_revision_can_be_chosen(quire, hub, tmp_path):
    result = quire("pull", "owner/tiny", "--revision", "v1", "--download-dir", str(tmp_path / "here"))
    assert result.code == 0 and result.out.startswith(str(tmp_path / "here"))
    assert any("/revision/v1" in path for path in hub.asked)


def test_a_token_opens_what_is_private(quire, hub, monkeypatch):
    hub.token = "hf_x"
    refused = quire("pull", "owner/tiny")
    assert refused.code == 2 and "a private one needs HF_TOKEN" in refused.err
    assert quire("pull", "owner/tiny", "--token", "hf_x").code == 0
    monkeypatch.setenv("HF_TOKEN", "hf_y")
    assert quire("pull", "owner/tiny", "--revision", "v1").code == 2
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    assert quire("pull", "owner/tiny", "--revision", "v1").code == 0


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["owner/other"], "owner/other: neither a local folder nor a model on the Hugging Face hub"),
        (["owner/tiny", "--revision", "v9"], "owner/tiny@v9: no such revision on the Hugging Face hub"),
        (["a b"], "'a b': no such folder (expected a model folder, a GGUF file, a Hugging Face id like owner/name"),
        ([], "MODEL"),
    ],
)
def test_a_wrong_name_is_named_in_one_line(quire, hub, words, told):
    result = quire("pull", *words)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert told in result.err


def test_without_a_network_it_says_so(quire, hub, monkeypatch):
    hub.server.shutdown()
    hub.server.server_close()
    result = quire("pull", "owner/tiny")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "owner/tiny: no such local folder, not in the Hugging Face cache, and the hub cannot be asked" in result.err


def test_a_model_without_weights_that_can_be_loaded_is_refused(quire, hub):
    del hub.files["model.safetensors"]
    hub.files["pytorch_model.bin"] = b"pickle"
    result = quire("pull", "owner/tiny")
    assert result.code == 2
    assert result.err.endswith("owner/tiny: no weights that Quire loads (expected *.safetensors or *.gguf)\n")

"""Table I: bad options of `quire serve`: exit code 2, one line with option, value and what is allowed, before imports.

All rows are run by one child process, which tells after each of them what it has imported.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.server import serve
from tests.meta.source import ENVIRONMENT

HEAVY = ("torch", "numba", "numpy", "fastapi", "uvicorn", "zmq", "tokenizers", "transformers")
TINY = ("--max-model-len", "64", "--num-gpu-blocks-override", "32", "--num-threads", "1")
LONG_PATH = "x" * 120
# Files that the rows name; "@" in a row is their folder.
FILES = {
    "empty": "",
    "comments": "# nothing\n\n",
    "unknown.yaml": "prot: 1\n",
    "twice.yaml": "port: 1\nport: 2\n",
    "broken.yaml": "port: [\n",
    "code.yaml": "!!python/object/apply:os.system ['true']\n",
    "no_list.yaml": "model: a\n",
    "no_model.yaml": "- dtype: float32\n",
    "same.yaml": "- {model: a, served_model_name: x}\n- {model: b, served_model_name: x}\n",
    "port.yaml": "- {model: a, port: 1}\n",
    "field.yaml": "- {model: a, dtyp: float32}\n",
    "pinned.yaml": "- {model: a, pinned: true}\n- {model: b, pinned: true}\n",
}
ROWS: list[tuple[list[str], list[str]]] = [
    (["--port", "99999"], ["--port", "99999", "65535"]),
    (["--port", "abc"], ["--port", "'abc'", "integer"]),
    (["--port", "1", "--port", "1"], ["--port", "more than once"]),
    (["--host", "192.0.2.1"], ["192.0.2.1:8000"]),
    (["--max-model-len", "0"], ["--max-model-len", "0", "at least 1"]),
    (["--max-model-len", "-1"], ["--max-model-len", "-1", "at least 1"]),
    (["--max-num-seqs", "0"], ["--max-num-seqs", "0", "at least 1"]),
    (["--dtype", "banana"], ["--dtype", "banana", "bfloat16"]),
    (["--tensor-parallel-size", "3"], ["--tensor-parallel-size", "3"]),
    (["--kv-cache-memory-bytes", "1XB"], ["--kv-cache-memory-bytes", "1XB"]),
    (["--kv-cache-memory-bytes", "1MiB", "--num-gpu-blocks-override", "3"], ["kv_cache_memory_bytes", "contradicts"]),
    (["--api-key", ""], ["--api-key", "non-empty"]),
    (["--unknown-flag"], ["unknown option --unknown-flag"]),
    (["--max-model-length", "7"], ["--max-model-length", "did you mean --max-model-len?"]),
    (["--enable-prefix-caching", "--no-enable-prefix-caching"], ["more than once"]),
    (["one", "two"], ["unexpected argument 'two'"]),
    (["--served-model-name", "a", "--served-model-name", "a"], ["served_model_name", "'a'", "twice"]),
    (["--config", "@/nope.yaml"], ["--config", "nope.yaml", "No such file"]),
    (["--config", "@/unknown.yaml"], ["unknown.yaml", "unknown option prot", "did you mean port?"]),
    (["--config", "@/twice.yaml"], ["twice.yaml", "port", "twice"]),
    (["--config", "@/broken.yaml"], ["broken.yaml", "not valid YAML"]),
    (["--config", "@/code.yaml"], ["code.yaml", "not valid YAML"]),
    (["--config", "@"], ["--config", "directory"]),
    (["--request-timeout", "0"], ["--request-timeout", "0", "at least 0.01"]),
    (["--max-ttft", "nan"], ["--max-ttft", "nan"]),
    (["--max-engine-restarts", "-1"], ["--max-engine-restarts", "-1", "at least 0"]),
    (["--engine-stall-timeout", "1"], ["--engine-stall-timeout", "1", "at least 2"]),
    (["--max-connections", "0"], ["--max-connections", "0", "at least 1"]),
    (["--max-body-bytes", "5"], ["--max-body-bytes", "5", "at least 1024"]),
    (["--uds", LONG_PATH], ["uds", "107 bytes"]),
    (["--uds", "@/empty"], ["uds", "is no socket"]),
    (["--uds", "@/s", "--port", "1"], ["uds contradicts port"]),
    (["--api-key-file", "@/nope"], ["api_key_file", "does not exist"]),
    (["--api-key-file", "@/empty"], ["api_key_file", "no keys"]),
    (["--api-key-file", "@/comments"], ["api_key_file", "no keys"]),
    (["--allowed-origins", "evil"], ["allowed_origins", "'evil'", "https://example.org"]),
    (["--allow-credentials"], ["allow_credentials needs allowed_origins"]),
    (["--allowed-origins", "*", "--allow-credentials"], ["allow_credentials contradicts allowed_origins"]),
    (["--ssl-certfile", "@/empty"], ["ssl_certfile", "ssl_keyfile"]),
    (["--ssl-certfile", "@/empty", "--ssl-keyfile", "@/empty"], ["ssl_certfile", "no certificate"]),
    (["--ssl-cert-reqs", "required"], ["ssl_cert_reqs", "ssl_ca_certs"]),
    (["--engine", "inline", "--api-server-count", "2"], ["api_server_count 2 contradicts engine inline"]),
    (["--admin-api-key", "x"], ["admin_api_key needs enable_admin_endpoints or profiler_dir"]),
    (["--enable-admin-endpoints", "--host", "0.0.0.0"], ["enable_admin_endpoints needs api_key"]),
    (["--models", "@/nope.yaml"], ["--models", "nope.yaml", "No such file"]),
    (["--models", "@/empty"], ["empty", "list of models"]),
    (["--models", "@/no_list.yaml"], ["no_list.yaml", "list of models"]),
    (["--models", "@/no_model.yaml"], ["no_model.yaml: entry 1", "model is missing"]),
    (["--models", "@/same.yaml"], ["same.yaml: entries 1 and 2 are both called x"]),
    (["--models", "@/port.yaml"], ["port.yaml: entry 1", "port is an option of the server"]),
    (["--models", "@/field.yaml"], ["field.yaml: entry 1", "unknown option dtyp", "did you mean dtype?"]),
    (["--models", "@/pinned.yaml", "--max-loaded-models", "1"], ["2 models", "max_loaded_models allows 1"]),
    (["--models", "@/same.yaml", "--model", "a"], ["models contradicts model"]),
    (["--max-loaded-models", "2"], ["max_loaded_models needs models"]),
    (["--root-path", "llm"], ["root_path", "'llm'", "/llm"]),
    (["--hf-overrides", "{"], ["--hf-overrides", "JSON"]),
    (["--log-format", "xml"], ["--log-format", "xml", "json"]),
]
CHILD = """
import contextlib, io, json, sys
from quire.cli.main import main
for words in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["serve", *words])
    print(json.dumps([code, out.getvalue(), err.getvalue(), [name for name in HEAVY if name in sys.modules]]))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("flags")
    for name, text in FILES.items():
        (made / name).write_text(text)
    return made


@pytest.fixture(scope="module")
def results(folder: Path) -> list[list[Any]]:
    words = json.dumps([[word.replace("@", str(folder)) for word in row] for row, _ in ROWS])
    code = CHILD.replace("HEAVY", repr(HEAVY))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=ENVIRONMENT,
        input=words,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(ROWS)
    return found


@pytest.mark.parametrize(
    "number", range(len(ROWS)), ids=[f"I{n} {' '.join(w)}"[:60] for n, (w, _) in enumerate(ROWS, 1)]
)
def test_table_i_flags(results: list[list[Any]], number: int) -> None:
    code, out, err, heavy = results[number]
    assert (code, out, heavy) == (2, "", []), err
    assert err.startswith("error: ") and err.count("\n") == 1
    assert err.rstrip("\n").isprintable()
    for part in ROWS[number][1]:
        assert part in err, err


def test_an_address_in_use_has_an_exit_code_of_its_own(tmp_path: Path) -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        words = [sys.executable, "-m", "quire", "serve", "--port", port]
        done = subprocess.run(words, env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (98, f"error: address already in use: 127.0.0.1:{port}\n")


def completes(tmp_path: Path, *words: str) -> None:
    """Check that a server serves."""
    with serve(tmp_path / "log", *TINY, *words) as server:
        model = json.loads(server.get("/v1/models")[1])["data"][0]["id"]
        status, answer = server.post("/v1/completions", {"model": model, "prompt": "KING", "max_tokens": 2})
        assert status == 200, answer


@pytest.mark.slow
def test_no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "USER", "LOGNAME"):
        monkeypatch.delenv(name, raising=False)
    completes(tmp_path)


@pytest.mark.slow
def test_a_home_and_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/proc is read-only for root, too."""
    monkeypatch.setenv("HOME", "/proc/nobody")
    monkeypatch.chdir("/proc")
    completes(tmp_path)


@pytest.mark.slow
def test_no_threads_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "0")
    completes(tmp_path)


@pytest.mark.slow
def test_a_path_in_utf8_where_the_language_is_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.demo import demo_model_path

    folder = tmp_path / "mod\u00e8le \u540d"
    folder.symlink_to(demo_model_path())
    for name in ("LC_ALL", "LANG"):
        monkeypatch.setenv(name, "C")
    monkeypatch.delenv("PYTHONUTF8", raising=False)
    completes(tmp_path, str(folder))


def limited(limit: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a server under a limit of the shell's, until it ends."""
    command = f'ulimit {limit}; exec "$@"'
    return subprocess.run(
        ["bash", "-c", command, "bash", sys.executable, "-m", "quire", "serve", "--port", "0", *TINY, *words],
        env=ENVIRONMENT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [250_000, 400_000])
def test_too_little_address_space(kilobytes: int) -> None:
    done = limited(f"-v {kilobytes}")
    assert done.returncode in (1, 2, 70), done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: "), done.stderr


@pytest.mark.slow
def test_no_shared_memory_of_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server in a name space of its own, in which /dev/shm is an empty folder that nobody may write to."""
    mounted = 'mount -t tmpfs -o ro none /dev/shm && exec "$@"'
    tried = subprocess.run(["unshare", "-m", "sh", "-c", mounted, "sh", "true"], capture_output=True, check=False)
    if tried.returncode:
        pytest.skip("it takes a name space of one's own")
    launcher = tmp_path / "python"
    launcher.write_text(f"#!/bin/sh\nexec unshare -m sh -c '{mounted}' sh {sys.executable} \"$@\"\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    completes(tmp_path)

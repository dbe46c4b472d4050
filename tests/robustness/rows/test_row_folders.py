"""Table H: `quire serve` of bad model folders: exit code 2, one line that names the file, nothing run, nothing left.

HTTP comes up while a model loads, so the port is open for a moment; but the server never says that it is ready.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.errors import QuireError
from quire.frontend.llm import LLM
from tests.helpers.server import Server, serve
from tests.meta.source import ENVIRONMENT
from tests.robustness.rows.bad_folders import MARK, ROWS, WEIGHTS, Folder, write_good

OPTIONS = ("--num-threads", "1", "--kv-cache-memory-bytes", "1MiB")
SECONDS = 120  # they take one or two, on a machine with nothing else to do
AT_A_TIME = 2
REFUSED = [row for row in ROWS if row.words]
SERVED = [row for row in ROWS if not row.words]
QUICK = ("H1", "H11", "H19")  # refused before anything starts, in the engine, in the front; two processes take seconds
Done = subprocess.CompletedProcess[str]


def is_slow(row: Folder) -> bool:
    """Whether a row is refused where one of `QUICK` is; in this process it is tried all the same."""
    return row.name not in QUICK


def is_moot(row: Folder) -> bool:
    """Whether a row is none for this user."""
    return row.name == "H22f" and os.geteuid() == 0


def title(row: Folder) -> str:
    return f"{row.name} {row.what}"


def params(rows: list[Folder]) -> list[object]:
    return [pytest.param(row, id=title(row), marks=[pytest.mark.slow] if is_slow(row) else []) for row in rows]


def run(folder: Path, row: Folder) -> Done:
    """Run the command until it ends; nothing of its session may outlive it."""
    words = [sys.executable, "-m", "quire", "serve", "--port", "0", *OPTIONS, *row.options, str(folder)]
    with subprocess.Popen(
        words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            out, err = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
    return subprocess.CompletedProcess(words, process.returncode, out, err)


@pytest.fixture(scope="module")
def results(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, tuple[Path, Future[Done]]]]:
    """What comes of each row that is asked for; a few at a time are on their way while the first ones are looked at."""
    wanted = {item.callspec.params["row"].name for item in request.session.items if _is_refusal(item)}
    parent = tmp_path_factory.mktemp("folders")
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        begun = {}
        for row in REFUSED:
            if row.name in wanted and not is_moot(row):
                folder = write_good(parent / row.name)
                row.spoil(folder)
                begun[row.name] = folder, pool.submit(run, folder, row)
        yield begun
        pool.shutdown(cancel_futures=True)


def _is_refusal(item: pytest.Item) -> bool:
    return isinstance(item, pytest.Function) and item.originalname == "test_table_h_folders"


@pytest.mark.parametrize("row", params(REFUSED))
def test_table_h_folders(results: dict[str, tuple[Path, Future[Done]]], row: Folder) -> None:
    if is_moot(row):
        pytest.skip("root may read everything")
    folder, future = results[row.name]
    done = future.result()
    assert done.returncode == 2, done.stderr
    assert "ready" not in done.stdout
    assert "Traceback" not in done.stderr
    *_, last = done.stderr.splitlines()
    assert last.startswith("error: ") and last.isprintable()
    assert done.stderr.count("error: ") == 1
    for word in row.words:
        assert word in last, last
    assert not (folder / MARK).exists()


@pytest.mark.parametrize("row", [row for row in REFUSED if is_slow(row)], ids=title)
def test_table_h_folders_in_this_process(tmp_path: Path, row: Folder) -> None:
    if is_moot(row):
        pytest.skip("root may read everything")
    folder = write_good(tmp_path / row.name)
    row.spoil(folder)
    options = {flag.removeprefix("--").replace("-", "_"): value for flag, value in batched(row.options)}
    with pytest.raises(QuireError) as caught:
        LLM(model=str(folder), num_threads=1, kv_cache_memory_bytes=1 << 20, **options)
    for word in row.words:
        assert word in str(caught.value)
    assert str(caught.value).isprintable()
    assert not (folder / MARK).exists()


def batched(words: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return flags with their values."""
    return list(zip(words[::2], words[1::2], strict=True))


def ask(server: Server, path: str = "/v1/completions", **body: object) -> tuple[int, str]:
    """Return status and text, or message, of an answer."""
    given = {"max_tokens": 4, "temperature": 0, **body}
    status, answer = server.post(path, {"model": server.served, **given})  # type: ignore[attr-defined]
    if status != 200:
        return status, answer["error"]["message"]
    choice = answer["choices"][0]
    return status, choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.slow
@pytest.mark.parametrize("row", SERVED, ids=title)
def test_table_h_folders_that_are_served_all_the_same(tmp_path: Path, row: Folder) -> None:
    """What is odd in them is ignored, or only the requests that need it are refused."""
    folder = write_good(tmp_path / row.name)
    row.spoil(folder)
    with serve(tmp_path / "log", *OPTIONS, *row.options, str(folder)) as server:
        server.served = row.name  # type: ignore[attr-defined]
        assert ask(server, prompt=[5, 6, 7])[0] == 200
        chat = ask(server, "/v1/chat/completions", messages=[{"role": "user", "content": "hello"}])
        if row.name == "H17":
            assert chat[0] == 400 and ">= vocab 160" in chat[1]
        elif row.name.startswith("H20"):
            assert chat[0] == 400 and "template" in chat[1]
            assert "root:" not in chat[1] and str(tmp_path) not in chat[1]
        else:
            assert chat[0] == 200
        assert ask(server, prompt=[5, 6, 7])[0] == 200
    assert not (folder / MARK).exists()
    if row.name in ("H10", "H13b"):
        assert ("model.vision.weight" if row.name == "H10" else "auto_map") in (tmp_path / "log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_h24_weights_that_are_cut_off_under_the_server(tmp_path: Path, dtype: str) -> None:
    folder = write_good(tmp_path / "H24")
    with serve(tmp_path / "log", *OPTIONS, "--dtype", dtype, str(folder)) as server:
        server.served = "H24"  # type: ignore[attr-defined]
        before = ask(server, prompt=[5, 6, 7], max_tokens=20)
        os.truncate(folder / WEIGHTS, 0)
        after = ask(server, prompt=[5, 6, 7], max_tokens=20)
        other = ask(server, prompt=list(range(4, 260)[:200]), max_tokens=4)
        assert server.metric("quire:engine_restarts_total") == 0
    assert before == after and before[0] == other[0] == 200


def test_no_row_is_missing() -> None:
    numbers = {row.name.rstrip("abcdef") for row in ROWS} | {"H24"}
    assert numbers == {f"H{number}" for number in range(1, 25)}

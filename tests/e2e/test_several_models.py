"""Several models in one server, as a user meets them: requests to all, though not all fit into memory at a time."""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from quire import LLM, SamplingParams
from tests.helpers.checkpoints import plain_tensors, write_checkpoint, write_plain
from tests.helpers.server import Server, serve

MIB = 2**20
PROMPTS = ([11, 12, 13], [5] * 40, [99, 3, 50, 7, 8], [150])  # tokens that all of these models know
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two random models beside the built-in one."""
    root = tmp_path_factory.mktemp("models")
    for seed, name in enumerate(("one", "two")):
        (root / name).mkdir()
        write_plain(root / name, plain_tensors(seed))
    return {name: root / name for name in ("one", "two")}


@pytest.fixture(scope="module")
def alone(folders: dict[str, Path]) -> dict[str, list[str]]:
    """What each model answers with nobody beside it."""
    return answers_alone(folders)


def answers_alone(folders: dict[str, Path]) -> dict[str, list[str]]:
    """Return what each model, and the built-in one, answers to the prompts."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    found = {}
    for name, folder in {"demo": "quire-demo", **folders}.items():
        with LLM(str(folder), tokenizer="quire-demo", num_gpu_blocks_override=64) as llm:
            found[name] = [output.outputs[0].text for output in llm.generate(PROMPTS, params, use_tqdm=False)]
    assert len({tuple(texts) for texts in found.values()}) == 3
    return found


def model_file(path: Path, folders: dict[str, Path]) -> Path:
    """Write a file of these models and the built-in one, which is pinned."""
    entries = [
        {"model": "quire-demo", "served_model_name": "demo", "pinned": True},
        *({"model": str(folder), "tokenizer": "quire-demo"} for folder in folders.values()),
    ]
    path.write_text(json.dumps(entries))  # which is YAML
    return path


def complete(server: Server, model: str, prompt: list[int]) -> str:
    body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    return str(answer["choices"][0]["text"])


def statuses(server: Server) -> dict[str, str]:
    data = json.loads(server.get("/v1/models")[1])["data"]
    return {model["id"]: model["status"]["value"] for model in data}


def ask_at_random(server: Server, alone: dict[str, list[str]], count: int) -> None:
    """Send requests to all models from several threads; all must succeed, with the text that the model has alone."""
    dice = random.Random(0)
    chosen = [(dice.choice(sorted(alone)), dice.randrange(len(PROMPTS))) for _ in range(count)]
    with ThreadPoolExecutor(6) as threads:
        texts = list(threads.map(lambda ask: complete(server, ask[0], PROMPTS[ask[1]]), chosen))
    assert texts == [alone[model][prompt] for model, prompt in chosen]


def test_three_models_with_room_for_two(folders: dict[str, Path], alone: dict[str, list[str]], tmp_path: Path) -> None:
    models = model_file(tmp_path / "models.yaml", folders)
    options = ("--models", str(models), "--max-loaded-models", "2", "--engine", "inline", "--num-threads", "1")
    with serve(tmp_path / "log.txt", *options) as server:
        assert statuses(server) == {"demo": "loaded", "one": "unloaded", "two": "unloaded"}
        described = json.loads(server.get("/v1/models/two")[1])
        assert described["max_model_len"] == 256, "known without loading it"
        ask_at_random(server, alone, 12)
        assert complete(server, "one", PROMPTS[0]) == alone["one"][0]
        assert statuses(server) == {"demo": "loaded", "one": "loaded", "two": "unloaded"}
        status, answer = server.post("/v1/completions", {"model": "other", "prompt": "x"})
        assert (status, answer["error"]["code"]) == (404, "model_not_found")
        assert "demo, one, two" in answer["error"]["message"]
        log = (tmp_path / "log.txt").read_text()
    assert log.count("model demo: loaded") == 1
    assert "model demo: unloaded" not in log
    assert log.count("model two: unloaded") >= 1


def wait_for(condition: Callable[[], bool], seconds: float = 30.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
def test_memory_of_models_that_sleep_or_are_unloaded_is_free(folders: dict[str, Path], tmp_path: Path) -> None:
    """Engines in processes of their own: small when asleep, gone when unloaded, and back again."""
    models = model_file(tmp_path / "models.yaml", folders)
    options = ("--models", str(models), "--enable-admin-endpoints", "--kv-cache-memory-bytes", "48MiB")
    with serve(tmp_path / "log.txt", *options) as server:
        (pid,) = server.children()
        engine = psutil.Process(pid)
        before = complete(server, "demo", PROMPTS[0])
        for _ in range(3):  # have many blocks written
            server.post(
                "/v1/completions",
                {"model": "demo", "prompt": [[7 + i] * 900 for i in range(16)], "max_tokens": 1},
            )
        full = engine.memory_info().rss
        assert server.post("/sleep?model=demo&level=1", None) == (200, {"model": "demo", "status": "sleeping"})
        assert json.loads(server.get("/is_sleeping?model=demo")[1]) == {"is_sleeping": True}
        assert engine.memory_info().rss < full - 30 * MIB
        assert complete(server, "demo", PROMPTS[0]) == before, "it wakes up with the next request"
        assert statuses(server)["demo"] == "loaded"
        assert server.children() == [pid]
        assert server.post("/v1/models/demo/unload", None)[0] == 200
        assert wait_for(lambda: server.children() == [])
        assert statuses(server)["demo"] == "unloaded"
        assert complete(server, "demo", PROMPTS[0]) == before
        # Stopped while a model is being loaded, the server ends, and leaves nothing behind.
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(server.post, "/v1/models/one/load", None)
            assert wait_for(lambda: statuses(server)["one"] == "loading")
            children = server.children()
            server.process.send_signal(signal.SIGTERM)
            assert asked.result()[0] in (200, 503)
        assert server.process.wait(60) == 0
    assert not any(psutil.pid_exists(child) for child in children)


@pytest.mark.slow
def test_three_models_of_several_families_in_processes(tmp_path: Path) -> None:
    folders = {
        "llama": write_checkpoint(tmp_path / "llama", "llama"),
        "gpt2": write_checkpoint(tmp_path / "gpt2", "gpt2", seed=1),
    }
    alone = answers_alone(folders)
    models = model_file(tmp_path / "models.yaml", folders)
    with serve(tmp_path / "log.txt", "--models", str(models), "--max-loaded-models", "2") as server:
        for _ in range(3):
            ask_at_random(server, alone, 60)
            assert len(server.children()) <= 2

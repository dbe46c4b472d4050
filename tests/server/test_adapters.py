"""LoRA adapters of a server: loaded, listed, named in the place of the model, unloaded; what goes wrong on the way."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from quire.checkpoint.folder import resolve_model
from quire.config import SERVER_GROUPS, EngineConfig
from quire.errors import ConfigError
from quire.frontend.adapters import AdapterRegistry, LoRAModule, parse_modules
from tests.helpers.adapters import factors, read_tensors, write_adapter
from tests.helpers.faults import engine_pid, is_ready, load, seconds_until
from tests.helpers.live_server import LiveServer
from tests.helpers.server import serve

PROMPT: dict[str, Any] = {"prompt": "KING HENRY:", "max_tokens": 8, "temperature": 0}


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters of the built-in model."""
    folder, weights = tmp_path_factory.mktemp("adapters"), read_tensors(resolve_model("quire-demo"))
    return {
        name: write_adapter(folder / name, factors(weights, ("q_proj", "down_proj"), rank=4, seed=seed), lora_alpha=1)
        for seed, name in enumerate(("one", "two", "three"))
    }


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    live = LiveServer(
        real=True,
        model="quire-demo",
        served_model_name="demo",
        engine="inline",
        enable_lora=True,
        max_loras=2,
        enable_admin_endpoints=True,
        num_threads=1,
        num_gpu_blocks_override=256,
    )
    yield live
    live.close()


@pytest.fixture
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def change(
    server: LiveServer, action: str, name: str, path: Path | str | None = None, **fields: Any
) -> tuple[int, str]:
    body = {"lora_name": name, **({} if path is None else {"lora_path": str(path)}), **fields}
    answer = server.http.post(f"/v1/{action}_lora_adapter", json=body)
    return answer.status_code, answer.text


def text_of(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(model=model, **PROMPT)
    assert answer.model == model
    return answer.choices[0].text


def test_loaded_listed_used_and_unloaded(server: LiveServer, client: openai.OpenAI, adapters: dict[str, Path]) -> None:
    base = text_of(client, "demo")
    with pytest.raises(openai.NotFoundError):
        text_of(client, "one")
    assert change(server, "load", "one", adapters["one"]) == (200, "Success: LoRA adapter 'one' added successfully.")
    assert change(server, "load", "two", adapters["two"])[0] == 200
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == ["demo", "one", "two"]
    assert (listed["two"].parent, listed["two"].root) == ("demo", "two")  # type: ignore[attr-defined]
    assert client.models.retrieve("two").id == "two"

    texts = {name: text_of(client, name) for name in ("one", "two", "demo")}
    assert len(set(texts.values())) == 3 and texts["demo"] == base
    with ThreadPoolExecutor(6) as pool:
        names = ["one", "demo", "two"] * 2
        assert list(pool.map(lambda name: text_of(client, name), names)) == [texts[name] for name in names]

    chat = client.chat.completions.create(
        model="one", messages=[{"role": "user", "content": "Who?"}], max_tokens=4, temperature=0
    )
    assert chat.model == "one"
    answer = client.responses.create(model="two", input="Who?", max_output_tokens=16, temperature=0)
    assert answer.model == "two"
    message = {"model": "one", "max_tokens": 4, "messages": [{"role": "user", "content": "Who?"}]}
    assert server.http.post("/v1/messages", json=message).json()["model"] == "one"
    assert server.http.post("/tokenize", json={"model": "one", "prompt": "Who?"}).json()["count"] > 0

    metrics = server.http.get("/metrics").text
    (line,) = re.findall(r"^vllm:lora_requests_info\{.*", metrics, re.MULTILINE)
    assert 'max_lora="2"' in line and 'waiting_lora_adapters=""' in line

    assert change(server, "unload", "one")[0] == 200
    with pytest.raises(openai.NotFoundError, match="this server has demo, two"):
        text_of(client, "one")
    assert text_of(client, "two") == texts["two"]
    assert change(server, "unload", "two")[0] == 200
    assert [model.id for model in client.models.list()] == ["demo"]


def test_another_adapter_under_the_same_name_is_another(
    server: LiveServer, client: openai.OpenAI, adapters: dict[str, Path]
) -> None:
    texts = []
    for name in ("one", "two", "one"):
        assert change(server, "load", "it", adapters[name])[0] == 200
        texts.append(text_of(client, "it"))
        assert change(server, "unload", "it")[0] == 200
    assert texts[0] == texts[2] != texts[1]


def test_a_stream_that_has_begun_goes_on_when_its_adapter_is_unloaded(
    server: LiveServer, client: openai.OpenAI, adapters: dict[str, Path]
) -> None:
    assert change(server, "load", "one", adapters["one"])[0] == 200
    options: dict[str, Any] = {**PROMPT, "max_tokens": 60, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(model="one", **options).choices[0].text
    stream = client.completions.create(model="one", stream=True, **options)
    pieces = [next(stream).choices[0].text]
    assert change(server, "unload", "one")[0] == 200
    pieces += [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == whole


def test_what_is_refused(server: LiveServer, adapters: dict[str, Path], tmp_path: Path) -> None:
    def refused(status: int, message: str, *args: Any, **fields: Any) -> None:
        got, text = change(server, *args, **fields)
        assert got == status and re.search(message, text), text

    refused(404, "nowhere: no such folder", "load", "bad", tmp_path / "nowhere")
    refused(404, "no such folder", "load", "bad", "../../etc/passwd")
    refused(404, "no such folder", "load", "bad", "/etc/\x00passwd".replace("\x00", "\\u0000"))
    refused(400, "adapter_config.json: No such file", "load", "bad", tmp_path)
    given = factors({"model.layers.0.mlp.up_proj.weight": np.zeros((704, 3))}, ("up_proj",), rank=4, seed=0)
    wrong = write_adapter(tmp_path / "wrong", given, layers_to_transform=0)
    refused(400, r"the adapter bad cannot be used: .*has shape \[4, 3\] \(expected \[4, 256\]", "load", "bad", wrong)
    refused(400, "lora_name is 'demo', which is taken already", "load", "demo", adapters["one"])
    refused(400, "load_inplace is not supported", "load", "bad", adapters["one"], load_inplace=True)
    refused(400, "lora_path", "load", "bad")
    refused(404, "there is no adapter 'bad'", "unload", "bad")
    refused(404, "the model 'other' does not exist", "load", "bad", adapters["one"], model="other")
    assert change(server, "load", "one", adapters["one"])[0] == 200
    refused(400, "taken already", "load", "one", adapters["two"])
    assert change(server, "unload", "one")[0] == 200


def test_the_routes_are_there_only_if_asked_for(server_without_admin: LiveServer) -> None:
    for action in ("load", "unload"):
        assert change(server_without_admin, action, "one", "/x")[0] == 404


@pytest.fixture
def server_without_admin() -> Iterator[LiveServer]:
    live = LiveServer()
    yield live
    live.close()


def test_without_enable_lora_there_are_none() -> None:
    live = LiveServer(enable_admin_endpoints=True, admin_api_key=["operator"])
    try:
        body = {"lora_name": "one", "lora_path": "/x"}
        assert live.http.post("/v1/load_lora_adapter", json=body).status_code == 401
        answer = live.http.post("/v1/load_lora_adapter", json=body, headers={"Authorization": "Bearer operator"})
        assert answer.status_code == 400 and "serves no LoRA adapters (--enable-lora)" in answer.text
    finally:
        live.close()


def test_modules_are_offered_from_the_start(adapters: dict[str, Path]) -> None:
    live = LiveServer(
        real=True,
        model="quire-demo",
        engine="inline",
        enable_lora=True,
        num_threads=1,
        num_gpu_blocks_override=64,
        lora_modules=[f"one={adapters['one']}"],
        start=False,
    )
    try:
        live.call(live.context.models.start)
        assert [model["id"] for model in live.http.get("/v1/models").json()["data"]] == ["fake", "one"]
        assert live.http.post("/v1/completions", json={**PROMPT, "model": "one"}).json()["model"] == "one"
    finally:
        live.close()


@pytest.mark.slow
def test_modules_from_the_start_survive_the_death_of_the_engine(adapters: dict[str, Path], tmp_path: Path) -> None:
    spec = f'{{"name": "two", "path": "{adapters["two"]}", "base_model_name": "quire-demo"}}'
    modules = ("--lora-modules", f"one={adapters['one']}", "--lora-modules", spec)
    with serve(tmp_path / "log.txt", "--enable-lora", *modules, "--num-threads", "1") as running:
        bodies = [
            {**PROMPT, "model": model, "max_tokens": 120, "ignore_eos": True, "stream": True}
            for model in ("one", "two", "quire-demo", "one")
        ]
        with load(running, bodies) as undisturbed:
            expected = [answer.text for answer in undisturbed.answers()]
        assert expected[0] == expected[3] and len(set(expected)) == 3
        with load(running, bodies) as disturbed:
            disturbed.wait_for_events(20)
            os.kill(engine_pid(running), signal.SIGKILL)
            seconds_until(lambda: not is_ready(running), most=10)
            assert [answer.text for answer in disturbed.answers()] == expected


def test_how_modules_are_written() -> None:
    assert parse_modules(["a=/x=y", '{"name": "b", "path": "/z", "base_model_name": "m"}']) == [
        LoRAModule("a", "/x=y"),
        LoRAModule("b", "/z", "m"),
    ]
    for bad, message in (
        ("a", "must be NAME=PATH or a JSON object"),
        ("=x", "must be NAME=PATH"),
        ("{", "must have name, path .*: Input data was truncated"),
        ('{"name": "b"}', "must have name, path"),
        ('{"name": "b", "path": 3}', "as texts"),
        ('{"name": "b", "path": "/x", "rank": "4"}', "must have name, path"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_modules([bad])
    with pytest.raises(ConfigError, match="'a' twice"):
        parse_modules(["a=/x", "a=/y"])
    with pytest.raises(ConfigError, match="lora_modules needs enable_lora"):
        EngineConfig.from_kwargs(groups=SERVER_GROUPS, lora_modules=["a=/x"])


def test_the_number_of_an_adapter_whose_front_dies_while_it_is_loaded_is_not_given_to_another(tmp_path: Path) -> None:
    config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, enable_lora=True)
    numbers: list[int] = []
    published: dict[str, Any] = {}

    class Death(Exception):
        """The front ends while the engine loads."""

    async def load(method: str, **arguments: Any) -> dict[str, Any]:
        numbers.append(arguments["lora_int_id"])
        if len(numbers) == 1:
            raise Death
        return {}

    def registry() -> AdapterRegistry:
        made = AdapterRegistry(config, load)
        made.on_change = published.update
        if published:
            made.restore(published)
        return made

    with pytest.raises(Death):
        asyncio.run(registry().load("x", str(tmp_path)))
    asyncio.run(registry().load("y", str(tmp_path)))
    assert numbers == [1, 2]
    assert [item.request.lora_name for item in registry().registered] == ["y"]

"""The app as such: importable without an engine, its routes, its description, the names of its model."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from quire.server.app import build_app
from quire.server.model_entry import served_names
from quire.server.protocol import ChatCompletionRequest, CompletionRequest, RequestModel
from quire.version import __version__
from tests.helpers.fake_engine import fake_async_llm
from tests.helpers.live_server import LiveServer, MakeServer, server_config

ROUTES = {
    "/v1/completions": {"post"},
    "/v1/chat/completions": {"post"},
    "/v1/responses": {"post"},
    "/v1/responses/{response_id}": {"get", "delete"},
    "/v1/responses/{response_id}/cancel": {"post"},
    "/v1/responses/{response_id}/input_items": {"get"},
    "/v1/responses/input_tokens": {"post"},
    "/v1/conversations": {"post"},
    "/v1/conversations/{conversation_id}": {"get", "post", "delete"},
    "/v1/conversations/{conversation_id}/items": {"post", "get"},
    "/v1/conversations/{conversation_id}/items/{item_id}": {"get", "delete"},
    "/v1/files": {"get", "post"},
    "/v1/files/{file_id}": {"get", "delete"},
    "/v1/files/{file_id}/content": {"get"},
    "/v1/batches": {"get", "post"},
    "/v1/batches/{batch_id}": {"get"},
    "/v1/batches/{batch_id}/cancel": {"post"},
    "/v1/messages": {"post"},
    "/v1/messages/batches": {"get", "post"},
    "/v1/messages/batches/{batch_id}": {"get", "delete"},
    "/v1/messages/batches/{batch_id}/cancel": {"post"},
    "/v1/messages/batches/{batch_id}/results": {"get"},
    "/v1/messages/count_tokens": {"post"},
    "/api/version": {"get"},
    "/api/tags": {"get"},
    "/api/ps": {"get"},
    "/api/show": {"post"},
    "/api/chat": {"post"},
    "/api/embed": {"post"},
    "/api/embeddings": {"post"},
    "/api/generate": {"post"},
    "/v1/embeddings": {"post"},
    "/pooling": {"post"},
    "/classify": {"post"},
    "/rerank": {"post"},
    "/v1/rerank": {"post"},
    "/v2/rerank": {"post"},
    "/score": {"post"},
    "/v1/score": {"post"},
    "/tokenize": {"post"},
    "/detokenize": {"post"},
    "/requests": {"get"},
    "/requests/{id}": {"get"},
    "/v1/models": {"get"},
    "/v1/models/{model_id}": {"get"},
    "/version": {"get"},
    "/metrics": {"get"},
    "/livez": {"get"},
    "/readyz": {"get"},
    "/ready": {"get"},
    "/health": {"get"},
    "/healthz": {"get"},
    "/ping": {"get", "post"},
    "/load": {"get"},
}


def test_an_app_needs_no_server_and_no_started_engine() -> None:
    async def main() -> list[int]:
        config = server_config()
        llm, client = fake_async_llm(config=config)
        app = build_app(llm, config)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as http:
            before = [(await http.get(path)).status_code for path in ("/health", "/v1/models", "/metrics")]
            assert not client.engine.closed
            await llm.start()
            after = [(await http.get(path)).status_code for path in ("/health", "/v1/models")]
        await llm.close()
        return before + after

    assert asyncio.run(main()) == [503, 503, 404, 200, 200]


def test_the_description_has_these_routes_and_no_others(server: LiveServer) -> None:
    described = server.http.get("/openapi.json").json()
    assert {path: set(item) for path, item in described["paths"].items()} == ROUTES
    body = described["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"model", "messages", "temperature", "stream_options", "top_k"} <= set(body["properties"])
    assert body["required"] == ["model", "messages"]
    assert "$ref" not in str(body)


def test_the_description_can_be_left_out(make_server: MakeServer) -> None:
    server = make_server(disable_fastapi_docs=True)
    assert [server.http.get(path).status_code for path in ("/docs", "/openapi.json", "/redoc")] == [404, 404, 404]


def test_version(server: LiveServer) -> None:
    assert server.http.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"served_model_name": ["a", "b"], "model": "x/y"}, ["a", "b"]),
        ({"served_model_name": [], "model": "org/model"}, ["org/model"]),
    ],
)
def test_names_of_the_model(options: dict[str, object], names: list[str]) -> None:
    assert served_names(server_config(**options)) == names


def test_a_folder_is_called_by_its_last_part_but_may_be_asked_for_as_it_was_given(
    make_server: MakeServer, tmp_path: Path
) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    server = make_server(served_model_name=[], model=str(folder))
    listed = server.http.get("/v1/models").text
    assert '"id":"my-model"' in listed
    assert str(tmp_path) not in listed
    for name in ("my-model", str(folder)):
        answer = server.http.post("/v1/completions", json={"model": name, "prompt": "a", "max_tokens": 1})
        assert answer.json()["model"] == "my-model"


def test_several_names(make_server: MakeServer) -> None:
    server = make_server(served_model_name=["a", "b"])
    assert [item["id"] for item in server.http.get("/v1/models").json()["data"]] == ["a", "b"]
    assert server.http.post("/v1/completions", json={"model": "b", "prompt": "x"}).json()["model"] == "b"


@pytest.mark.parametrize("model", [CompletionRequest, ChatCompletionRequest], ids=lambda model: model.__name__)
def test_the_guide_names_every_field(model: type[RequestModel]) -> None:
    guide = (Path(__file__).resolve().parents[2] / "docs" / "server.md").read_text()
    assert [name for name in (*model.model_fields, *model.refused) if f"`{name}`" not in guide] == []

"""Files of API keys: both forms, what is wrong with them, reading them again, and the limits they set over HTTP."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from quire.config import EngineConfig
from quire.errors import ConfigError, ModelError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.stats import StatListener
from quire.server.auth import ApiKeys, with_key_weights
from quire.server.fronts import Fronts
from quire.server.key_file import read_keys
from quire.server.metrics import Metrics
from quire.server.model_entry import ModelEntry
from quire.server.run import create_pool
from tests.helpers.live_server import LiveServer, MakeServer, server_config

BODY = {"model": "fake", "prompt": "a", "max_tokens": 2}
HASHED = "sha256:" + hashlib.sha256(b"stored-hashed").hexdigest()
FILE = f"""
keys:
  - key: one-at-a-time
    name: alone
    max_concurrency: 1
  - key: few-requests
    name: rare
    requests_per_minute: 2
  - key: few-tokens
    name: short
    tokens_per_minute: 40
  - key: {HASHED}
    name: hidden
  - key: free
    min_priority: 5
"""


def write(folder: Path, text: str) -> str:
    path = folder / "keys"
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def allowed(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check("POST", "/v1/completions", [(b"authorization", b"Bearer " + key.encode())])
    except Exception:
        return False
    return True


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    live = LiveServer(
        api_key="given",
        api_key_file=write(tmp_path_factory.mktemp("keys"), FILE),
        scheduling_policy="priority",
    )
    yield live
    live.close()


def test_one_key_per_line(tmp_path: Path) -> None:
    path = write(tmp_path, f"# ours\n\nabc\n  def\n{HASHED}\n")
    keys = ApiKeys([], path)
    assert [allowed(keys, key) for key in ("abc", "def", "stored-hashed", HASHED, "# ours", "", "ours")] == [
        *(True, True, True),
        *(False, False, False, False),
    ]
    names = [rules.name for rules in read_keys(path).values()]
    assert len(set(names)) == 3
    assert not any(key in name for key in ("abc", "def") for name in names)


@pytest.mark.parametrize("text", ["- abc\n- def\n", "keys: [abc, def]", '{"keys": ["abc", "def"]}', '["abc", "def"]'])
def test_yaml_without_limits(tmp_path: Path, text: str) -> None:
    keys = ApiKeys([], write(tmp_path, text))
    assert allowed(keys, "abc") and allowed(keys, "def") and not allowed(keys, "keys:")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "no keys"),
        ("\n# nothing\n", "no keys"),
        ("keys: []", "no keys"),
        ("keys:", "must be a list"),
        ("keys: abc", "must be a list"),
        ("keys: [", "not valid YAML"),
        ("- 12345", "must be a text"),
        ("- {name: a}", "must be a text"),
        ("a b", "must be a text"),
        ("- key: a\n  nmae: b", "unknown field 'nmae'"),
        ("- key: a\n  max_concurrency: 0", "max_concurrency of key 1 must be an integer"),
        ("- key: a\n  requests_per_minute: 1.5", "requests_per_minute of key 1 must be an integer"),
        ("- key: a\n  tokens_per_minute: true", "tokens_per_minute of key 1 must be an integer"),
        ("- key: a\n  weight: 0", "weight of key 1 must be a positive number"),
        ("- key: a\n  weight: .nan", "weight of key 1 must be a positive number"),
        ("- key: a\n  min_priority: high", "min_priority of key 1 must be an integer"),
        ("- key: a\n  name: a b", "the name of key 1"),
        ("- {key: a, name: x}\n- {key: b, name: x}", "the name x is there twice"),
        ("secret\nsecret", "key 2 is there twice"),
        ("sha256:abc", "64 hexadecimal digits"),
        ("keys: [secret]\nother: 1", "nothing but keys"),
        ("- secret\n- !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("\xff", "must be a text"),
    ],
)
def test_files_that_are_no_keys(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match="api_key_file") as caught:
        read_keys(write(tmp_path, text))
    assert reason in caught.value.message
    assert "secret" not in caught.value.message


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"a" * (2**20 + 1))
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name, reason in (("none", "No such file"), ("big", "larger than"), ("latin", "UTF-8"), (".", "directory")):
        with pytest.raises(ConfigError, match=reason):
            read_keys(str(tmp_path / name))


def test_keys_that_are_empty_or_given_twice(tmp_path: Path) -> None:
    for keys in ([""], [" a"], ["b "]):
        with pytest.raises(ConfigError, match="api_key"):
            ApiKeys(keys)
    with pytest.raises(ConfigError, match="also given by api_key"):
        ApiKeys(["abc"], write(tmp_path, "abc"))


def test_a_file_that_others_may_read_is_worth_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "abc")
    read_keys(path)
    assert not caplog.records
    Path(path).chmod(0o644)
    read_keys(path)
    assert "every user of this machine may read" in caplog.text


def test_reading_again_adds_and_removes_keys_and_keeps_them_where_the_file_is_broken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path, "- key: abc\n  requests_per_minute: 5")
    keys = ApiKeys(["given"], path)
    digest = hashlib.sha256(b"abc").digest()
    quota = keys.quota(digest)
    assert quota is not None

    async def read_again() -> dict[bytes, bytes]:
        async with quota.running():
            write(tmp_path, "- key: abc\n  requests_per_minute: 7\n- new")
            keys.reload()
            return dict(await quota.headers())

    headers = asyncio.run(read_again())
    assert headers[b"x-ratelimit-limit-requests"] == b"7", "requests that run get the new limits, too"
    assert headers[b"x-ratelimit-remaining-requests"] == b"6", "what was used stays used"
    assert allowed(keys, "new") and allowed(keys, "given")
    for broken in ("", "- {", "{}", "- 2024-99-99", "- given"):
        write(tmp_path, broken)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            keys.reload()
        assert "the keys stay as they were" in caplog.text
        assert allowed(keys, "new") and allowed(keys, "abc")
    os.unlink(path)
    keys.reload()
    assert allowed(keys, "new") and not allowed(keys, "nobody"), "without a file nobody new gets in"
    write(tmp_path, "new")
    keys.reload()
    assert not allowed(keys, "abc")
    assert keys.tenant(digest, "ann") == "", "a request of a key that has gone may end"


@pytest.mark.parametrize("broken", ["", "- {", "- given", None])
def test_a_front_that_is_replaced_while_the_file_is_broken_has_the_keys_as_they_were(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, broken: str | None
) -> None:
    path = write(tmp_path, "- {key: abc, name: ann, requests_per_minute: 5, weight: 2}\n- other")
    fronts = Fronts()
    config = server_config(api_key_file=path, scheduling_policy="fair")
    weighted = with_key_weights(config, fronts)
    first = ApiKeys(["given"], path, fronts)
    if broken is None:
        os.unlink(path)
    else:
        write(tmp_path, broken)
    later = ApiKeys(["given"], path, fronts)
    assert "the keys stay as they were" in caplog.text
    digest = hashlib.sha256(b"abc").digest()
    assert later.get(digest) == first.get(digest)
    assert allowed(later, "given") and allowed(later, "other") and not allowed(later, "nobody")
    assert with_key_weights(config, fronts) == weighted
    with pytest.raises(ConfigError, match="api_key_file"):
        ApiKeys(["given"], path, Fronts())


def test_weights_of_keys_reach_the_scheduler(tmp_path: Path) -> None:
    path = write(tmp_path, "- {key: a, name: ann, weight: 2.5}\n- {key: b, name: bob}")
    fronts = Fronts()
    config = with_key_weights(
        server_config(api_key_file=path, scheduling_policy="fair", tenant_weights={"eve": 3}), fronts
    )
    assert config.scheduler.tenant_weights == {"eve": 3, "ann": 2.5}
    with pytest.raises(ConfigError, match="scheduling_policy fair"):
        with_key_weights(server_config(api_key_file=path), fronts)
    with pytest.raises(ConfigError, match="tenant_weights contradicts api_key_file"):
        with_key_weights(server_config(api_key_file=path, scheduling_policy="fair", tenant_weights={"ann": 1}), fronts)
    assert with_key_weights(server_config(), fronts) == server_config()


def test_a_server_of_one_model_starts_with_the_weights_of_its_keys(tmp_path: Path) -> None:
    path = write(tmp_path, "- {key: a, name: ann, weight: 2.5}")
    made: list[EngineConfig] = []

    def make_llm(config: EngineConfig, listeners: Sequence[StatListener]) -> AsyncLLM:
        made.append(config)
        raise ModelError("the configuration is all that is tested")

    config = server_config(port=0, api_key_file=path, scheduling_policy="fair", tenant_weights={"eve": 3})
    with pytest.raises(ModelError, match="all that is tested"):
        create_pool([ModelEntry(config=config)], config.server, make_llm, Metrics())
    assert [item.scheduler.tenant_weights for item in made] == [{"eve": 3, "ann": 2.5}]


def test_one_request_at_a_time(served: LiveServer) -> None:
    headers = bearer("one-at-a-time")
    served.do(served.fake_client.hold)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(served.http.post, "/v1/completions", json=BODY, headers=headers)
        served.wait_until(lambda: bool(served.engine.live))
        second = served.http.post("/v1/completions", json=BODY, headers=headers)
        others = served.http.get("/v1/models", headers=headers)
        served.do(served.fake_client.resume)
        assert first.result(10).status_code == 200
    assert second.status_code == 429
    assert second.json()["error"]["type"] == "rate_limit_error"
    assert second.json()["error"]["code"] == "rate_limit_exceeded"
    assert int(second.headers["retry-after"]) >= 1
    assert int(second.headers["retry-after-ms"]) >= 1
    assert others.status_code == 200, "looking is free"
    assert served.http.post("/v1/completions", json=BODY, headers=headers).status_code == 200


def test_so_many_requests_per_minute(served: LiveServer) -> None:
    headers = bearer("few-requests")
    answers = [served.http.post("/v1/completions", json=BODY, headers=headers) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]
    assert answers[0].headers["x-ratelimit-limit-requests"] == "2"
    assert answers[2].headers["x-ratelimit-reset-requests"].endswith("s")
    assert 0 < int(answers[2].headers["retry-after-ms"]) <= 30000
    assert "x-ratelimit-limit-tokens" not in answers[0].headers
    scrape = served.http.get("/metrics", headers=bearer("given")).text
    assert 'reason="rate_limit"' in scrape


def test_so_many_tokens_per_minute(served: LiveServer) -> None:
    headers = bearer("few-tokens")
    body = {**BODY, "prompt": [5] * 10, "max_tokens": 20, "ignore_eos": True}
    first = served.http.post("/v1/completions", json=body, headers=headers)
    assert first.status_code == 200
    assert first.headers["x-ratelimit-remaining-tokens"] == "10", "reserved while it is sent"
    second = served.http.post("/v1/completions", json=body, headers=headers)
    assert second.status_code == 429
    assert "tokens per minute" in second.json()["error"]["message"]
    assert served.http.post("/v1/completions", json={**body, "prompt": [5] * 41}, headers=headers).status_code == 429


def test_the_official_client_knows_these_errors(served: LiveServer) -> None:
    with (
        openai.OpenAI(base_url=f"{served.url}/v1", api_key="few-tokens", max_retries=0) as client,
        pytest.raises(openai.RateLimitError) as caught,
    ):
        client.completions.create(model="fake", prompt=[5] * 60, max_tokens=1)
    assert (caught.value.code, caught.value.type) == ("rate_limit_exceeded", "rate_limit_error")


def test_keys_without_limits_have_no_such_headers(served: LiveServer) -> None:
    for key in ("given", "stored-hashed"):
        answer = served.http.post("/v1/completions", json=BODY, headers=bearer(key))
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("x-ratelimit")]


def test_the_most_urgent_priority_of_a_key(served: LiveServer) -> None:
    def ask(key: str, priority: int) -> httpx.Response:
        return served.http.post("/v1/completions", json={**BODY, "priority": priority}, headers=bearer(key))

    assert ask("free", 5).status_code == ask("given", -3).status_code == 200
    refused = ask("free", 4)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "priority"


def test_accounts_and_cached_prefixes_are_those_of_the_key(served: LiveServer) -> None:
    def added(key: str) -> tuple[str, str | None]:
        assert served.http.post("/v1/completions", json={**BODY, "priority": 9}, headers=bearer(key)).status_code == 200
        request = served.do(lambda: served.engine.added[-1])
        return request.tenant, request.cache_salt

    alone, again, hidden, given = (added(key) for key in ("one-at-a-time", "one-at-a-time", "stored-hashed", "given"))
    assert [alone[0], hidden[0], given[0]] == ["alone", "hidden", "key-0"]
    assert alone == again
    assert len({alone[1], hidden[1], given[1], None}) == 4


def test_anthropics_way_to_send_a_key(served: LiveServer) -> None:
    def status(*headers: tuple[str, str]) -> int:
        return served.http.get("/v1/models", headers=list(headers)).status_code

    assert status(("x-api-key", "given")) == 200
    assert status(("x-api-key", "given"), ("authorization", "Bearer given")) == 200
    assert status(("x-api-key", "given"), ("authorization", "Bearer wrong")) == 401
    assert status(("x-api-key", "wrong"), ("authorization", "Bearer given")) == 401
    assert status(("x-api-key", "given"), ("x-api-key", "given")) == 401
    assert status(("x-api-key", "")) == 401


def test_a_single_key_in_a_file_is_salted_too(make_server: MakeServer, tmp_path: Path) -> None:
    server = make_server(api_key_file=write(tmp_path, "only"))
    server.http.post("/v1/completions", json=BODY, headers=bearer("only"))
    assert server.do(lambda: server.engine.added[-1]).cache_salt, "another key may come at any time"

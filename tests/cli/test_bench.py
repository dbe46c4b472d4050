"""`quire bench`: result keys, arithmetic on known times, and the load generator against a server made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire.cli.bench import serve as bench_serve
from quire.cli.bench.dataset import file_samples, random_samples
from quire.cli.bench.http1 import HttpClient, HttpError
from quire.cli.bench.load import LoadRequest, RequestResult, arrival_times, request_body, run_load, send
from quire.cli.bench.metrics import parse_goodput, parse_names, parse_percentiles, summarize
from quire.errors import ConfigError
from quire.outputs import CompletionOutput, RequestOutput


class FakeLLM:
    """Generates as many tokens as asked for, at once."""

    vocab_size = 50
    max_model_len = 600

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], Any]] = []
        self.closed = False

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def reset_prefix_cache(self) -> None:
        pass

    def get_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(encode=lambda text: [1] * len(text))

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool = True) -> list[RequestOutput]:
        self.calls.append((prompts, params))
        each = params if isinstance(params, list) else [params] * len(prompts)
        return [
            RequestOutput("r", None, prompt["prompt_token_ids"], [CompletionOutput(0, "", [0] * item.max_tokens)], True)
            for prompt, item in zip(prompts, each, strict=True)
        ]


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> FakeLLM:
    llm = FakeLLM()

    def open_fake(config: Any) -> FakeLLM:
        llm.config = config
        return llm

    for module in ("latency", "throughput"):
        monkeypatch.setattr(f"quire.cli.bench.{module}.open_llm", open_fake)
    return llm


def test_latency_runs_the_batches_asked_for_and_writes_vllm_keys(quire, offline, tmp_path):
    path = tmp_path / "new" / "latency.json"
    words = (
        "--batch-size",
        "3",
        "--input-len",
        "5",
        "--output-len",
        "2",
        "--num-iters",
        "4",
        "--num-iters-warmup",
        "1",
    )
    result = quire("bench", "latency", *words, "--output-json", str(path))
    assert result.code == 0, result.err
    assert "Latency of 3 requests, 5 tokens in, 2 out" in result.out
    assert len(offline.calls) == 5
    assert all(len(prompts) == 3 for prompts, _ in offline.calls)
    assert offline.calls[0][0] != offline.calls[1][0]
    assert offline.config.cache.enable_prefix_caching is False
    stored = json.loads(path.read_text())
    assert set(stored) == {"avg_latency", "std_latency", "latencies", "percentiles"}
    assert len(stored["latencies"]) == 4
    assert set(stored["percentiles"]) == {"10", "25", "50", "75", "90", "99"}
    assert offline.closed


def test_throughput_fits_its_prompts_into_a_short_context(quire, offline):
    result = quire("bench", "throughput", "--num-prompts", "2", "--output-len", "100")
    assert result.code == 0, result.err
    assert {len(prompt["prompt_token_ids"]) for prompts, _ in offline.calls for prompt in prompts} == {500}


def test_throughput_counts_prompt_and_output_tokens(quire, offline, tmp_path):
    path = tmp_path / "throughput.json"
    words = ("--num-prompts", "6", "--input-len", "5", "--output-len", "2", "--random-prefix-len", "3")
    result = quire("bench", "throughput", *words, "--output-json", str(path))
    assert result.code == 0, result.err
    stored = json.loads(path.read_text())
    assert set(stored) == {
        "elapsed_time",
        "num_requests",
        "total_num_tokens",
        "requests_per_second",
        "tokens_per_second",
    }
    assert (stored["num_requests"], stored["total_num_tokens"]) == (6, 6 * (3 + 5 + 2))
    _, (prompts, _) = offline.calls
    assert len({tuple(prompt["prompt_token_ids"][:3]) for prompt in prompts}) == 1


def test_throughput_takes_prompts_from_a_file(quire, offline, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text('{"prompt": "abc"}\n{"prompt": "de", "output_tokens": 9}\n')
    assert quire("bench", "throughput", "--dataset-path", str(source), "--num-prompts", "3").code == 0
    prompts, params = offline.calls[-1]
    assert [len(prompt["prompt_token_ids"]) for prompt in prompts] == [3, 2, 3]
    assert [item.max_tokens for item in params] == [128, 9, 128]


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["latency", "--num-iters", "0"], "--num-iters"),
        (["latency", "--output-json", "/proc/no/x.json"], "output_json"),
        (["throughput", "--dataset-path", "/no/file"], "/no/file"),
        (["throughput", "--random-range-ratio", "2"], "--random-range-ratio"),
        (["serve", "--goodput", "itl:3"], "itl:3"),
        (["serve", "--goodput", "ttft:fast"], "ttft:fast"),
        (["serve", "--percentile-metrics", "ttft,x"], "'x'"),
        (["serve", "--metric-percentiles", "101"], "101"),
        (["serve", "--dataset-name", "custom"], "dataset_path"),
        (["serve", "--request-rate", "0"], "--request-rate"),
        (["serve", "--base-url", "nonsense"], "nonsense"),
        (["serve", "--backend", "tgi"], "--backend"),
        ([], "KIND"),
        (["latancy"], "latancy"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_options_end_with_code_2(quire, offline, words, part):
    result = quire("bench", *words)
    assert result.code == 2
    assert part in result.err and result.err.count("\n") == 1


def test_random_lengths_stay_in_their_range_and_repeat_with_the_seed():
    def draw(seed: int) -> list[Any]:
        rng = np.random.default_rng(seed)
        return random_samples(rng, 200, vocab_size=9, input_len=20, output_len=10, range_ratio=0.5)

    samples = draw(1)
    assert samples == draw(1) != draw(2)
    assert {len(sample.prompt_token_ids) for sample in samples} == set(range(10, 31))
    assert {sample.output_len for sample in samples} == set(range(5, 16))
    assert {token for sample in samples for token in sample.prompt_token_ids} == set(range(9))


@pytest.mark.parametrize("line", ["x", "[]", '{"text": "a"}', '{"prompt": "a", "output_tokens": 0}'])
def test_a_bad_dataset_line_is_named(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(ConfigError, match="line 2"):
        file_samples(str(path), 3, tokenizer=SimpleNamespace(encode=list), output_len=1)


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_spread(burstiness):
    times = np.array(arrival_times(np.random.default_rng(0), 20000, rate=50.0, burstiness=burstiness))
    gaps = np.diff(times)
    assert times[0] == 0.0 and (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_everything_at_once():
    assert arrival_times(np.random.default_rng(0), 3, rate=float("inf"), burstiness=1.0) == [0.0, 0.0, 0.0]


def answer(start: float, ttft: float, itls: list[float], prompt_len: int = 10) -> RequestResult:
    return RequestResult(prompt_len, start, ttft, itls, ttft + sum(itls), 1 + len(itls))


def test_figures_of_known_times():
    results = [
        answer(100.0, 0.1, [0.02, 0.04]),
        answer(100.5, 0.3, [0.03, 0.03]),
        answer(102.0, 0.2, []),
        RequestResult(10, 101.0, error="HTTP 503"),
    ]
    result = summarize(
        results,
        4.0,
        limits={"ttft": 250.0, "tpot": 40.0},
        names=["ttft", "tpot", "itl", "e2el"],
        percentiles=[50, 99.5],
    )
    assert result["completed"] == 3 and result["failed"] == 1
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (30, 7)
    assert result["request_throughput"] == 3 / 4
    assert result["request_goodput"] == 2 / 4
    assert result["output_throughput"] == 7 / 4
    assert result["total_token_throughput"] == 37 / 4
    assert result["mean_ttft_ms"] == pytest.approx(200)
    assert result["mean_tpot_ms"] == pytest.approx(30)
    assert result["median_itl_ms"] == pytest.approx(30)
    assert result["p50_e2el_ms"] == pytest.approx(200)
    assert "p99.5_ttft_ms" in result
    assert result["max_concurrent_requests"] == 1
    assert result["max_output_tokens_per_s"] == 6


def test_without_limits_there_is_no_goodput_and_without_answers_no_crash():
    result = summarize([RequestResult(1, error="x")], 1.0, limits={}, names=["ttft"], percentiles=[99])
    assert result["request_goodput"] is None
    assert (result["completed"], result["max_concurrent_requests"]) == (0, 0)


def test_lists_are_read():
    assert parse_goodput(["ttft:500,tpot:50", "e2el:9.5"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 9.5}
    assert parse_names("ttft, e2el") == ["ttft", "e2el"]
    assert parse_percentiles("25,99.9") == [25.0, 99.9]


Reply = Callable[[dict[str, str], bytes], list[bytes]]


def response(body: bytes, status: str = "200 OK", *, chunked: bool = True, close: bool = False) -> list[bytes]:
    """Return the pieces a server writes; chunk borders fall in the middle of lines."""
    head = [f"HTTP/1.1 {status}"] + (["Connection: close"] if close else [])
    if chunked:
        pieces = [body[i : i + 7] for i in range(0, len(body), 7)]
        head.append("Transfer-Encoding: chunked")
        return [
            "\r\n".join([*head, "", ""]).encode(),
            *(b"%x;ext=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces),
            b"0\r\ntrailer: x\r\n\r\n",
        ]
    if not close:
        head.append(f"Content-Length: {len(body)}")
    return ["\r\n".join([*head, "", ""]).encode(), body]


def sse(*events: dict[str, Any], done: bool = True) -> bytes:
    lines = b"".join(b"data: %s\n\n" % json.dumps(event).encode() for event in events)
    return b": ping\n\n" + lines + (b"data: [DONE]\n\n" if done else b"")


@contextlib.asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[SimpleNamespace]:
    """Run a server that answers each request by `reply(headers, body)`; counts connections and requests."""
    seen = SimpleNamespace(connections=0, requests=[], at_once=0, most_at_once=0, gate=None, eight=asyncio.Event())
    handlers = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.connections += 1
        handlers.add(asyncio.current_task())
        with contextlib.closing(writer), contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
                headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:])}
                headers[""] = head[0]
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                seen.requests.append((head[0], headers, body))
                seen.at_once += 1
                seen.most_at_once = max(seen.most_at_once, seen.at_once)
                if seen.at_once == 8:
                    seen.eight.set()
                if seen.gate is not None:
                    await seen.gate.wait()
                else:
                    await asyncio.sleep(0)
                seen.at_once -= 1
                pieces = reply(headers, body)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                if b"close" in pieces[0].lower() or b"cut" in pieces[0]:
                    break

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    seen.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield seen
    finally:
        server.close()
        for handler in handlers:
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)


TOKENS = [{"choices": [{"text": text, "finish_reason": None}]} for text in ("a", "", "b")]
END = {"choices": [{"text": "", "finish_reason": "length"}]}
USAGE = {"choices": [], "usage": {"completion_tokens": 4}}


async def ask(reply: Reply, count: int = 1, **kwargs: Any) -> tuple[list[RequestResult], SimpleNamespace]:
    async with serving(reply) as seen:
        client = HttpClient(seen.url, {"authorization": "Bearer k"})
        requests = [LoadRequest(b"{}", 5)] * count
        results = await run_load(client, "/v1/completions", requests, [0.0] * count, **kwargs)
        await client.close()
    return results, seen


@pytest.mark.parametrize(("chunked", "close"), [(True, False), (False, False), (False, True), (True, True)])
def test_a_stream_is_read_whatever_its_framing(chunked, close):
    body = sse(*TOKENS, END, USAGE)
    (result,), seen = asyncio.run(ask(lambda *_: response(body, chunked=chunked, close=close)))
    assert result.success and result.text == "ab"
    assert (result.prompt_len, result.output_len, len(result.itls)) == (5, 4, 2)
    assert 0 < result.ttft <= result.latency
    line, headers, _ = seen.requests[0]
    assert line == "POST /v1/completions HTTP/1.1"
    assert headers["authorization"] == "Bearer k"


def test_without_usage_pieces_are_counted_and_chat_pieces_are_understood():
    body = sse(
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "x"}}]},
        {"choices": [{"delta": {"content": "y"}, "finish_reason": "stop"}]},
        {"choices": [{"delta": {}, "finish_reason": "stop"}]},
    )
    (result,), _ = asyncio.run(ask(lambda *_: response(body)))
    assert (result.text, result.output_len, len(result.itls)) == ("xy", 2, 1)


def test_connections_are_reused_and_concurrency_is_bounded():
    body = sse(*TOKENS)
    results, seen = asyncio.run(ask(lambda *_: response(body), 12, max_concurrency=3))
    assert all(item.success for item in results)
    assert len(seen.requests) == 12
    assert seen.connections <= 3
    assert seen.most_at_once <= 3


def test_the_loop_is_open_every_request_is_sent_before_any_is_answered():
    async def check() -> None:
        async with serving(lambda *_: response(sse(*TOKENS))) as seen:
            seen.gate = asyncio.Event()
            client = HttpClient(seen.url, {})
            load = asyncio.create_task(run_load(client, "/x", [LoadRequest(b"{}", 1)] * 8, [0.0] * 8))
            await seen.eight.wait()
            seen.gate.set()
            assert all(item.success for item in await load)
            await client.close()

    asyncio.run(asyncio.wait_for(check(), 60))


@pytest.mark.parametrize(
    ("pieces", "part"),
    [
        (response(b'{"error": {"message": "busy"}}', "503 Service Unavailable"), "HTTP 503: busy"),
        (response(b"<html>", "502 Bad Gateway", chunked=False), "HTTP 502: <html>"),
        (response(sse(*TOKENS, done=False)), "without [DONE]"),
        (response(sse()), "no token"),
        (response(sse({"error": {"message": "died"}})), "died"),
        (response(b"data: {\n\n"), "not JSON"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nx: cut\r\n\r\n", b"data: "], "broke off"),
        ([b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx: cut\r\n\r\n", b"zz\r\n"], "broke off"),
        ([b"SMTP cut\r\n\r\n"], "broke off"),
    ],
)
def test_failures_are_recorded_with_their_reason(pieces, part):
    (result,), _ = asyncio.run(ask(lambda *_: pieces))
    assert not result.success
    assert part in result.error


def test_a_server_that_is_not_there_is_recorded():
    client = HttpClient("http://127.0.0.1:9", {})
    result = asyncio.run(send(client, "/x", LoadRequest(b"{}", 1)))
    assert "cannot connect to 127.0.0.1:9" in result.error


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", "http://x:port"])
def test_a_bad_address_is_refused(url):
    with pytest.raises(ConfigError, match="must look like"):
        HttpClient(url, {})


def test_json_that_is_none_is_reported():
    async def check() -> None:
        async with serving(lambda *_: response(b"hello")) as seen:
            client = HttpClient(seen.url, {})
            with pytest.raises(HttpError, match="JSON"):
                await client.get_json("/v1/models")
            await client.close()

    asyncio.run(check())


def test_bodies_of_both_apis():
    completion = json.loads(request_body("openai", "m", [1, 2], 7, {"ignore_eos": True}))
    assert completion["prompt"] == [1, 2] and completion["max_tokens"] == 7 and completion["ignore_eos"]
    chat = json.loads(request_body("openai-chat", "m", "hi", 7, {"max_completion_tokens": 3}))
    assert chat["messages"] == [{"role": "user", "content": "hi"}] and chat["max_completion_tokens"] == 3
    assert chat["stream"] and chat["stream_options"] == {"include_usage": True}


def test_a_whole_run_saves_the_keys_of_vllm(monkeypatch, tmp_path: Path, capsys):
    tokenizer = SimpleNamespace(vocab_size=30, decode=str)
    monkeypatch.setattr(bench_serve, "load_tokenizer", lambda name: tokenizer)

    def reply(headers: dict[str, str], body: bytes) -> list[bytes]:
        if "/v1/models" in headers[""]:
            return response(b'{"data": [{"id": "some/model"}]}', chunked=False)
        return response(sse(*TOKENS, END, USAGE))

    async def check() -> None:
        async with serving(reply) as seen:
            plan = bench_serve.make_plan(
                {
                    "base_url": seen.url,
                    "num_prompts": 5,
                    "request_rate": 1e5,
                    "random_input_len": 3,
                    "num_warmups": 1,
                    "goodput": ["ttft:60000"],
                    "save_detailed": True,
                    "result_dir": str(tmp_path / "results"),
                }
            )
            summary, results = await bench_serve.measure(plan)
            bench_serve.show(plan, summary)
            bench_serve.save(plan, summary, results)
            assert len(seen.requests) == 1 + 1 + 5
            assert [len(json.loads(body)["prompt"]) for _, _, body in seen.requests[1:]] == [3] * 6

    asyncio.run(check())
    (path,) = (tmp_path / "results").iterdir()
    assert path.name.startswith("openai-100000.0qps-model-")
    stored = json.loads(path.read_text())
    assert set(stored) >= VLLM_KEYS
    assert (stored["completed"], stored["failed"], stored["total_output_tokens"]) == (5, 0, 20)
    assert stored["request_goodput"] == stored["request_throughput"]
    assert stored["output_lens"] == [4] * 5
    assert "Time to first token (ms)" in capsys.readouterr().out


VLLM_KEYS = {
    *("date", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate", "burstiness", "max_concurrency"),
    *("duration", "completed", "failed", "total_input_tokens", "total_output_tokens", "request_throughput"),
    *("request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s"),
    *("max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms"),
    *("median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms"),
    *("input_lens", "output_lens", "ttfts", "itls", "generated_texts", "errors"),
}

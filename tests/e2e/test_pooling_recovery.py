"""Vectors under a real server: a folder is all it takes, and an engine that is killed costs nobody an answer."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from quire.checkpoint.pooling_spec import PoolingSpec
from quire.engine.messages import EngineOutputs
from quire.engine_request import EngineRequest
from quire.frontend.output_processor import OutputProcessor
from quire.frontend.pooling import pooled_output
from quire.pooling_params import PoolingParams
from quire.step import PooledData, SchedulerStats, SequenceOutput
from tests.helpers.faults import engine_pid
from tests.helpers.pooling_checkpoints import ENCODER, add_modules, add_tokenizer, write_model
from tests.helpers.requests import engine_requests, input_processor
from tests.helpers.server import serve

SPEC = PoolingSpec(task="embed", kinds=("mean",), normalize=True)


def test_what_another_engine_is_told_is_the_same_request() -> None:
    processor = input_processor(None, vocab_size=100, pooling=SPEC)
    params = PoolingParams(dimensions=2)
    adds = engine_requests(processor, [5, 6, 7], params, "a", arrival_time=0.0)
    outputs = OutputProcessor(None)
    state = outputs.add("a", None, adds, params)
    again: list[EngineRequest] = outputs.replay("a")
    assert again == adds
    assert again[0].pooling == PoolingParams(task="embed", dimensions=2, skip_reading_prefix_cache=True)
    data = PooledData(b"\0\0\x80\x3f\0\0\0\0", [2])
    news = EngineOutputs([SequenceOutput("a", [], finish_reason="stop", pooled=data)], SchedulerStats(), 1.0)
    outputs.process(news)
    assert state.finished
    assert pooled_output(state).outputs.data.tolist() == [1.0, 0.0]
    assert outputs.num_unfinished == 0


@pytest.mark.slow
def test_an_engine_is_killed_while_it_makes_vectors(tmp_path: Path) -> None:
    folder = add_modules(add_tokenizer(write_model(tmp_path / "m", "BertModel", **ENCODER)), "mean")
    texts = [" ".join("abcdefgh"[: 1 + place % 8] * (1 + place % 9)) for place in range(1500)]
    body = {"model": "m", "input": texts}
    options = ("--max-num-batched-tokens", "130", "--max-num-seqs", "2")
    with serve(tmp_path / "log.txt", str(folder), "--served-model-name", "m", *options) as server:
        status, expected = server.post("/v1/embeddings", body)
        assert status == 200
        before = server.metric("vllm:prompt_tokens_total")
        engine = engine_pid(server)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.post, "/v1/embeddings", body)
            while server.metric("vllm:prompt_tokens_total") < before + 50:
                pass
            os.kill(engine, signal.SIGKILL)
            status, found = answer.result()
        assert status == 200
        assert found["data"] == expected["data"]
        assert found["usage"] == expected["usage"]
        assert engine_pid(server) != engine

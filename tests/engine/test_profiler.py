"""Profiles of the built-in model: every instruction of every step, and not a bit of the output changed."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, ConflictError, UnsupportedError

PARAMS = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
PROMPTS = ["The king said", "And so it came", "Good"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles") / "new"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(profiler_dir=str(folder), max_model_len=128, max_num_seqs=4, num_gpu_blocks_override=64) as llm:
        yield llm


def tokens(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def read(path: str) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(Path(path).read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def test_a_trace_has_the_steps_and_their_instructions(llm: LLM, folder: Path) -> None:
    plain = tokens(llm)
    llm.start_profile()
    assert tokens(llm) == plain
    [path] = llm.stop_profile()
    assert tokens(llm) == plain
    assert Path(path).parent == folder
    events = read(path)
    count = Counter(event["name"] for event in events)
    assert count["step"] == count["schedule"] == count["submit"] == count["update"] >= 8
    layers = llm.llm_engine.core.executor.kv_cache_spec().layers
    products = [event for event in events if event["name"].startswith("linear")]
    assert len({event["ts"] for event in products}) >= 4 * len(layers) * 8, "each is there, of each thread"
    assert all(event["args"]["bytes"] > 0 and event["args"]["share_of_bandwidth"] >= 0 for event in products)
    assert {event["tid"] for event in products} <= {1, 2} and all(event["dur"] >= 0 for event in events)
    steps = [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == "submit"]
    for event in products:
        assert any(begin <= event["ts"] and event["ts"] + event["dur"] <= end for begin, end in steps)


def test_attention_reads_more_as_sequences_grow(llm: LLM) -> None:
    llm.start_profile()
    tokens(llm)
    [path] = llm.stop_profile()
    sizes = [event["args"]["bytes"] for event in read(path) if event["name"].startswith("attend")]
    assert sizes[-1] > sizes[0] > 0


def test_one_trace_at_a_time(llm: LLM) -> None:
    with pytest.raises(ConflictError, match="not running"):
        llm.stop_profile()
    llm.start_profile()
    with pytest.raises(ConflictError, match="running already"):
        llm.start_profile()
    llm.stop_profile()


def test_without_a_folder_there_is_none() -> None:
    with (
        LLM(max_model_len=64, num_gpu_blocks_override=16) as llm,
        pytest.raises(UnsupportedError, match="profiler_dir"),
    ):
        llm.start_profile()


def test_a_folder_that_cannot_be_written_is_refused_before_loading(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="profiler_dir: cannot write into") as caught:
        LLM(profiler_dir=str(tmp_path / "file" / "below"))
    assert caught.value.param == "profiler_dir"


def test_a_trace_that_nobody_ends_is_written_at_the_end_and_bounded(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 128, "num_gpu_blocks_override": 64}
    with LLM(profiler_dir=str(tmp_path), profiler_max_bytes=2**16, **options) as llm:
        llm.start_profile()
        tokens(llm)
    [path] = tmp_path.iterdir()
    assert path.stat().st_size < 2**16 + 200
    assert json.loads(path.read_text())["otherData"]["dropped_events"] > 0


def test_the_backend_in_pytorch_writes_pytorchs_trace_too(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_model_len": 64, "num_gpu_blocks_override": 16, "device": "reference"}
    with LLM(profiler_dir=str(tmp_path), **options) as llm:
        llm.start_profile()
        llm.generate("Good", SamplingParams(max_tokens=2), use_tqdm=False)
        path, beside = llm.stop_profile()
    assert {event["name"] for event in read(path)} >= {"step", "schedule"}
    assert any(event.get("name") == "aten::mm" for event in json.loads(Path(beside).read_text())["traceEvents"])

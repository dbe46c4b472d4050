"""`ChromeTrace`: what Perfetto reads, within its bound, at once or not at all."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from quire.chrome_trace import ChromeTrace


def test_events_have_the_form_that_perfetto_reads(tmp_path: Path) -> None:
    trace = ChromeTrace(max_bytes=10_000)
    trace.name_thread(0, "engine")
    with trace.span("step", tokens=3):
        begin = time.perf_counter_ns()
        trace.add('an "op"', begin, begin + 2500, thread=1, bytes=64)
    trace.write(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    named, op, step = found["traceEvents"]
    assert (named["ph"], named["tid"], named["args"]) == ("M", 0, {"name": "engine"})
    assert (op["name"], op["ph"], op["dur"], op["tid"], op["args"]) == ('an "op"', "X", 2.5, 1, {"bytes": 64})
    assert step["args"] == {"tokens": 3} and step["ts"] <= op["ts"]
    assert op["pid"] == step["pid"] == named["pid"]
    assert found["otherData"] == {"dropped_events": 0}


def test_events_beyond_the_bound_are_dropped_and_counted(tmp_path: Path) -> None:
    trace = ChromeTrace(max_bytes=2_000)
    for number in range(1000):
        trace.add("op", number, number + 1)
    trace.write(tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())
    assert 5 < len(found["traceEvents"]) < 40
    assert len(found["traceEvents"]) + found["otherData"]["dropped_events"] == 1000
    assert (tmp_path / "a.json").stat().st_size < 2_200


def test_what_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        ChromeTrace(1000).write(tmp_path / "no" / "a.json")
    assert not list(tmp_path.iterdir())

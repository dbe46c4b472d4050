"""Profiles over HTTP: for those who may operate the server, one at a time, written by the engine's process."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from tests.helpers.server import serve


def test_a_server_is_profiled_by_its_admin(tmp_path: Path) -> None:
    folder = tmp_path / "profiles"
    options = ("--profiler-dir", str(folder), "--api-key", "user", "--admin-api-key", "root")
    with serve(tmp_path / "log", *options, key="user") as user:
        root = dataclasses.replace(user, key="root")
        assert user.post("/start_profile", {})[0] == 401
        assert root.post("/stop_profile", {})[0] == 409
        assert root.post("/start_profile", {}) == (200, {"model": "quire-demo", "profiling": True})
        status, answer = root.post("/start_profile", {})
        assert (status, answer["error"]["code"]) == (409, "profiler_running")
        assert user.post("/v1/completions", {"model": "quire-demo", "prompt": "Good", "max_tokens": 5})[0] == 200
        status, answer = root.post("/stop_profile?model=quire-demo", {})
        assert status == 200 and list(map(Path, answer["paths"])) == list(folder.iterdir())
        assert root.post("/stop_profile?model=other", {})[0] == 404
    events = json.loads(Path(answer["paths"][0]).read_text())["traceEvents"]
    assert {"step", "schedule", "submit", "update"} <= {event["name"] for event in events}

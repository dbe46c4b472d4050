"""`quire collect-env`."""

from __future__ import annotations

import json
import os
import platform
from typing import Any

import pytest

from quire.version import __version__


def test_it_says_what_is_installed_and_what_the_machine_is(quire: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    told = quire("collect-env", "--json")
    assert told.code == 0
    found = json.loads(told.out)
    assert found["quire"]["version"] == __version__
    assert platform.python_version() in found["system"]["python"]
    assert "generic" in found["processor"]["instructions of kernels"]
    assert found["memory"]["total"].endswith("GiB")
    assert "C compilers" in found["gpus"] and len(found["gpus"]) > 1
    assert found["variables"]["OMP_NUM_THREADS"] == "3"
    assert found["packages"]["torch"].startswith("2.")
    assert "hf_secret" not in told.out and os.path.expanduser("~") not in told.out


def test_it_is_readable_too(quire: Any) -> None:
    told = quire("collect-env")
    assert told.code == 0
    assert f"  version                  {__version__}" in told.out.splitlines()

"""Unmodified client libraries against a server of the built-in model: a cell for each library and what it is used for.

The libraries of Python are looked for in the virtual environment `py` of the folder that QUIRE_CLIENT_LIBRARIES names,
`.venv-clients` by default, those of JavaScript in its folder `npm`; CONTRIBUTING.md says how to make it. What is not
installed is skipped.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.helpers.server import Server
from tests.meta.source import ROOT

pytestmark = pytest.mark.clients

FOLDER = Path(os.environ.get("QUIRE_CLIENT_LIBRARIES", ROOT / ".venv-clients"))
PYTHON = FOLDER / "py" / "bin" / "python"
PROGRAMS = Path(__file__).parent / "programs"
FEATURES = ("chat", "stream", "structure", "tool", "error")
SECONDS = 120.0
ANSWER = "Quire is an engine that serves large language models, written in pure Python."
# Cells that cannot be, with the reason.
OF_TEXT = "its requests are completions of text, which have no messages"
IN_PROMPT = "the schema is in the prompt only, where the built-in model does not understand it"
UNUSABLE: dict[tuple[str, str], str] = {
    **{("litellm text-completion-openai", feature): OF_TEXT for feature in ("structure", "tool")},
    **{(f"instructor {mode}", "structure"): IN_PROMPT for mode in ("JSON", "MD_JSON")},
    **{
        (library, "tool"): "Ollama's API cannot demand a call, and the built-in model makes none by itself"
        for library in ("litellm ollama", "litellm ollama_chat", "langchain ollama", "npm ollama")
    },
}


@functools.cache
def python_libraries() -> ModuleType:
    """The program as a module, for its table; it imports no library before it runs."""
    spec = importlib.util.spec_from_file_location("client_libraries", PROGRAMS / "libraries.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where pydantic looks for types
    spec.loader.exec_module(module)
    return module


def cells() -> Iterator[tuple[str, str]]:
    for name, found in python_libraries().LIBRARIES.items():
        kind = found[0] if isinstance(found, tuple) else found
        yield from ((name, feature) for feature in FEATURES if hasattr(kind, feature))


def run(command: list[str]) -> Any:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    if "ModuleNotFoundError" in done.stderr or "ERR_MODULE_NOT_FOUND" in done.stderr:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


def check(library: str, feature: str, result: Any) -> None:
    """Check what a program printed."""
    if "text-completion" in library and feature != "error":
        assert "".join(result).strip()
    elif feature == "chat":
        assert result.strip() == ANSWER
    elif feature == "stream":
        assert "".join(result).strip() == ANSWER and len([piece for piece in result if piece]) > 3
    elif feature == "structure":
        assert result.keys() == {"city", "sunny"} and result["city"] in ("Rome", "Oslo")
    elif feature == "tool":
        name, arguments = result
        assert name == "get_weather" and arguments["city"] in ("Rome", "Oslo")
    else:
        assert result


@pytest.mark.parametrize(("library", "feature"), cells())
def test_python(library: str, feature: str, server: Server) -> None:
    if (library, feature) in UNUSABLE:
        pytest.skip(UNUSABLE[library, feature])
    if not PYTHON.exists():
        pytest.skip(f"there is no {PYTHON}")
    words = [library, feature, server.url, server.key]
    check(library, feature, run([str(PYTHON), str(PROGRAMS / "libraries.py"), *words]))


JAVASCRIPT = ("openai", "anthropic", "ollama", "ai-openai", "ai-compatible", "ai-anthropic", "langchain-openai")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("library", JAVASCRIPT)
def test_javascript(library: str, feature: str, server: Server, tmp_path: Path) -> None:
    modules = FOLDER / "npm" / "node_modules"
    node = shutil.which("node")
    if node is None or not modules.is_dir():
        pytest.skip("there is no node" if node is None else f"there is no {modules}")
    if (f"npm {library}", feature) in UNUSABLE:
        pytest.skip(UNUSABLE[f"npm {library}", feature])
    (tmp_path / "node_modules").symlink_to(modules)
    program = shutil.copy(PROGRAMS / "libraries.mjs", tmp_path)
    check(library, feature, run([node, str(program), library, feature, server.url, server.key]))

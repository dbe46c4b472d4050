"""What importing costs: the layers of the package, and which libraries come in with which part."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import quire
from tests.meta.source import ENVIRONMENT, ROOT

HEAVY = ["torch", "numpy", "numba", "fastapi", "uvicorn", "zmq", "tokenizers", "transformers", "jinja2", "asyncio"]
HEAVY += ["llguidance"]
PACKAGE = ("quire", "quire.cli.main", "quire.config", "quire.errors", "quire.outputs")
CONTROL_PLANE = (
    "quire.sampling_params",
    "quire.kvcache.manager",
    "quire.scheduler.scheduler",
    "quire.engine.messages",
    "quire.engine.core",
)
EDGE = ("quire.frontend.llm", "quire.frontend.async_llm", "quire.server.run")


@pytest.fixture(scope="module")
def imported() -> dict[str, set[str]]:
    """Which of `HEAVY` one interpreter has loaded after it has imported each module, in the order from above."""
    code = (
        "import importlib, json, sys\n"
        f"for name in {(*PACKAGE, *CONTROL_PLANE, *EDGE)!r}:\n"
        "    importlib.import_module(name)\n"
        f"    print(json.dumps([name, [heavy for heavy in {HEAVY!r} if heavy in sys.modules]]))"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return {name: set(heavy) for name, heavy in map(json.loads, done.stdout.splitlines())}


def test_importing_the_package_imports_nothing_heavy(imported: dict[str, set[str]]):
    assert {name: imported[name] for name in PACKAGE if imported[name]} == {}


def test_the_control_plane_runs_without_the_data_plane(imported: dict[str, set[str]]):
    others = {"torch", "numba", "fastapi", "tokenizers", "transformers"}
    assert {name: imported[name] & others for name in CONTROL_PLANE if imported[name] & others} == {}


def test_edge_and_front_need_neither_torch_nor_numba(imported: dict[str, set[str]]):
    others = {"torch", "numba", "transformers", "llguidance"}
    assert {name: imported[name] & others for name in EDGE if imported[name] & others} == {}


@pytest.mark.slow  # a process for each module
@pytest.mark.timeout(900)
def test_each_module_can_be_the_first_one_imported():
    run_python("tests/meta/import_each.py")


def test_public_names_are_these():
    assert sorted(quire.__all__) == [
        "AsyncEngineArgs",
        "AsyncLLM",
        "AsyncLLMEngine",
        "BeamSearchOutput",
        "BeamSearchParams",
        "BeamSearchSequence",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "EngineArgs",
        "EngineConfig",
        "LLM",
        "LLMEngine",
        "LoRARequest",
        "PoolingParams",
        "PoolingRequestOutput",
        "QuireError",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "ScoringRequestOutput",
        "StructuredOutputParams",
        "StructuredOutputsParams",
        "TextPrompt",
        "TokensPrompt",
        "__version__",
    ]
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        quire.no_such_name  # noqa: B018


def run_python(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_point_down_the_layers():
    run_python("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()", "--no-cache")


def test_the_linter_has_nothing_to_say():
    run_python("-m", "ruff", "check", "--no-cache", ".")


@pytest.mark.slow  # .ci/run does the same
def test_the_types_are_sound():
    run_python("-m", "mypy")


def test_the_formatter_has_nothing_to_do():
    run_python("-m", "ruff", "format", "--no-cache", "--check", ".")

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


def imported_after(code: str) -> set[str]:
    """Return which of `HEAVY` a fresh interpreter has loaded after running `code`."""
    report = f"{code}\nimport json, sys; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", report], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_the_package_imports_nothing_heavy():
    assert imported_after("import quire, quire.cli.main, quire.config, quire.errors, quire.outputs") == set()


@pytest.mark.parametrize(
    "module",
    [
        "quire.scheduler.scheduler",
        "quire.kvcache.manager",
        "quire.engine.core",
        "quire.engine.messages",
        "quire.sampling_params",
    ],
)
def test_the_control_plane_runs_without_the_data_plane(module):
    assert not imported_after(f"import {module}") & {"torch", "numba", "fastapi", "tokenizers", "transformers"}


@pytest.mark.parametrize("module", ["quire.frontend.llm", "quire.frontend.async_llm", "quire.server.run"])
def test_edge_and_front_need_neither_torch_nor_numba(module):
    assert not imported_after(f"import {module}") & {"torch", "numba", "transformers", "llguidance"}


def test_public_names_are_these():
    assert sorted(quire.__all__) == [
        "AsyncLLM",
        "BeamSearchOutput",
        "BeamSearchParams",
        "BeamSearchSequence",
        "ClassificationRequestOutput",
        "CompletionOutput",
        "EmbeddingRequestOutput",
        "EngineConfig",
        "LLM",
        "LoRARequest",
        "PoolingParams",
        "PoolingRequestOutput",
        "QuireError",
        "RequestOutput",
        "RequestOutputKind",
        "SamplingParams",
        "ScoringRequestOutput",
        "StructuredOutputParams",
        "__version__",
    ]
    for name in quire.__all__:
        assert getattr(quire, name) is not None
    with pytest.raises(AttributeError, match="no_such_name"):
        quire.no_such_name  # noqa: B018


def run_tool(*words: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_point_down_the_layers():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "from importlinter.cli import lint_imports_command; lint_imports_command()",
            "--no-cache",
        ],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_linter_has_nothing_to_say():
    run_tool("ruff", "check", "--no-cache", ".")


@pytest.mark.slow  # .ci/run does the same
def test_the_types_are_sound():
    run_tool("mypy")


def test_the_formatter_has_nothing_to_do():
    run_tool("ruff", "format", "--no-cache", "--check", ".")

"""Configs without a model's weights, and cost models with round numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.resolve import load_info
from quire.simulate.contents import StepContents
from quire.simulate.run import SimulatedRun, long_enough, simulate
from quire.simulate.trace import TraceRequest
from tests.meta.source import ROOT

MOONCAKE = ROOT.parent / "shared" / "data" / "mooncake_conversation_trace.jsonl"


@dataclass
class PlainCost:
    """`base` seconds a step, and `token` seconds for each of its tokens."""

    base: float = 1.0
    token: float = 0.0
    num_shapes: int = 0

    def seconds(self, contents: StepContents) -> float:
        return self.base + self.token * contents.num_tokens if contents.num_tokens else 0.0


@pytest.fixture
def replay() -> Callable[..., SimulatedRun]:
    """Simulate requests with engine options given as keywords; the model is the built-in one."""

    def run(requests: Sequence[TraceRequest], cost: Any = None, observer: Any = None, **options: Any) -> SimulatedRun:
        config = EngineConfig.from_kwargs(**{"num_gpu_blocks_override": 1000, **options})
        info = long_enough(load_info(config), config, requests)
        return simulate(config, info, requests, cost or PlainCost(), 2**30, observer)

    return run


@pytest.fixture
def mooncake() -> Path:
    """The published trace; the test is skipped where it is absent."""
    if not MOONCAKE.exists():
        pytest.skip("the Mooncake trace is not here")
    return MOONCAKE

"""Sampling options of rows, as the persistent batch would hand them to the sampler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.engine_request import EngineRequest
from quire.sampling.metadata import SamplingMetadata, SamplingStates
from quire.sampling.processors import LogitsProcessorFactory
from quire.sampling_params import SamplingParams
from quire.step import NewSequenceData


def new_sequence(
    params: SamplingParams, prompt: list[int], output: list[int], *, sampler_state: float | None = None, **request: Any
) -> NewSequenceData:
    """A sequence that has come this far; `request` are fields of `EngineRequest`."""
    spec = EngineRequest("r", prompt, params, **request)
    return NewSequenceData("r", spec, [], 0, output, seed=params.seed or 0, sampler_state=sampler_state)


def metadata_of(
    rows: Sequence[SamplingParams],
    size: int,
    *,
    prompt: list[int],
    outputs: Sequence[list[int]],
    seeds: np.ndarray | None = None,
    positions: np.ndarray | None = None,
    factories: Mapping[str, LogitsProcessorFactory] | None = None,
    **rest: Any,
) -> SamplingMetadata:
    """Options of rows with `size` logits; positions are those behind each output unless given."""
    states = SamplingStates(len(rows), size, factories)
    for row, (params, output) in enumerate(zip(rows, outputs, strict=True)):
        states.add(row, new_sequence(params, prompt, output, **rest))
    if seeds is not None:
        states.seeds[:] = seeds
    if positions is None:
        positions = np.array([len(prompt) + len(output) for output in outputs])
    return states.metadata(np.arange(len(rows)), positions, lambda row: np.array(outputs[row], np.int32))

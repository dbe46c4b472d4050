"""`remaining`: what is left of a request when its engine dies, for another engine that continues it; and `in_turns`:
the same for the engine that ended it, because its sequences do not fit into the KV cache together.

`output_processor.RequestState` has what was sent to the engine, and the tokens that came back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.engine_request import EngineRequest, ResumedSequence
from quire.sampling_params import WITHOUT_FRONTEND, WITHOUT_PROMPT_LOGPROBS

REST = "/rest"  # suffix of the id of a request, of which some sequences have tokens: the others


def remaining(request: EngineRequest, sequences: Mapping[str, ResumedSequence]) -> list[EngineRequest]:
    """Return the engine requests with which another engine continues a request.

    None if all its sequences have ended, and two if only some of the others have tokens: those without any start again,
    with the seeds they had.

    Args:
        sequences: the progress of the sequences that have not ended, by id.
    """
    unfinished = [
        (name, seed) for name, seed in zip(request.sequence_ids, request.seeds, strict=True) if name in sequences
    ]
    started = [(name, seed) for name, seed in unfinished if sequences[name].token_ids]
    fresh = [(name, seed) for name, seed in unfinished if not sequences[name].token_ids]
    found = []
    if started:
        # The log-probabilities of the prompt were delivered.
        params = request.sampling_params.clone(**WITHOUT_FRONTEND, **WITHOUT_PROMPT_LOGPROBS)
        resumed = [
            ResumedSequence([*item.token_ids], item.sampler_state) for item in (sequences[n] for n, _ in started)
        ]
        found.append(_with(request, started, sampling_params=params, resumed=resumed))
    if fresh:
        found.append(_with(request, fresh, request_id=request.request_id + (REST if started else "")))
    return found


def in_turns(request: EngineRequest, sequences: Mapping[str, ResumedSequence]) -> list[EngineRequest]:
    """Return an engine request for each sequence of a request that has not ended; arguments as for `remaining`.

    Log-probabilities of the prompt are computed again with the first of its sequences only.
    """
    found = []
    for name, progress in sequences.items():
        [alone] = remaining(request, {name: progress})
        if name != request.sequence_ids[0]:
            alone.sampling_params = alone.sampling_params.clone(**WITHOUT_PROMPT_LOGPROBS)
        found.append(msgspec.structs.replace(alone, request_id=name))
    return found


def _with(request: EngineRequest, sequences: list[tuple[str, int]], **changes: Any) -> EngineRequest:
    names, seeds = [name for name, _ in sequences], [seed for _, seed in sequences]
    return msgspec.structs.replace(request, sequence_ids=names, seeds=seeds, **changes)

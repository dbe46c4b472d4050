"""`Journal`: the live requests as sent to the engine, and their progress, so that another engine can continue them.

Tokens are recorded where they are delivered: the output processor appends to the lists of `Progress`, from which
outputs are built; so a token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.engine_request import EngineRequest, ResumedSequence
from quire.sampling_params import WITHOUT_PROMPT_LOGPROBS

REST = "/rest"  # suffix of the id of a request, of which some sequences have tokens: the others


@dataclass(slots=True)
class Progress:
    """The progress of a sequence.

    Attributes:
        token_ids: all that were generated. sampler_state: the latest one, see `SequenceOutput`.
    """

    token_ids: list[int] = field(default_factory=list)
    sampler_state: float | None = None


@dataclass(slots=True)
class _Entry:
    """One request: its engine requests, and its sequences that have not ended."""

    engine_requests: Sequence[EngineRequest]
    sequences: dict[str, Progress]


class Journal:
    """All live requests, in order of arrival."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of the live requests."""
        return list(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def begin(
        self, request_id: str, engine_requests: Sequence[EngineRequest], sequences: Mapping[str, Progress]
    ) -> None:
        """Record a request; the progress of its sequences will be recorded in `sequences`."""
        self._entries[request_id] = _Entry(engine_requests, dict(sequences))

    def end_sequence(self, request_id: str, sequence_id: str) -> None:
        """Forget a sequence that has ended."""
        del self._entries[request_id].sequences[sequence_id]

    def end(self, request_id: str) -> None:
        """Forget a request."""
        del self._entries[request_id]

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def replay(self, request_id: str) -> list[EngineRequest]:
        """Return the engine requests with which another engine continues a request.

        Sequences that have ended are left out; those without any token start again, with the seeds they had.
        """
        entry = self._entries[request_id]
        return [again for item in entry.engine_requests for again in _unfinished(item, entry.sequences)]

    def engine_ids(self, request_id: str) -> list[str]:
        """Return the ids of the sequences that have not ended, for `AbortRequests`."""
        return list(self._entries[request_id].sequences)

    def owners(self, engine_ids: Iterable[str]) -> set[str]:
        """Return the requests of engine ids (of requests or sequences); unknown ids stay."""
        owner = {
            name: request_id
            for request_id, entry in self._entries.items()
            for item in entry.engine_requests
            for name in (item.request_id, item.request_id + REST, *item.sequence_ids)
        }
        return {owner.get(name, name) for name in engine_ids}


def _unfinished(request: EngineRequest, sequences: dict[str, Progress]) -> list[EngineRequest]:
    """Return what is left of a request: nothing, one request, or two if only some of its sequences have tokens."""
    unfinished = [
        (name, seed) for name, seed in zip(request.sequence_ids, request.seeds, strict=True) if name in sequences
    ]
    started = [(name, seed) for name, seed in unfinished if sequences[name].token_ids]
    fresh = [(name, seed) for name, seed in unfinished if not sequences[name].token_ids]
    found = []
    if started:
        # The log-probabilities of the prompt were delivered.
        params = request.sampling_params.clone(**WITHOUT_PROMPT_LOGPROBS)
        resumed = [
            ResumedSequence([*item.token_ids], item.sampler_state) for item in (sequences[n] for n, _ in started)
        ]
        found.append(_with(request, started, sampling_params=params, resumed=resumed))
    if fresh:
        found.append(_with(request, fresh, request_id=request.request_id + (REST if started else "")))
    return found


def _with(request: EngineRequest, sequences: list[tuple[str, int]], **changes: Any) -> EngineRequest:
    names, seeds = [name for name, _ in sequences], [seed for _, seed in sequences]
    return msgspec.structs.replace(request, sequence_ids=names, seeds=seeds, **changes)

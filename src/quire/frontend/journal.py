"""`Journal`: what live requests asked for and how far they have come, so that another engine can go on with them.

It holds what is live and nothing else. Tokens are noted where they are delivered: the output processor appends to the
lists of `Progress`, which are at the same time what readers take theirs from; so a token costs nothing here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from quire.engine_request import EngineRequest, ResumedSequence

REST = "/rest"  # behind the id of a request, of which some sequences have begun: the others


class Progress:
    """How far a sequence has come.

    Attributes:
        token_ids: all that was generated. sampler_state: what its sampler last said, see `SequenceOutput`.
    """

    __slots__ = ("sampler_state", "token_ids")

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.sampler_state: float | None = None


class _Entry:
    """One request: what the engine was told, and its sequences that have not ended."""

    __slots__ = ("adds", "sequences")

    def __init__(self, adds: Sequence[EngineRequest], sequences: dict[str, Progress]) -> None:
        self.adds = adds
        self.sequences = sequences


class Journal:
    """All live requests, in the order in which they came."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}

    @property
    def request_ids(self) -> list[str]:
        """Ids of the live requests."""
        return list(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def begin(self, request_id: str, adds: Sequence[EngineRequest], sequences: Mapping[str, Progress]) -> None:
        """Note a request; what comes of its sequences will be noted in `sequences`."""
        self._entries[request_id] = _Entry(adds, dict(sequences))

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
        """Return what another engine is to be told, so that the request goes on where it is.

        Sequences that have ended are left out; those without any token begin anew, with the seeds they had.
        """
        entry = self._entries[request_id]
        return [again for add in entry.adds for again in _again(add, entry.sequences)]

    def engine_ids(self, request_id: str) -> list[str]:
        """Return the ids of the sequences that have not ended, for `AbortRequests`."""
        return list(self._entries[request_id].sequences)

    def owners(self, engine_ids: Iterable[str]) -> set[str]:
        """Return which requests are meant by ids of the engine: its requests' or sequences'; unknown ones stay."""
        owner = {
            name: request_id
            for request_id, entry in self._entries.items()
            for add in entry.adds
            for name in (add.request_id, add.request_id + REST, *add.sequence_ids)
        }
        return {owner.get(name, name) for name in engine_ids}


def _again(add: EngineRequest, sequences: dict[str, Progress]) -> list[EngineRequest]:
    """Return `add` for what is left of it: nothing, one request, or two if only some of its sequences have tokens."""
    left = [(name, seed) for name, seed in zip(add.sequence_ids, add.seeds, strict=True) if name in sequences]
    begun = [(name, seed) for name, seed in left if sequences[name].token_ids]
    fresh = [(name, seed) for name, seed in left if not sequences[name].token_ids]
    found = []
    if begun:
        # They have given away all they had to say of the prompt.
        params = add.sampling_params.clone(prompt_logprobs=None, prompt_logprob_start=None)
        resumed = [ResumedSequence([*item.token_ids], item.sampler_state) for item in (sequences[n] for n, _ in begun)]
        found.append(_with(add, begun, sampling_params=params, resumed=resumed))
    if fresh:
        found.append(_with(add, fresh, request_id=add.request_id + (REST if begun else "")))
    return found


def _with(add: EngineRequest, sequences: list[tuple[str, int]], **changes: Any) -> EngineRequest:
    names, seeds = [name for name, _ in sequences], [seed for _, seed in sequences]
    return msgspec.structs.replace(add, sequence_ids=names, seeds=seeds, **changes)

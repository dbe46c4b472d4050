"""`ThinkingBudget`: follows the reasoning of one sequence, and returns the tokens that end it in time."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from quire.engine_request import ThinkingData


class ThinkingBudget:
    """The position of a sequence in its first reasoning; see `ThinkingData`.

    Attributes:
        over: whether the reasoning has ended, or cannot begin.
        num_tokens: of reasoning so far, its end included.
    """

    def __init__(self, data: ThinkingData, output_ids: Iterable[int] = ()) -> None:
        self._data = data
        self._open = data.open
        self.num_tokens = 0
        self._recent: list[int] = []  # the last tokens, of those the ones since it was opened
        self.over = not data.end_ids or not (data.open or data.start_ids)
        for token_id in output_ids:
            self.accept(token_id)

    def fork(self) -> ThinkingBudget:
        """Return an independent copy."""
        twin = copy.copy(self)
        twin._recent = self._recent.copy()
        return twin

    def accept(self, token_id: int) -> None:
        """Append a generated token."""
        if self.over:
            return
        data = self._data
        marker = data.end_ids if self._open else data.start_ids
        self._recent.append(token_id)
        del self._recent[: -len(marker)]
        self.num_tokens += self._open
        if self._recent == marker:
            self.over = self._open
            self._open = True
            self._recent.clear()

    def forced_tokens(self) -> list[int]:
        """Return the tokens that must come next to end it, if the budget is used up; none otherwise.

        The part of its end that was generated already is not among them.
        """
        if self.over or not self._open or self.num_tokens < self._data.budget:
            return []
        end, recent = self._data.end_ids, self._recent
        most = min(len(end) - 1, len(recent))
        begun = next(n for n in range(most, -1, -1) if recent[len(recent) - n :] == end[:n])
        return end[begun:]

"""`ThinkingBudget`: follows the reasoning of one sequence, and says when it has to end."""

from __future__ import annotations

import copy
from collections.abc import Iterable

from quire.engine_request import ThinkingData


class ThinkingBudget:
    """Where a sequence stands in its first reasoning; see `ThinkingData`.

    Attributes:
        over: whether there is no more to watch: it has ended.
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
        """Return the same for a copy of the sequence."""
        twin = copy.copy(self)
        twin._recent = self._recent.copy()
        return twin

    def accept(self, token_id: int) -> None:
        """Note a generated token."""
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
        """Return what must come next to end it, if the budget is used up; none otherwise.

        What has been generated of its end counts as that.
        """
        if self.over or not self._open or self.num_tokens < self._data.budget:
            return []
        end, recent = self._data.end_ids, self._recent
        most = min(len(end) - 1, len(recent))
        begun = next(n for n in range(most, -1, -1) if recent[len(recent) - n :] == end[:n])
        return end[begun:]

"""A request's status: which transitions there are, and that nothing else changes it."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

import quire.scheduler
from quire.errors import QuireError
from quire.scheduler.request import TRANSITIONS, RequestStatus

DOC = Path(__file__).parents[2] / "docs" / "scheduling.md"

# A way from WAITING to each state that is not final.
WAYS = {
    RequestStatus.WAITING: [],
    RequestStatus.RUNNING: [RequestStatus.RUNNING],
    RequestStatus.LOADING: [RequestStatus.LOADING],
    RequestStatus.DEFERRED: [RequestStatus.DEFERRED],
    RequestStatus.PREEMPTED: [RequestStatus.RUNNING, RequestStatus.PREEMPTED],
    RequestStatus.SWAPPED: [RequestStatus.RUNNING, RequestStatus.SWAPPED],
}


def test_transitions_are_those_of_the_table(request_of):
    for before, after in itertools.product(RequestStatus, RequestStatus):
        request = request_of("r", 3)
        for status in WAYS.get(before, [before]):
            request.transition(status)
        if after in TRANSITIONS[before]:
            request.transition(after)
            assert request.status is after
        else:
            with pytest.raises(QuireError, match=f"cannot become {after.name}"):
                request.transition(after)
            assert request.status is before


def test_the_status_is_written_by_the_request_only(request_of):
    with pytest.raises(AttributeError):
        request_of("r", 3).status = RequestStatus.RUNNING
    for path in Path(quire.scheduler.__path__[0]).glob("*.py"):
        assert path.name == "request.py" or "._status" not in path.read_text(encoding="utf-8"), path


def test_final_states_have_a_reason_and_no_successor():
    for status in RequestStatus:
        assert status.finished == (status.finish_reason is not None) == (not TRANSITIONS[status])


def test_the_picture_in_the_docs_has_all_states():
    text = DOC.read_text(encoding="utf-8")
    picture = text[text.index("**States of a request.**") : text.index("**Tokens of a sequence.**")]
    assert all(status.name in picture for status in RequestStatus if not status.finished)

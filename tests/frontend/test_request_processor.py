"""Requests between callers and an engine: what is sent, and what is taken back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.engine.messages import AbortRequests
from quire.engine_request import EngineRequest
from quire.errors import RequestError
from quire.frontend.request_processor import RequestProcessor
from quire.sampling_params import SamplingParams
from tests.helpers.errors import refused
from tests.helpers.fake_engine import FakeEngine, fake_front_model, reply_with
from tests.helpers.requests import engine_requests


class Rig:
    """A request processor on a fake engine. `sent`: all messages to it; `num_idle`: how often nothing was left."""

    def __init__(self, *, refuse: Callable[[Any], bool] = lambda message: False) -> None:
        front = fake_front_model()
        assert front.tokenizer is not None
        reply = reply_with(front.tokenizer, "hello world, hello")
        self.engine = FakeEngine(vocab_size=front.info.vocab_size, reply=reply, max_num_seqs=2)
        self.sent: list[Any] = []
        self.num_idle = 0
        self.refuse = refuse
        self.processor = RequestProcessor(front, self.engine.ready, self.send, on_idle=self.idle)

    def send(self, message: Any) -> None:
        if self.refuse(message):
            raise RequestError("no more")
        self.sent.append(message)
        self.engine.send(message)

    def idle(self) -> None:
        self.num_idle += 1

    def start(self, request_id: str, **params: Any) -> Any:
        chosen = SamplingParams(max_tokens=50, **params)
        parts = engine_requests(self.processor.inputs, "x", chosen, request_id, arrival_time=0.0)
        return self.processor.start(request_id, "x", chosen, parts)


def test_all_parts_of_a_request_are_sent_and_aborted() -> None:
    rig = Rig()
    rig.start("r", n=3)
    rig.start("s")
    assert [message.request_id for message in rig.sent] == ["r/0", "r/1", "s"]
    rig.processor.abort(["r", "unknown"])
    assert rig.sent[-1] == AbortRequests(request_ids=["r-0", "r-1", "r-2"]) and rig.num_idle == 0
    rig.processor.abort(["r"])
    assert len(rig.sent) == 4, "nothing is left to abort"
    rig.processor.abort(["s"])
    assert rig.num_idle == 1 and not rig.engine.live


def test_a_stop_string_ends_the_request_in_the_engine() -> None:
    rig = Rig()
    state = rig.start("r", stop=["wor"])
    while not state.finished:
        assert rig.processor.process(rig.engine.step()) == [state]
    assert rig.sent[-1] == AbortRequests(request_ids=["r"]) and rig.num_idle == 1
    assert state.take().outputs[0].text == "hello "


def test_what_the_engine_refuses_leaves_nothing_behind() -> None:
    rig = Rig(refuse=lambda message: isinstance(message, EngineRequest) and message.request_id == "r/1")
    with refused(match="no more"):
        rig.start("r", n=3)
    assert not rig.engine.live and rig.processor.outputs.num_unfinished == 0
    assert rig.start("r") is not None, "its id is free again"

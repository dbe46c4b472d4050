"""`RequestProcessor`: the requests of one model, between their callers and an engine; what `LLM` and `AsyncLLM` share.

It checks requests, registers them and sends them to the engine, applies the engine's outputs, and aborts. How a caller
waits (for the tokenizer, for a grammar, for an output) is for the two faces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from quire.engine.messages import AbortRequests, EngineOutputs, Ready
from quire.engine_request import EngineRequest
from quire.frontend.front_model import FrontModel
from quire.frontend.input_processor import InputProcessor
from quire.frontend.output_processor import OutputProcessor, RequestState
from quire.frontend.prompts import Params, Prompt, prompt_text
from quire.frontend.stats import StatListener


class RequestProcessor:
    """Checks the requests to an engine, sends them, and applies its outputs to them.

    Args:
        model: the model as the front sees it. ready: the engine that serves it. send: sends a message to the engine.
        seed: as for `InputProcessor`. listeners: as for `OutputProcessor`.
        on_idle: called when an abort was sent that left no request unfinished.

    Attributes:
        inputs: tokenizes, checks and builds engine requests. outputs: the states of all live requests.
    """

    def __init__(
        self,
        model: FrontModel,
        ready: Ready,
        send: Callable[[EngineRequest | AbortRequests], None],
        *,
        seed: int | None = None,
        listeners: Iterable[StatListener] = (),
        on_idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.inputs = InputProcessor(model, ready, seed)
        self.outputs = OutputProcessor(model.tokenizer, listeners)
        self._send = send
        self._on_idle = on_idle

    def start(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        engine_requests: Sequence[EngineRequest],
        notify: Callable[[], None] | None = None,
    ) -> RequestState:
        """Register a request and send what `inputs.build` made of it. `notify` as in `RequestState`.

        Raises:
            RequestError: an unfinished request has this id.
            QuireError: an engine in the same thread refuses it; another one answers with an output that has the error.
        """
        state = self.outputs.add(request_id, prompt_text(prompt), engine_requests, params, notify)
        try:
            for engine_request in engine_requests:
                self._send(engine_request)
        except BaseException:
            self.abort([request_id])
            raise
        return state

    def process(self, outputs: EngineOutputs) -> list[RequestState]:
        """Apply the outputs of a step; return the requests that changed. Stop strings end requests in the engine."""
        updated, aborts, again = self.outputs.process(outputs)
        self._send_aborts(aborts)
        for engine_request in again:
            self._send(engine_request)
        return updated

    def abort(self, request_ids: Iterable[str]) -> None:
        """End requests with finish_reason "abort", here and in the engine. Unknown ids are ignored."""
        self._send_aborts(self.outputs.abort(request_ids))

    def _send_aborts(self, engine_ids: list[str]) -> None:
        if engine_ids:
            self._send(AbortRequests(request_ids=engine_ids))
            if self.outputs.num_unfinished == 0:
                self._on_idle()

"""`OutputProcessor`: from the outputs of a step to what callers see: text, stop strings, log-probabilities, times.

`OutputProcessor.process` updates the `RequestState`s of a step's outputs. A `RequestOutput` is built only when it is
read (`RequestState.take`), so a slow reader costs no memory beyond the text itself: several steps are merged into its
next output.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.engine.messages import EngineOutputs
from quire.engine_request import EngineRequest, LoRARequest, ResumedSequence
from quire.errors import EngineAsleepError, ErrorData, GenerationError, QuireError, RequestError
from quire.frontend.detokenizer import IncrementalDetokenizer
from quire.frontend.replay import REST, in_turns, remaining
from quire.frontend.stats import FinishedRequest, StatListener
from quire.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
    TokenLogprobs,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.step import SEQUENCES_DO_NOT_FIT, BeamOutput, PooledData, SequenceOutput, TokenTopLogprobs
from quire.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Positions = list[TokenLogprobs] | FlatLogprobs
CUMULATIVE, DELTA, FINAL_ONLY = RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA, RequestOutputKind.FINAL_ONLY


class _Completion:
    """One sequence and its output so far. Text and log-probabilities that a DELTA reader has read are dropped.

    All tokens stay: `token_ids` is the list of `progress`, with which another engine can continue.
    """

    __slots__ = (
        "_make_detokenizer",
        "changed",
        "cumulative_logprob",
        "detokenizer",
        "error",
        "finish_reason",
        "index",
        "last_token_time",
        "logprobs",
        "num_taken",
        "num_tokens",
        "part",
        "progress",
        "ranked",
        "sequence_id",
        "stop_reason",
        "text_parts",
        "token_ids",
    )

    def __init__(
        self,
        index: int,
        sequence_id: str,
        params: SamplingParams,
        make_detokenizer: Callable[[], IncrementalDetokenizer | None],
        part: int = 0,
    ) -> None:
        self.index = index
        self.sequence_id = sequence_id
        self.ranked = params.logprob_token_ids is None  # whether logprobs are those of the likeliest tokens
        self.part = part  # index of its `EngineRequest`
        self._make_detokenizer: Callable[[], IncrementalDetokenizer | None] | None = make_detokenizer
        self.detokenizer: IncrementalDetokenizer | None = None  # made with the first token: thousands may wait
        self.progress = ResumedSequence([])
        self.token_ids = self.progress.token_ids
        self.text_parts: list[str] = []
        scored = params.returns_logprobs
        self.logprobs: Positions | None = None
        if scored:
            self.logprobs = FlatLogprobs() if params.flat_logprobs else []
        summed = scored or params.num_sequences > params.n
        self.cumulative_logprob: float | None = 0.0 if summed else None
        self.error: QuireError | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_tokens = 0
        self.num_taken: int | None = None  # tokens that `take` has handed out
        self.last_token_time: float | None = None
        self.changed = False

    def add(self, output: SequenceOutput, note: Callable[[Positions, TokenTopLogprobs, bool], None], cut: bool) -> bool:
        """Apply the output of a step; return whether a stop string was found.

        Args:
            note: appends an entry to log-probabilities; see `OutputProcessor._note_logprobs`.
            cut: leave out the text of the token that stopped the sequence.
        """
        self.changed = True
        token_ids = output.new_token_ids
        found = False
        if self._make_detokenizer is not None:
            self.detokenizer, self._make_detokenizer = self._make_detokenizer(), None
        if self.detokenizer is not None:
            cut = cut and output.finish_reason == "stop" and not output.complete
            last = len(token_ids) - 1 if cut else -1
            for position, token_id in enumerate(token_ids):
                if position == last:
                    break
                text = self.detokenizer.add(token_id)
                if text:
                    self.text_parts.append(text)
                if self.detokenizer.matched is not None:
                    token_ids = token_ids[: position + 1]
                    found = True
                    break
        self.token_ids.extend(token_ids)
        self.num_tokens += len(token_ids)
        if output.sampler_state is not None:
            self.progress.sampler_state = output.sampler_state
        if self.cumulative_logprob is not None and output.logprobs:
            for entry in output.logprobs[: len(token_ids)]:
                self.cumulative_logprob += entry.logprobs[0]
                if self.logprobs is not None:
                    note(self.logprobs, entry, self.ranked)
        if found:
            assert self.detokenizer is not None
            self.finish("stop", self.detokenizer.matched)
        elif output.finish_reason is not None:
            self.finish(output.finish_reason, output.stop_reason)
        if self.finish_reason == "error" and self.error is None:
            failed = output.error or ErrorData("GenerationError", "the engine failed on this request")
            self.error = failed.exception()
        return found

    def finish(self, reason: str, stop_reason: int | str | None = None) -> None:
        """End the completion; text held back so far comes out."""
        self._make_detokenizer = None
        if self.detokenizer is not None:
            rest = ""
            try:
                rest = self.detokenizer.flush()
            except GenerationError as error:
                if reason != "abort":
                    reason, self.error = "error", self.error or error
            if rest:
                self.text_parts.append(rest)
            if self.detokenizer.matched is not None and reason not in ("abort", "error"):
                reason, stop_reason = "stop", self.detokenizer.matched
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.changed = True

    def due(self, interval: int) -> bool:
        """Whether there is something to take, and it is the first or the last, or has `interval` tokens."""
        first_or_last = self.num_taken is None or self.finish_reason is not None
        return self.changed and (first_or_last or self.num_tokens - (self.num_taken or 0) >= interval)

    def take(self, delta: bool, lora_request: LoRARequest | None, last: bool = False) -> CompletionOutput:
        """Build the output; with `delta` only what was not taken before. `last`: there will be no other one."""
        text = "".join(self.text_parts)
        if delta:
            token_ids, logprobs = self.token_ids[self.num_taken or 0 :], self.logprobs
            self.text_parts = []
            self.logprobs = None if logprobs is None else type(logprobs)()
        else:
            token_ids = self.token_ids.copy()
            logprobs = self.logprobs if last or self.logprobs is None else self.logprobs.copy()
            self.logprobs = None if last else self.logprobs
            self.text_parts = [text]
        self.changed = False
        self.num_taken = self.num_tokens
        return CompletionOutput(
            self.index,
            text,
            token_ids,
            self.cumulative_logprob,
            logprobs,
            self.finish_reason,
            self.stop_reason,
            self.error,
            lora_request,
        )


class RequestState:
    """One request while it runs, and until its last output is taken.

    Attributes:
        engine_requests: as they were sent to the engine; none once the request has ended.
        notify: called whenever `take` may have something new.
        error: set if the request failed in a way that its outputs cannot express.
        pooled: the output of a pooling request, once it has finished.
        completions: one for each sequence; of a beam search one, until the beams are there.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        engine_requests: Sequence[EngineRequest],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        notify: Callable[[], None] | None = None,
    ) -> None:
        self.request_id = request_id
        self.prompt = prompt
        self.engine_requests = engine_requests
        self.prompt_token_ids = engine_requests[0].prompt_token_ids
        self.params = params
        # All its ids in an engine, also in one that replaced another.
        self.ids = {request_id, *[name for item in engine_requests for name in (item.request_id, *item.sequence_ids)]}
        self.ids |= {item.request_id + REST for item in engine_requests if len(item.sequence_ids) > 1}
        self.max_tokens = engine_requests[0].max_tokens
        self._lora = engine_requests[0].lora
        self.pooled: PooledData | None = None
        self.notify = notify
        self.error: Exception | None = None
        self.metrics = RequestMetrics(arrival_time=engine_requests[0].arrival_time)
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprobs | None] | FlatLogprobs | None = None
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = _unscored(params)
        self._prompt_logprobs_taken = False
        self.cut_stop_token = not params.include_stop_str_in_output
        self._tokenizer = tokenizer
        # The grammar of a chat message without structured output constrains its tool calls only.
        self._is_structured = params.structured_outputs is not None
        parts = [(part, name) for part, item in enumerate(engine_requests) for name in item.sequence_ids]
        self.completions = [
            _Completion(index, name, params, self._detokenizer, part) for index, (part, name) in enumerate(parts)
        ]
        self.num_unfinished = len(self.completions)
        self._num_preemptions = [0] * len(engine_requests)
        self._ranked = params.num_sequences > params.n
        self._kind = FINAL_ONLY if self._ranked else params.output_kind
        self._interval = params.stream_interval or 1
        self._changed = False

    def _detokenizer(self) -> IncrementalDetokenizer | None:
        params, tokenizer = self.params, self._tokenizer
        if tokenizer is None or not params.detokenize:
            return None
        assert not isinstance(params.stop, str), "made a list by SamplingParams"
        return IncrementalDetokenizer(
            tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop or (),
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            continues=self._is_structured,
        )

    @property
    def finished(self) -> bool:
        """Whether all completions have ended."""
        return self.num_unfinished == 0

    @property
    def unfinished(self) -> list[_Completion]:
        """The completions that have not ended."""
        return [item for item in self.completions if item.finish_reason is None]

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all sequences so far."""
        return sum(item.num_tokens for item in self.completions)

    def note_preemptions(self, part: int, count: int) -> None:
        """Record how often one of its `EngineRequest`s was preempted, which all its sequences report."""
        self._num_preemptions[part] = max(self._num_preemptions[part], count)
        self.metrics.num_preemptions = sum(self._num_preemptions)

    def replay(self) -> list[EngineRequest]:
        """Return the engine requests with which a new engine continues.

        Log-probabilities of a prompt that was not finished are dropped; the new engine computes all of them again.
        """
        first = self.completions[0]
        if self.prompt_logprobs is not None and not first.num_tokens and first.finish_reason is None:
            self.prompt_logprobs = _unscored(self.params)
        sequences = {item.sequence_id: item.progress for item in self.unfinished}
        return [again for item in self.engine_requests for again in remaining(item, sequences)]

    def run_in_turns(self, part: int) -> list[EngineRequest]:
        """Replace one of its `EngineRequest`s by one for each sequence that has not ended, and return these."""
        unfinished = [item for item in self.unfinished if item.part == part]
        found = in_turns(self.engine_requests[part], {item.sequence_id: item.progress for item in unfinished})
        first, *others = found
        self.engine_requests = [*self.engine_requests[:part], first, *self.engine_requests[part + 1 :], *others]
        for item in unfinished[1:]:
            item.part = len(self._num_preemptions)
            self._num_preemptions.append(self._num_preemptions[part])
        return found

    def set_beams(self, beams: Sequence[BeamOutput]) -> None:
        """End a beam search with these as its completions."""
        [search] = self.completions
        self.completions = []
        for index, beam in enumerate(beams):
            completion = _Completion(index, search.sequence_id, self.params, self._detokenizer)
            output = SequenceOutput(search.sequence_id, beam.token_ids, finish_reason=beam.finish_reason)
            completion.add(output, lambda positions, entry, ranked: None, self.cut_stop_token)
            completion.cumulative_logprob = beam.cumulative_logprob
            self.completions.append(completion)

    def _best(self) -> list[_Completion]:
        """Return the `n` best of the finished completions, best first, and number them anew.

        Any that failed or was aborted come first: without them the best are unknown. Beams come ranked.
        """
        if self.params.use_beam_search:
            return self.completions[: self.params.n]
        best = sorted(
            self.completions,
            key=lambda item: (item.finish_reason not in ("error", "abort"), -(item.cumulative_logprob or 0.0)),
        )[: self.params.n]
        for index, item in enumerate(best):
            item.index = index
        return best

    def touch(self) -> None:
        """Record that there is something to take."""
        self._changed = True
        if self.notify is not None:
            self.notify()

    def fail(self, error: Exception) -> None:
        """End the request with an error, which comes after what `take` still has."""
        self.error = error
        if self.notify is not None:
            self.notify()

    def take(self) -> RequestOutput | None:
        """Return the next output, or None if there is nothing new yet."""
        if not self._changed or (self._kind == FINAL_ONLY and not self.finished):
            return None
        delta = self._kind == DELTA
        shown = self._best() if self._ranked else self.completions
        if self._interval > 1 and not self.finished and self.error is None:
            due = [item for item in shown if item.due(self._interval)]
            if not due:
                return None
            shown = due if delta else shown
        self._changed = False
        outputs = [item.take(delta, self._lora, self.finished) for item in shown if item.changed or not delta]
        prompt_logprobs = self.prompt_logprobs
        if delta:
            if self._prompt_logprobs_taken:
                prompt_logprobs = None
            self._prompt_logprobs_taken = True
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.finished,
            prompt_logprobs=prompt_logprobs,
            num_cached_tokens=self.num_cached_tokens,
            num_generated_tokens=self.num_generated_tokens,
            metrics=self.metrics,
            lora_request=self._lora,
        )


class RequestStream:
    """The outputs of one request, as an async iterator; ends after the finished one. It has no queue.

    Args:
        state: all that the front knows of the request. changed: set by its `notify`. abort: ends the request;
            abort_threadsafe: from any thread.

    Raises (while iterating): `EngineDeadError` if the engine died.
    """

    def __init__(
        self,
        state: RequestState,
        changed: asyncio.Event,
        *,
        abort: Callable[[], None],
        abort_threadsafe: Callable[[], None],
    ) -> None:
        self.state = state
        self._changed = changed
        self._abort = abort
        self._abort_threadsafe = abort_threadsafe

    @property
    def request_id(self) -> str:
        """Id of the request."""
        return self.state.request_id

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt, tokenized."""
        return self.state.prompt_token_ids

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all sequences so far."""
        return self.state.num_generated_tokens

    @property
    def finished(self) -> bool:
        """Whether the request has ended, though perhaps not every output was read."""
        return self.state.finished or self.state.error is not None

    def __aiter__(self) -> RequestStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            output = self.state.take()
            if output is not None:
                return output
            if self.state.error is not None:
                raise self.state.error
            if self.state.finished:
                raise StopAsyncIteration
            self._changed.clear()
            await self._changed.wait()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop reading; an unfinished request is aborted."""
        self.close()

    def close(self) -> None:
        """As `aclose`, which has nothing to wait for."""
        if not self.finished:
            self._abort()

    def __del__(self) -> None:
        # A stream dropped without being closed; the collector may run in any thread.
        if not self.finished:
            self._abort_threadsafe()


class OutputProcessor:
    """Keeps the state of all live requests and applies the engine's outputs to it.

    Args:
        tokenizer: None leaves all texts empty.
        listeners: called for each step, token and end of a request.

    Attributes:
        num_engine_requests: of the requests that have not ended; one with many sequences has several.
    """

    def __init__(self, tokenizer: Tokenizer | None, listeners: Iterable[StatListener] = ()) -> None:
        self._tokenizer = tokenizer
        self._listeners = list(listeners)
        self.num_engine_requests = 0
        self._states: dict[str, RequestState] = {}
        self._sequences: dict[str, tuple[RequestState, _Completion]] = {}
        # Ids of requests and sequences, as callers and the engine call them, with the id of the request.
        self._ids: dict[str, str] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._states)

    @property
    def request_ids(self) -> list[str]:
        """Ids of the requests that have not ended, in order of arrival."""
        return list(self._states)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        engine_requests: Sequence[EngineRequest],
        params: SamplingParams | PoolingParams,
        notify: Callable[[], None] | None = None,
    ) -> RequestState:
        """Register a request; the caller then sends its engine requests to the engine.

        Raises:
            RequestError: an unfinished request has this id.
        """
        if not isinstance(params, SamplingParams):
            params = engine_requests[0].sampling_params
        state = RequestState(request_id, prompt, engine_requests, params, self._tokenizer, notify)
        if not self._ids.keys().isdisjoint(state.ids):
            raise RequestError(
                f"request_id {request_id[:100]} belongs to an unfinished request",
                param="request_id",
                code="duplicate_request_id",
            )
        self._states[request_id] = state
        self.num_engine_requests += len(engine_requests)
        self._ids.update(dict.fromkeys(state.ids, request_id))
        for completion in state.completions:
            self._sequences[completion.sequence_id] = (state, completion)
        return state

    def process(self, outputs: EngineOutputs) -> tuple[list[RequestState], list[str], list[EngineRequest]]:
        """Apply the outputs of one step.

        Returns:
            The requests that changed, the engine ids to abort because a stop string was found, and engine requests to
            send for sequences that do not fit into the KV cache together.
        """
        updated: dict[str, RequestState] = {}
        too_wide: dict[tuple[str, int], RequestState] = {}
        aborts: list[str] = []
        now = outputs.timestamp
        num_prompt_tokens = num_generation_tokens = 0
        for output in outputs.outputs:
            entry = self._sequences.get(output.sequence_id)
            if entry is None:
                continue  # aborted while the step ran
            state, completion = entry
            try:
                self._note_prompt(state, completion, output)
            except GenerationError as error:
                aborts += self._end_undecodable(state, error)
                updated[state.request_id] = state
                continue
            if not output.new_token_ids and output.finish_reason is None:
                continue  # a part of a prompt
            if output.error is not None and output.error.code == SEQUENCES_DO_NOT_FIT:
                too_wide[state.request_id, completion.part] = state
                continue
            if output.error is not None and not any(item.error for item in state.completions):
                level = logging.WARNING if output.error.refused else logging.ERROR
                logger.log(level, "request %s failed in the engine: %s", state.request_id, output.error.message)
            if output.pooled is not None:
                state.pooled = output.pooled
            if output.new_token_ids or output.beams or output.pooled:
                if state.metrics.first_token_time is None:
                    num_prompt_tokens += len(state.prompt_token_ids)
                self._note_tokens(state, completion, now)
            num_before = completion.num_tokens
            try:
                found = completion.add(output, self._note_logprobs, state.cut_stop_token)
            except GenerationError as error:
                aborts += self._end_undecodable(state, error)
                updated[state.request_id] = state
                continue
            if output.beams:
                state.set_beams(output.beams)
                num_generation_tokens += state.num_generated_tokens
            num_generation_tokens += completion.num_tokens - num_before
            if found and output.finish_reason is None:
                aborts.append(output.sequence_id)
            if completion.finish_reason is not None:
                self._finish_sequence(state, completion, now)
            updated[state.request_id] = state
        for listener in self._listeners:
            listener.on_step(outputs.stats, num_prompt_tokens, num_generation_tokens)
        for state in updated.values():
            state.touch()
        again = [item for (_, part), state in too_wide.items() for item in state.run_in_turns(part)]
        self.num_engine_requests += len(again) - len(too_wide)
        return list(updated.values()), aborts, again

    def _end_undecodable(self, state: RequestState, error: GenerationError) -> list[str]:
        """End a request whose tokens the tokenizer cannot decode; return the engine ids to abort."""
        logger.warning("request %s: %s", state.request_id, error.message)
        for completion in state.completions:
            completion.detokenizer = None
        return self._end(state, "error", error)

    def _note_prompt(self, state: RequestState, completion: _Completion, output: SequenceOutput) -> None:
        """Record what concerns the request as a whole."""
        metrics = state.metrics
        if output.first_scheduled_time is not None and metrics.first_scheduled_time is None:
            metrics.first_scheduled_time = output.first_scheduled_time
        if output.num_preemptions:
            state.note_preemptions(completion.part, output.num_preemptions)
        if completion.index:
            return
        if output.num_cached_tokens is not None and not completion.num_tokens:  # not what a resumed request finds
            state.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs and state.prompt_logprobs is not None:
            # A preempted request may compute the same positions again.
            room = len(state.prompt_token_ids) - len(state.prompt_logprobs)
            for entry in output.prompt_logprobs[:room]:
                self._note_logprobs(state.prompt_logprobs, entry)

    def _note_tokens(self, state: RequestState, completion: _Completion, now: float) -> None:
        metrics = state.metrics
        if metrics.first_token_time is None:
            metrics.first_token_time = now
            for listener in self._listeners:
                listener.on_first_token(now - metrics.arrival_time)
        elif completion.last_token_time is not None:
            for listener in self._listeners:
                listener.on_next_token(now - completion.last_token_time)
        metrics.last_token_time = completion.last_token_time = now

    def _note_logprobs(self, positions: list[Any] | FlatLogprobs, entry: TokenTopLogprobs, ranked: bool = True) -> None:
        """Append a position; unless `ranked`, its tokens were requested by id, and only the first has a known rank."""
        ids, values = entry.token_ids, entry.logprobs
        ranks = [entry.rank, *(range(1, len(ids)) if ranked else [None] * (len(ids) - 1))]
        text = None if self._tokenizer is None else self._tokenizer.token_text
        if isinstance(positions, FlatLogprobs):
            if ids[0] in ids[1:]:  # once is enough
                again = ids.index(ids[0], 1)
                ids, values, ranks = ([*row[:again], *row[again + 1 :]] for row in (ids, values, ranks))
            positions.add(ids, values, ranks, [None if text is None else text(token_id) for token_id in ids])
            return
        found: TokenLogprobs = {}
        for token_id, value, rank in zip(ids, values, ranks, strict=True):
            if token_id not in found:
                found[token_id] = Logprob(value, rank, None if text is None else text(token_id))
        positions.append(found)

    def _finish_sequence(self, state: RequestState, completion: _Completion, now: float) -> None:
        del self._sequences[completion.sequence_id]
        state.num_unfinished -= 1
        if state.finished:
            self._finish_request(state, now)

    def _finish_request(self, state: RequestState, now: float) -> None:
        del self._states[state.request_id]
        for name in state.ids:
            del self._ids[name]
        self.num_engine_requests -= len(state.engine_requests)
        state.engine_requests = ()  # a grammar may be large, and the last output may wait for its reader
        state.metrics.finished_time = now
        if not self._listeners:
            return
        finished = FinishedRequest(
            request_id=state.request_id,
            num_prompt_tokens=len(state.prompt_token_ids),
            num_generation_tokens=state.num_generated_tokens,
            max_tokens=state.max_tokens,
            n=state.params.n,
            num_sequences=len(state.completions),
            finish_reason=state.completions[0].finish_reason or "abort",
            refused=isinstance(state.completions[0].error, RequestError | EngineAsleepError),
            num_cached_tokens=state.num_cached_tokens,
            metrics=state.metrics,
            max_generation_tokens=max(item.num_tokens for item in state.completions),
        )
        for listener in self._listeners:
            listener.on_finished(finished)

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """End requests with finish_reason "abort"; return the engine ids to abort. Unknown ids are ignored."""
        aborts: list[str] = []
        for request_id in request_ids:
            state = self._states.get(request_id)
            if state is not None:
                aborts += self._end(state, "abort")
        return aborts

    def fail(self, request_id: str, error: QuireError) -> None:
        """End one request with an error, which its unfinished completions get."""
        self._end(self._states[request_id], "error", error)

    def _end(self, state: RequestState, reason: str, error: QuireError | None = None) -> list[str]:
        """End what is unfinished of a request; return the ids of these sequences."""
        unfinished = state.unfinished
        for completion in unfinished:
            completion.finish(reason)
            completion.error = error
            self._finish_sequence(state, completion, time.monotonic())
        state.touch()
        return [item.sequence_id for item in unfinished]

    def replay(self, request_id: str) -> list[EngineRequest]:
        """Return the engine requests with which a new engine continues an unfinished request."""
        return self._states[request_id].replay()

    def owners(self, engine_ids: Iterable[str]) -> set[str]:
        """Return the requests of engine ids (of requests or sequences); unknown ids stay."""
        return {self._ids.get(name, name) for name in engine_ids}

    def engine_ids(self, request_id: str) -> list[str]:
        """Return the ids of the sequences of a request that have not ended, for `AbortRequests`."""
        state = self._states.get(request_id)
        return [] if state is None else [item.sequence_id for item in state.unfinished]

    def progress(self, request_id: str) -> tuple[int, int] | None:
        """Return how many tokens a request has, and how many sequences that go on; None if it has ended."""
        state = self._states.get(request_id)
        return None if state is None else (state.num_generated_tokens, state.num_unfinished)

    def fail_all(self, error: Exception) -> None:
        """End every request with an error, because the engine is gone."""
        states = list(self._states.values())
        self.num_engine_requests = 0
        self._states.clear()
        self._sequences.clear()
        self._ids.clear()
        for state in states:
            state.fail(error)


def _unscored(params: SamplingParams) -> list[TokenLogprobs | None] | FlatLogprobs:
    """Return the log-probabilities of a prompt's first positions, which have none."""
    count = max(params.prompt_logprob_start or 0, 1)
    if not params.flat_logprobs:
        return [None] * count
    flat = FlatLogprobs()
    for _ in range(count):
        flat.add([], [], [], [])
    return flat


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """Return the beams, best first, as vLLM's `LLM.beam_search` has them. Raises what ended the search early."""
    for completion in output.outputs:
        if completion.error is not None:
            raise completion.error
        if completion.finish_reason == "abort":
            raise QuireError("the beam search was aborted", code="request_aborted")
    return BeamSearchOutput(
        [_beam_sequence(output.prompt_token_ids, completion, params, tokenizer) for completion in output.outputs]
    )


def _beam_sequence(
    prompt_ids: list[int], completion: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    token_ids = completion.token_ids
    cum_logprob = completion.cumulative_logprob or 0.0
    stopped = completion.finish_reason == "stop"
    kept = token_ids[:-1] if stopped and not params.include_stop_str_in_output else token_ids
    tokens = prompt_ids + kept
    return BeamSearchSequence(
        tokens=tokens,
        cum_logprob=cum_logprob,
        text="" if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens),
        finish_reason=completion.finish_reason,
        stop_reason=token_ids[-1] if stopped else None,
        score=cum_logprob / len(token_ids) ** params.length_penalty,
    )

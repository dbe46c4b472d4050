"""POST /v1/completions: prompts of every kind, echo, logprobs, streams."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from quire.checks import INT64_MAX, check_int, check_unicode
from quire.errors import RequestError, UnsupportedError
from quire.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.sampling_params import SamplingParams
from quire.server.context import ModelContext, model_context
from quire.server.generation import MAX_PROMPTS, Chunk, Generation, check_stream_fields
from quire.server.logprobs import completion_logprobs, prompt_logprobs
from quire.server.parsing import parse_request, split_prompts
from quire.server.protocol import CompletionRequest, body_schema
from quire.server.streaming import EventStream
from quire.server.tokenize import encode_text, tokenizer_of

DEFAULT_MAX_TOKENS = 16

router = APIRouter()


@router.post("/v1/completions", openapi_extra=body_schema(CompletionRequest, "text/event-stream"))
async def create_completion(request: Request) -> Response:
    """Complete one or several prompts."""
    body = await parse_request(request, CompletionRequest)
    generation = Completion(await model_context(request, body.model), body)
    await generation.start()
    if body.stream:
        return EventStream(generation.events(), generation.close)
    return await generation.answer()


class Completion(Generation):
    """A completions request."""

    object_type = chunk_type = "text_completion"

    body: CompletionRequest

    def __init__(self, context: ModelContext, body: CompletionRequest) -> None:
        super().__init__(context, body, "cmpl")
        self.prompts = split_prompts(body.prompt, "prompt", MAX_PROMPTS)
        self.only_prompt = body.echo and body.max_tokens == 0
        self._marks = self._fill_in_the_middle(body.suffix) if body.suffix else None
        check_stream_fields(body)
        self.params = self._params(body)
        self._streamed: dict[int, dict[int, _Choice]] = {}  # choices by prompt and number
        self._prompt_logprobs: dict[int, Sequence[TokenLogprobs | None] | None] = {}
        self.shows_logprobs = self.params.returns_logprobs

    def _params(self, body: CompletionRequest) -> SamplingParams:
        changes: dict[str, Any] = {"logprobs": None}
        if body.logprobs is not None:
            changes["logprobs"] = check_int("logprobs", body.logprobs, -1, INT64_MAX)
        changes["max_tokens"] = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        if self.only_prompt:
            changes["max_tokens"] = 1  # computed and thrown away: the engine generates at least one
        if body.echo and body.logprobs is not None:
            changes["prompt_logprobs"] = body.logprobs
        return self.request_params(**changes)

    def _fill_in_the_middle(self, suffix: str) -> tuple[str, str, str]:
        """Return the tokenizer's marks of prefix, suffix and middle; raise `RequestError` if there can be no suffix."""
        check_unicode(suffix, "suffix")
        marks = tokenizer_of(self.context.llm).fill_in_the_middle
        if marks is None:
            raise UnsupportedError("suffix: this model has no tokens for filling in the middle", param="suffix")
        if not all(isinstance(prompt, str) for prompt, _ in self.prompts):
            raise RequestError("suffix needs prompts that are texts", param="suffix")
        if self.body.truncate_prompt_tokens is not None:
            raise RequestError("suffix contradicts truncate_prompt_tokens; give one of them", param="suffix")
        return marks

    async def start(self) -> None:
        """Check the prompts and submit them to the engine."""
        self.context.server.check_room(self.context.model)  # before anything is rendered or tokenized
        prompts = self.prompts
        if self._marks is not None:
            before, behind, middle = self._marks
            prompts = [(f"{before}{prompt}{behind}{self.body.suffix}{middle}", param) for prompt, param in prompts]
        if not self.body.add_special_tokens:
            prompts = [
                (
                    await encode_text(self.context.llm, prompt, False, param) if isinstance(prompt, str) else prompt,
                    param,
                )
                for prompt, param in prompts
            ]
        await self.submit(prompts, self.params)

    def count(self, index: int, output: RequestOutput) -> None:
        """As `Generation.count`, but for a token that is thrown away."""
        if not self.only_prompt:
            super().count(index, output)

    def choices(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """As `Generation.choices`."""
        choices = []
        for index, output in enumerate(outputs):
            shown: dict[str, Any] = {}
            if self.body.prompt_logprobs is not None:
                shown["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
            for completion in output.outputs:
                choice = _Choice(index * self.n + completion.index, index, output.prompt_logprobs)
                choices.append({**choice.part(self, completion), **shown})
        return {"choices": choices}

    def chunks(self, index: int, output: RequestOutput) -> Iterator[Chunk]:
        """As `Generation.chunks`; none of a choice to which the output adds nothing."""
        choices = self._streamed.setdefault(index, {})
        positions = self._prompt_logprobs.setdefault(index, output.prompt_logprobs)
        for completion in output.outputs:
            choice = choices.get(completion.index)
            if choice is None:
                choice = choices[completion.index] = _Choice(index * self.n + completion.index, index, positions)
            part = choice.part(self, completion)
            if part["text"] or part["finish_reason"] or part["logprobs"] or "token_ids" in part:
                yield {"choices": [part]}


class _Choice:
    """One choice of the response, or the state of one in a stream."""

    def __init__(self, index: int, prompt_index: int, positions: Sequence[TokenLogprobs | None] | None) -> None:
        self.index = index
        self.prompt_index = prompt_index
        self.positions = positions
        self.offset = 0
        self.begun = False

    def part(self, job: Completion, output: CompletionOutput) -> dict[str, Any]:
        """Return the choice with the text of `output`; the first time, with echo, preceded by the prompt."""
        body = job.body
        text, token_ids, positions = output.text, output.token_ids, list(output.logprobs or [])
        if job.only_prompt:
            text, token_ids, positions = "", [], []
        shown_ids: list[int] = token_ids
        shown_positions: list[TokenLogprobs | None] = [*positions]
        prompt_ids = job.streams[self.prompt_index].prompt_token_ids
        first = not self.begun
        self.begun = True
        if first and body.echo:
            text = self._prompt_text(job, prompt_ids) + text
            shown_ids, shown_positions = prompt_ids + token_ids, [*(self.positions or []), *positions]
        logprobs = None
        if job.shows_logprobs and shown_ids:
            logprobs, self.offset = completion_logprobs(
                shown_ids,
                shown_positions,
                self.offset,
                as_ids=body.return_tokens_as_token_ids,
                tokenizer=job.context.llm.tokenizer,
            )
        part: dict[str, Any] = {
            "index": self.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if job.only_prompt and output.finished else output.finish_reason,
            "stop_reason": None if job.only_prompt else output.stop_reason,
        }
        if body.return_token_ids:
            part["token_ids"] = token_ids
            if first:
                part["prompt_token_ids"] = prompt_ids
        return part

    def _prompt_text(self, job: Completion, prompt_ids: list[int]) -> str:
        prompt, _ = job.prompts[self.prompt_index]
        tokenizer = job.context.llm.tokenizer
        if isinstance(prompt, str) and job.body.truncate_prompt_tokens is None:
            return prompt
        return "" if tokenizer is None else tokenizer.decode(prompt_ids, job.body.skip_special_tokens)

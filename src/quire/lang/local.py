"""`LocalBackend`: programs on an engine in this process, token by token.

A context keeps the exact ids of its text. Text that the program appends waits until something is to be generated; then
it is tokenized in one piece behind the ids that exist, and generated ids are appended as they are. Nothing is tokenized
twice, so the prefix cache holds everything that states have in common, generated tokens included.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from quire.config import DEMO_MODEL
from quire.errors import GenerationError, OverloadedError, RequestError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat import ChatTemplate
from quire.frontend.output_processor import RequestStream
from quire.lang.backend import Backend, Capture, Context, Emit, Turn
from quire.lang.parts import Gen, Select, max_tokens_of
from quire.outputs import CompletionOutput, RequestOutput
from quire.sampling_params import RequestOutputKind, SamplingParams
from quire.structured_outputs import StructuredOutputParams
from quire.tokenizer.tokenizer import Tokenizer

MARK_DIGITS = 24
POLL_SECONDS = 1.0


def continuation_ids(tokenizer: Tokenizer, text: str, encode: Callable[[str], list[int]]) -> list[int]:
    """Return the ids of a text that stands behind other tokens.

    SentencePiece tokenizers put a space before whatever they are given. So other ways are tried if that changed the
    text: without the first token, which may be that space, and behind a line break.

    Args:
        encode: tokenizes, without tokens around the text.
    """

    def spells(ids: Sequence[int]) -> bool:
        return b"".join(map(tokenizer.token_bytes, ids)) == text.encode()

    ids = encode(text)
    if tokenizer.pieces is None or spells(ids):
        return ids
    anchor, joint = encode("\n"), encode("\n" + text)
    ways = [ids[1:], joint[len(anchor) :] if joint[: len(anchor)] == anchor else ids]
    return next(filter(spells, ways), ids)


def kept_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], text: str) -> tuple[list[int], str]:
    """Return the first tokens, those that lie within `text` as a whole, and the rest of the text.

    Args:
        token_ids: generated. text: their text, or its beginning, where a stop string cut it off.
    """
    for num_kept in range(len(token_ids), 0, -1):  # a stop string is at the end, so this takes a few steps
        whole = tokenizer.decode(token_ids[:num_kept])
        if text.startswith(whole):
            return list(token_ids[:num_kept]), text[len(whole) :]
    return [], text


class TurnWriter:
    """Writes turns as the chat template does, one behind the other.

    A template renders whole conversations. Here they grow: what is already there stays, though the template might write
    it differently now (many drop the reasoning of earlier turns). So the conversation is rendered with a mark where the
    existing ids end, and what stands behind the mark is new. As everywhere, only the template may produce control
    tokens; contents are tokenized as ordinary text.
    """

    def __init__(self, template: ChatTemplate, tokenizer: Tokenizer) -> None:
        self._template = template
        self._tokenizer = tokenizer

    def write(self, turns: Sequence[Turn], num_written: int, *, prompt: bool) -> list[int]:
        """Return the ids from the end of one turn's content to the beginning of the content of the last turn.

        Args:
            turns: the conversation; the last one is about to begin.
            num_written: of so many turns the ids exist, up to the end of the last one's content.
            prompt: begin the last turn as the template prompts the model to, not as it writes turns that are over.

        Raises:
            RequestError: the template refuses the conversation, or does not write contents as they are.
        """
        controls = self._template.controls
        cut, end, mark = _random_digits(), _random_digits(), _random_digits()
        messages = [{"role": turn.role, "content": controls.mark_beginnings(turn.content, mark)} for turn in turns[:-1]]
        if num_written:
            messages[num_written - 1]["content"] = cut
        if not prompt:
            messages.append({"role": turns[-1].role, "content": end})
        text = self._template.render(messages, add_generation_prompt=prompt)
        first = _find(text, cut) + len(cut) if num_written else 0
        last = len(text) if prompt else _find(text, end)
        segments = [
            part.replace(mark, "") if isinstance(part, str) else part for part in controls.split(text[first:last])
        ]
        if num_written and isinstance(segments[0], str):
            return self.text_ids(segments[0]) + self._template.encode_segments(segments[1:])
        return self._template.encode_segments(segments)

    def text_ids(self, text: str) -> list[int]:
        """Return the ids of text within a turn, behind other tokens."""
        return continuation_ids(self._tokenizer, text, lambda text: self._template.encode_segments([text]))


def common_length(lists: Sequence[Sequence[int]]) -> int:
    """Return how many first items all lists have in common."""
    length = 0
    for items in zip(*lists, strict=False):
        if len(set(items)) > 1:
            break
        length += 1
    return length


def _random_digits() -> str:
    return f"{secrets.randbelow(10**MARK_DIGITS):0{MARK_DIGITS}}"


def _find(text: str, mark: str) -> int:
    place = text.rfind(mark)
    if place < 0:
        raise RequestError("the chat template drops the content of a turn, so programs cannot go on behind it")
    return place


class LocalBackend(Backend):
    """An engine of its own, or one that was given; it is closed with the backend.

    Args:
        model: folder, Hugging Face id, or "quire-demo". options: of `AsyncLLM`; by default the engine runs in a thread
            (`engine="inline"`).
        llm: an `AsyncLLM` that was not started yet, instead of model and options.

    The model is loaded when the first program needs it; what is wrong with it is raised there.
    """

    def __init__(self, model: str = DEMO_MODEL, *, llm: AsyncLLM | None = None, **options: Any) -> None:
        super().__init__()
        self.llm = AsyncLLM(model=model, **{"engine": "inline", **options}) if llm is None else llm
        self._room_lock = asyncio.Lock()  # held by the request that waits for room; all others wait for it
        self._progressed = asyncio.Event()  # that a request has made, after which there may be room
        self._writer: TurnWriter | None = None

    def context(self) -> Context:
        return LocalContext(self)

    async def shut_down(self) -> None:
        await self.llm.close()

    async def submit(self, prompt: list[int], params: SamplingParams) -> RequestStream:
        """Submit a request; where it would be refused as an overload, wait first. Its reader calls `note_progress`."""
        while True:
            async with self._room_lock:
                while not self._has_room(len(prompt)):
                    self._progressed.clear()
                    with contextlib.suppress(TimeoutError):  # others may use the engine, too
                        await asyncio.wait_for(self._progressed.wait(), POLL_SECONDS)
            with contextlib.suppress(OverloadedError):  # another request was faster
                return await self.llm.submit({"prompt_token_ids": prompt}, params)

    def _has_room(self, num_tokens: int) -> bool:
        try:
            self.llm.check_room(num_tokens)
        except OverloadedError:
            return False
        return True

    def note_progress(self) -> None:
        """Note that a request has had output, or has ended."""
        self._progressed.set()

    def writer(self, tokenizer: Tokenizer) -> TurnWriter:
        """Return what writes turns. Raises `RequestError` if the model has no chat template."""
        if self._writer is None:
            self._writer = TurnWriter(self.llm.front_model.template(), tokenizer)
        return self._writer


class LocalContext(Context):
    """See `Context`.

    Attributes:
        token_ids: what the model has seen or would see; `_pending` is text behind it that has no ids yet.
    """

    def __init__(self, backend: LocalBackend) -> None:
        super().__init__()
        self.token_ids: list[int] = []
        self._backend = backend
        self._pending = ""
        self._num_written = 0  # turns whose content has ids; the last one perhaps only in part
        self._in_turn = False  # whether that last one is still open

    def literal(self, text: str) -> None:
        """See `Context.literal`. In turns that the model has no part in, nothing has to wait for its ids."""
        super().literal(text)
        if self._in_turn or not self.turns:
            self._pending += text

    def end(self) -> str:
        self._in_turn = False
        return super().end()

    async def generate(self, gen: Gen, options: dict[str, Any], emit: Emit) -> Capture:
        tokenizer = await self._prepare()
        prompt = self.token_ids + self._ids_of(tokenizer, self._pending)
        output, completion = await self._request(prompt, self._params(options, gen.structured_outputs), emit)
        text, token_ids = completion.text, completion.token_ids
        kept, rest = token_ids, ""
        if isinstance(completion.stop_reason, str):
            kept, rest = kept_tokens(tokenizer, token_ids, text)
        elif completion.finish_reason == "stop" and token_ids and token_ids[-1] in self._ending_ids(options):
            kept = token_ids[:-1]
        self.token_ids, self._pending = [*prompt, *kept], rest
        self.append(text)
        return Capture(
            text,
            completion.finish_reason,
            completion.stop_reason,
            token_ids,
            len(prompt),
            output.num_cached_tokens,
        )

    async def select(self, select: Select, options: dict[str, Any], emit: Emit) -> Capture:
        """See `Context.select`.

        The text before and each choice are tokenized together. What all of them, and the text without a choice, begin
        with is common; the tokens behind it are scored by their log-probabilities, each by a request for one token that
        is forced, so that all of them find their prefix in the cache.
        """
        if select.method == "constrained":
            return await self.constrained(select, options, emit)
        tokenizer = await self._prepare()
        tails = {choice: self._ids_of(tokenizer, self._pending + choice) for choice in select.choices}
        start = common_length([self._ids_of(tokenizer, self._pending), *tails.values()])
        edges = {tuple(tail[: end + 1]) for tail in tails.values() for end in range(start, len(tail))}
        order = sorted(edges)
        outputs = dict(zip(order, await _all([self._forced(edge) for edge in order]), strict=True))
        scores = {}
        for choice, tail in tails.items():
            logprobs = [outputs[tuple(tail[: end + 1])][1] for end in range(start, len(tail))]
            scores[choice] = sum(logprobs) / len(logprobs)  # a choice adds text, and so at least one token
        best = max(scores, key=scores.__getitem__)
        self.token_ids, self._pending = self.token_ids + tails[best], ""
        self.append(best)
        emit(best)
        return Capture(
            best,
            token_ids=tails[best][start:],
            num_prompt_tokens=sum(len(output.prompt_token_ids) for output, _ in outputs.values()),
            num_cached_tokens=sum(output.num_cached_tokens for output, _ in outputs.values()),
            scores=scores,
        )

    async def _prepare(self) -> Tokenizer:
        """Give ids to all turns before the open one, and to how that one begins; return the tokenizer."""
        self.check_open()
        llm = self._backend.llm
        await llm.start()
        tokenizer = llm.tokenizer
        if tokenizer is None:
            raise RequestError("programs need a tokenizer, and this engine runs without one (skip_tokenizer_init)")
        turns, opened = self.turns, self.open_turn
        if opened is not None and not self._in_turn:
            prompt = opened.role == "assistant" and not opened.content
            new = self._backend.writer(tokenizer).write(turns, self._num_written, prompt=prompt)
            self.token_ids = self.token_ids + self._ids_of(tokenizer, self._pending) + new
            self._pending, self._num_written, self._in_turn = opened.content, len(turns), True
        return tokenizer

    def _ids_of(self, tokenizer: Tokenizer, text: str) -> list[int]:
        """Return the ids of text behind `token_ids`."""
        if not self.token_ids and not self.turns:
            return tokenizer.encode(text)
        if not text:
            return []
        if self.turns:
            return self._backend.writer(tokenizer).text_ids(text)
        return continuation_ids(tokenizer, text, lambda text: tokenizer.encode(text, add_special_tokens=False))

    def _params(self, options: dict[str, Any], structured: StructuredOutputParams | None) -> SamplingParams:
        params = self._backend.llm.processor.default_sampling_params()
        return params.clone(
            **{**options, "max_tokens": max_tokens_of(options)},
            structured_outputs=structured,
            output_kind=RequestOutputKind.DELTA,
        )

    def _ending_ids(self, options: dict[str, Any]) -> set[int]:
        return {*self._backend.llm.processor.eos_token_ids, *(options.get("stop_token_ids") or ())}

    async def _request(
        self, prompt: list[int], params: SamplingParams, emit: Emit
    ) -> tuple[RequestOutput, CompletionOutput]:
        """Run one request; return its last output, and this with all text and tokens. Leaving early aborts it."""
        if not prompt:
            raise RequestError("there is no text yet, and this model has no token to begin one with")
        texts: list[str] = []
        token_ids: list[int] = []
        try:
            async with await self._backend.submit(prompt, params) as stream:
                async for output in stream:
                    self._backend.note_progress()
                    for item in output.outputs:
                        emit(item.text)
                        texts.append(item.text)
                        token_ids.extend(item.token_ids)
        finally:
            self._backend.note_progress()
        if item.error is not None:
            raise item.error
        if item.finish_reason not in ("stop", "length"):
            raise GenerationError(f"the engine ended a request with finish_reason {item.finish_reason}")
        item.text, item.token_ids = "".join(texts), token_ids
        return output, item

    async def _forced(self, edge: Sequence[int]) -> tuple[RequestOutput, float]:
        """Generate the last token of `edge`; return the output and the token's log-probability."""
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            allowed_token_ids=[edge[-1]],
            logprobs=0,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        output, completion = await self._request([*self.token_ids, *edge[:-1]], params, lambda text: None)
        [entry] = completion.logprobs or []
        return output, entry[edge[-1]].logprob


async def _all(works: Sequence[Any]) -> list[Any]:
    """Run coroutines at the same time. The first error ends the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]

"""A stand-in for the engine that generates deterministic tokens, for tests of everything in front of it.

`FakeEngine` has the interface of `EngineCore`, `FakeClient` that of `EngineClient`. `fake_async_llm()` and
`fake_llm()` put the real frontend on top of them, with a small tokenizer and chat template made on the spot.
By default a request answers with letters and spaces that depend on its prompt and seed; `reply_with` scripts answers.
"""

from __future__ import annotations

import asyncio
import atexit
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from quire.checkpoint.hf_config import ModelInfo
from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.engine.messages import (
    AbortRequests,
    Alone,
    Call,
    CallResult,
    EngineOutputs,
    Isolate,
    Ready,
    Received,
    ToEngine,
)
from quire.engine_request import EngineRequest
from quire.errors import ConfigError, EngineDeadError, ErrorData, QuireError
from quire.frontend.async_llm import AsyncLLM
from quire.frontend.chat import ChatTemplate
from quire.frontend.front_model import FrontModel
from quire.frontend.grammars import GrammarCompiler
from quire.frontend.llm import LLM
from quire.frontend.llm_engine import LLMEngine
from quire.sampling_params import BeamSearchParams
from quire.step import BeamOutput, SchedulerStats, SequenceOutput, TokenTopLogprobs
from quire.tokenizer.tokenizer import Tokenizer

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<unk>")
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'wizard' -%}{{ raise_exception('no wizards here') }}{%- endif -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)

Reply = Callable[[EngineRequest], Sequence[int]]


@cache
def small_backend() -> tokenizers.Tokenizer:
    """A byte-level tokenizer: 256 bytes, a few merges, four special tokens. Treat it as read-only."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: index for index, text in enumerate([*SPECIAL, *alphabet])}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("o", "r"), ("Ġw", "or"), ("l", "d")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return backend


def small_tokenizer() -> Tokenizer:
    """A `Tokenizer` with a ChatML-like template; "<|im_end|>" ends a text."""
    backend = tokenizers.Tokenizer.from_str(small_backend().to_str())
    named = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": "<unk>"}
    return Tokenizer(backend, special_tokens=named, chat_template=CHAT_TEMPLATE)


def model_info(vocab_size: int, max_model_len: int, eos_token_ids: tuple[int, ...], **defaults: Any) -> ModelInfo:
    """A `ModelInfo` for a model that does not exist."""
    return ModelInfo(
        path=Path("fake-model"),
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=vocab_size,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=16,
        max_position_embeddings=max_model_len,
        max_model_len=max_model_len,
        longest_model_len=max_model_len,
        rope=None,
        norm_eps=1e-5,
        hidden_act="silu",
        tie_word_embeddings=True,
        layer_windows=(None,),
        dtype="float32",
        bos_token_id=None,
        eos_token_ids=eos_token_ids,
        sampling_defaults=defaults,
        raw={},
    )


def fake_front_model(
    *, max_model_len: int = 256, chat_template: str | None = CHAT_TEMPLATE, **defaults: Any
) -> FrontModel:
    """Tokenizer, template and config of the fake model; `defaults` are what generation_config.json would say."""
    tokenizer = small_tokenizer()
    eos = tokenizer.eos_token_id
    assert eos is not None
    template = None if chat_template is None else ChatTemplate(chat_template, tokenizer)
    return FrontModel(model_info(tokenizer.vocab_size, max_model_len, (eos,), **defaults), tokenizer, template)


def reply_with(tokenizer: Tokenizer, *texts: str, end: bool = True) -> Reply:
    """A reply function: each request gets the next text (the last one again and again), then end-of-text."""
    answers = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    eos = [tokenizer.eos_token_id] if end else []
    count = [0]

    def reply(request: EngineRequest) -> list[int]:
        count[0] += 1
        return [*answers[min(count[0], len(answers)) - 1], *eos]

    return reply


def letters(request: EngineRequest) -> list[int]:
    """The default reply: 1000 letters and spaces, a function of prompt and seed."""
    ids = [small_tokenizer_ids()[letter] for letter in "abcdefgh "]
    data = repr((request.prompt_token_ids, request.seeds[0])).encode()
    return [ids[byte % len(ids)] for byte in hashlib.shake_128(data).digest(1000)]


@cache
def small_tokenizer_ids() -> dict[str, int]:
    """Token ids of the ASCII letters and the space."""
    tokenizer = small_tokenizer()
    return {char: tokenizer.encode(char, add_special_tokens=False)[0] for char in "abcdefghijklmnopqrstuvwxyz "}


class _Running:
    """One sequence; `request` is its own: of all sequence ids and seeds it has only this one's."""

    def __init__(self, request: EngineRequest, first: bool, tokens: Sequence[int]) -> None:
        self.request = request
        self.sequence_id = request.sequence_ids[0]
        self.first = first
        self.tokens = list(tokens)
        self.told = False  # whether it had any output
        self.num_done = 0
        if request.resumed is not None:
            [resumed] = request.resumed
            self.num_done = len(resumed.token_ids)
            repeated = self.tokens * (self.num_done // len(self.tokens) + 1)
            assert resumed.token_ids and resumed.token_ids == repeated[: self.num_done], "its own words"


class FakeEngine:
    """Steps when told to, like `EngineCore`: each step gives every running sequence one token.

    The reply function is asked once for each sequence. A beam search takes one step; each of its beams is a reply, to
    the request with the beam's rank as its seed, and has a log-probability of -1 for itself and each one before.

    Attributes:
        added: all requests. aborted: the ids of all aborts of unfinished sequences. Both in order.
        num_steps: steps so far. closed: whether `close` was called.
        tokens_per_step: tokens a sequence gets at once (speculative decoding gives several).
        fail_on, refuse_on: ids of requests or sequences that end with finish_reason "error" at their first step, the
            latter because they can never fit.
        killers: ids of requests or sequences that kill the engine, with the number of the token at which they do.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_model_len: int = 256,
        max_num_seqs: int = 8,
        reply: Reply = letters,
        tokens_per_step: int = 1,
    ) -> None:
        self.ready = Ready(
            num_blocks=64,
            block_size=16,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_num_seqs=max_num_seqs,
        )
        self.reply = reply
        self.max_num_seqs = max_num_seqs
        self.tokens_per_step = tokens_per_step
        self.added: list[EngineRequest] = []
        self.aborted: list[str] = []
        self.fail_on: set[str] = set()
        self.refuse_on: set[str] = set()
        self.killers: dict[str, int] = {}
        self.num_steps = 0
        self.num_resets = 0
        self.sleep_level = 0
        self.closed = False
        self._live: dict[str, _Running] = {}

    @property
    def live(self) -> list[str]:
        """Ids of the unfinished sequences, waiting ones included."""
        return list(self._live)

    def send(self, message: ToEngine) -> None:
        """Apply an `EngineRequest` or `AbortRequests`."""
        if isinstance(message, EngineRequest):
            assert message.prompt_token_ids and message.max_tokens > 0
            assert 0 < len(message.sequence_ids) == len(message.seeds) <= self.max_num_seqs
            assert message.request_id not in {item.request.request_id for item in self._live.values()}, "must be unique"
            self.added.append(message)
            for index, (sequence_id, seed) in enumerate(zip(message.sequence_ids, message.seeds, strict=True)):
                assert sequence_id not in self._live, "ids must be unique"
                resumed = None if message.resumed is None else [message.resumed[index]]
                own = msgspec.structs.replace(message, sequence_ids=[sequence_id], seeds=[seed], resumed=resumed)
                self._live[sequence_id] = _Running(own, index == 0, [] if message.beam else self.reply(own))
        elif isinstance(message, AbortRequests):
            for name in message.request_ids:
                for sequence_id in [key for key, item in self._live.items() if name in (key, item.request.request_id)]:
                    del self._live[sequence_id]
                    self.aborted.append(sequence_id)

    def call(self, method: str, arguments: Mapping[str, int | bool | str] | None = None) -> dict[str, Any]:
        """Answer "reset_prefix_cache", "stats", "check_integrity", "sleep" and "wake_up"."""
        if method in ("sleep", "wake_up"):
            assert not self._live
            self.sleep_level = int((arguments or {}).get("level", 0))
            return {"level": self.sleep_level, "freed": 1000 * self.sleep_level}
        if method == "reset_prefix_cache":
            self.num_resets += 1
            return {"reset": True}
        if method == "stats":
            return msgspec.to_builtins(self.stats())
        if method == "check_integrity":
            return {"ok": True}
        raise ConfigError(f"unknown engine operation {method!r}", param="method")

    def has_unfinished(self) -> bool:
        """Whether any sequence is live."""
        return bool(self._live)

    def step(self) -> EngineOutputs:
        """Give the oldest `max_num_seqs` sequences their next tokens. Raises `EngineDeadError` if one is a killer."""
        self.num_steps += 1
        now = time.monotonic()
        running = list(self._live.values())[: self.max_num_seqs]
        for item in running:
            if item.num_done in (self.killers.get(item.request.request_id), self.killers.get(item.sequence_id)):
                names = dict.fromkeys(other.request.request_id for other in running)
                raise EngineDeadError("the engine process ended with exit code -11", suspects=list(names))
        return self.outputs([self._advance(item, now) for item in running])

    def outputs(self, outputs: list[SequenceOutput]) -> EngineOutputs:
        """Return outputs with the state of the engine."""
        return EngineOutputs(outputs, self.stats(), time.monotonic(), self.sleep_level)

    def stats(self) -> SchedulerStats:
        """Count live sequences; each running one holds one of 64 blocks."""
        num_running = min(len(self._live), self.max_num_seqs)
        return SchedulerStats(
            num_running=num_running,
            num_waiting=len(self._live) - num_running,
            num_blocks=64,
            num_free_blocks=64 - min(64, num_running),
            num_steps=self.num_steps,
        )

    def _advance(self, item: _Running, now: float) -> SequenceOutput:
        request, params = item.request, item.request.sampling_params
        first, item.told = not item.told, True
        output = SequenceOutput(sequence_id=item.sequence_id, new_token_ids=[])
        if first:
            output.num_cached_tokens = 0
            output.first_scheduled_time = now
            if params.prompt_logprobs is not None and item.first:
                tokens = request.prompt_token_ids[1:]
                output.prompt_logprobs = [self._top(token, params.prompt_logprobs) for token in tokens]
        names = {request.request_id, item.sequence_id}
        if names & self.fail_on:
            output.finish_reason, output.error = "error", ErrorData("GenerationError", "logits are not finite")
        elif names & self.refuse_on:
            output.finish_reason = "error"
            output.error = ErrorData("RequestError", "it needs 65 blocks, the pool has 64", code="request_refused")
        elif request.beam is not None:
            output.beams = self._beams(request, request.beam)
            output.finish_reason = output.beams[0].finish_reason
        while output.finish_reason is None and len(output.new_token_ids) < self.tokens_per_step:
            token = item.tokens[item.num_done % len(item.tokens)]
            item.num_done += 1
            output.new_token_ids.append(token)
            if token in request.stop_ids and item.num_done > params.min_tokens:
                output.finish_reason = "stop"
                output.stop_reason = token if token in (params.stop_token_ids or []) else None
            elif item.num_done >= request.max_tokens:
                output.finish_reason = "length"
        if params.logprobs is not None:
            output.logprobs = [self._top(token, params.logprobs) for token in output.new_token_ids]
        if output.finish_reason is not None:
            del self._live[item.sequence_id]
        return output

    def _beams(self, request: EngineRequest, beam: BeamSearchParams) -> list[BeamOutput]:
        beams = []
        for rank in range(beam.beam_width):
            tokens = list(self.reply(msgspec.structs.replace(request, seeds=[rank])))[: request.max_tokens]
            stop = next((place for place, token in enumerate(tokens) if token in request.stop_ids), None)
            tokens = tokens if stop is None else tokens[: stop + 1]
            logprob = -1.0 - rank
            score = logprob / len(tokens) ** beam.length_penalty
            beams.append(BeamOutput(tokens, logprob, score, "length" if stop is None else "stop"))
        return beams

    def _top(self, token: int, count: int) -> TokenTopLogprobs:
        """The chosen token is the second most likely; the best one is its predecessor in the vocabulary. -1: all."""
        count = self.ready.vocab_size if count == -1 else count
        others = [(token + offset) % self.ready.vocab_size for offset in (-1, 0, *range(1, count))][:count]
        values = [-0.5 - 0.25 * position for position in range(count)]
        return TokenTopLogprobs(token_ids=[token, *others], logprobs=[-0.75, *values], rank=2)

    def close(self) -> None:
        """Note that it was closed."""
        self.closed = True


class FakeClient:
    """An `EngineClient` around a `FakeEngine`, in the same event loop. It steps whenever there is work.

    Attributes:
        gate: cleared, no step is made (requests wait). die(): the engine process "crashes".
    """

    def __init__(self, engine: FakeEngine, *, start_error: QuireError | None = None) -> None:
        self.engine = engine
        self.gate = asyncio.Event()
        self.gate.set()
        self.closed = False
        self.stalled = 0.0
        self.num_dumps = 0
        self._start_error = start_error
        self._news = asyncio.Event()
        self._answers: list[Received] = []
        self._dead: EngineDeadError | None = None

    async def start(self) -> Ready:
        """Be ready at once, or raise the `start_error`."""
        await asyncio.sleep(0)
        if self._start_error is not None:
            raise self._start_error
        return self.engine.ready

    def send(self, message: ToEngine) -> None:
        """Apply a message at once, if it can be sent to another process."""
        if self._dead is not None:
            return
        msgspec.msgpack.encode(message)
        if isinstance(message, Call):
            try:
                answer = CallResult(call_id=message.call_id, value=self.engine.call(message.method, message.arguments))
            except QuireError as error:
                answer = CallResult(call_id=message.call_id, error=ErrorData.of(error))
            if message.method in ("sleep", "wake_up"):
                self._answers.append(self.engine.outputs([]))  # all clients are told
            self._answers.append(answer)
        elif isinstance(message, Isolate):
            self._answers += [Alone()] * message.alone
        else:
            self.engine.send(message)
        self._news.set()

    async def receive(self) -> Received:
        """Wait for work, make a step, return what it produced."""
        while True:
            await asyncio.sleep(0)
            if self._dead is not None:
                raise self._dead
            if self._answers:
                return self._answers.pop(0)
            if self.engine.has_unfinished() and self.gate.is_set():
                try:
                    return self.engine.step()
                except EngineDeadError as error:
                    self._dead = error
                    raise
            self._news.clear()
            await self._news.wait()

    def hold(self) -> None:
        """Make no more steps until `resume`."""
        self.gate.clear()

    def resume(self) -> None:
        """Go on stepping."""
        self.gate.set()
        self._news.set()

    def die(self, message: str = "the engine process ended (signal 9)", suspects: Sequence[str] = ()) -> None:
        """Be gone: `receive` raises from now on."""
        self._dead = EngineDeadError(message, suspects=suspects)
        self._news.set()

    def stalled_for(self) -> float:
        """Return `stalled`."""
        return self.stalled

    async def dump_stacks(self) -> str:
        """Note that it was asked; nothing to tell."""
        self.num_dumps += 1
        return ""

    def kill(self) -> None:
        """Die."""
        self.die()

    async def close(self) -> None:
        """Note that it was closed."""
        self.closed = True
        self.engine.close()


class _SharedCompiler(GrammarCompiler):
    """One compiler for all fake engines, because its processes take half a second to start."""

    def close(self) -> None:
        """Stay open for the next engine."""


GRAMMARS = _SharedCompiler()
atexit.register(GrammarCompiler.close, GRAMMARS)


def fake_async_llm(
    *,
    reply: Reply | None = None,
    reply_text: str | None = None,
    front_model: FrontModel | None = None,
    max_model_len: int = 256,
    tokens_per_step: int = 1,
    engine: Any = None,
    listeners: Sequence[Any] = (),
    config: EngineConfig | None = None,
    make_client: Callable[[], EngineClient] | None = None,
    **options: Any,
) -> tuple[AsyncLLM, FakeClient]:
    """A real `AsyncLLM` in front of a fake engine, not started yet, and the client to play tricks with.

    Args:
        reply_text: what every request answers, before end-of-text. reply: more freely.
        engine: an `EngineCore` to stand there instead of the fake one.
        config, make_client, options: as for `AsyncLLM`.
    """
    front = front_model or fake_front_model(max_model_len=max_model_len)
    assert front.tokenizer is not None
    if reply_text is not None:
        reply = reply_with(front.tokenizer, reply_text)
    engine = engine or FakeEngine(
        vocab_size=front.info.vocab_size,
        max_model_len=front.info.max_model_len,
        max_num_seqs=(config.scheduler.max_num_seqs if config else options.get("max_num_seqs", 8)),
        reply=reply or letters,
        tokens_per_step=tokens_per_step,
    )
    client = FakeClient(engine)
    llm = AsyncLLM(config, client=client, make_client=make_client, front_model=front, listeners=listeners, **options)
    llm._grammars = GRAMMARS
    return llm, client


def fake_llm(
    *, reply: Reply | None = None, front_model: FrontModel | None = None, max_model_len: int = 256, **options: Any
) -> tuple[LLM, FakeEngine]:
    """A real `LLM` in front of a fake engine."""
    front = front_model or fake_front_model(max_model_len=max_model_len)
    config = EngineConfig.from_kwargs(**options)
    engine = FakeEngine(
        vocab_size=front.info.vocab_size,
        max_model_len=front.info.max_model_len,
        max_num_seqs=options.get("max_num_seqs", 8),
        reply=reply or letters,
    )
    llm = LLM.from_engine(LLMEngine(config, engine, front))
    llm.llm_engine.grammars = GRAMMARS
    return llm, engine

"""`AsyncLLM`: many requests at once from one asyncio loop, each a stream of outputs.

One background task receives the engine's outputs and wakes the streams concerned. A stream has no queue: it builds its
next output when it is read, so readers of any speed cost the same. A request is aborted as soon as its stream or
generator is closed or dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from quire import logs
from quire.checkpoint.hf_config import ModelInfo
from quire.config import SERVER_GROUPS, EngineConfig
from quire.engine.client import EngineClient
from quire.engine.messages import Call, CallResult, check_sleep_level
from quire.engine.process import create_client
from quire.engine_request import LoRARequest, ThinkingData
from quire.errors import EngineAsleepError, EngineDeadError, OverloadedError, QuireError, RequestError
from quire.frontend.adapters import AdapterRegistry
from quire.frontend.chat import ChatTemplate
from quire.frontend.chat_bounds import MAX_TEXT
from quire.frontend.chat_worker import MustWaitError, without_waiting
from quire.frontend.formats.message import MessageSpec
from quire.frontend.front_model import FrontModel, load_front_model
from quire.frontend.grammars import GrammarCompiler
from quire.frontend.input_processor import InputProcessor
from quire.frontend.output_processor import RequestStream, beam_search_output
from quire.frontend.pooling import (
    PairScoring,
    Pooled,
    as_classification,
    as_embedding,
    as_texts,
    check_task,
    pooled_output,
    pooling_inputs,
    spec_of,
    with_prompt,
)
from quire.frontend.prompts import Params, Prompt, RequestInput, split_prompt, text_size
from quire.frontend.recovery import RecoveringClient
from quire.frontend.request_processor import RequestProcessor
from quire.frontend.stats import NO_LOAD, QueueLoad, StatListener, TTFTEstimator
from quire.frontend.waiting import WaitingThreads
from quire.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, SamplingParams
from quire.step import SchedulerStats
from quire.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

THREAD_CHARS = 4096
MAX_LOOP_CHARS = 2**16  # of a rendering that is tokenized on the event loop
TOKENIZER_THREADS = 2
POOLING_WINDOW = 128  # requests of one call in flight
POOLING_QUEUE_SHARE = 4  # one call takes at most this part of the queue
YIELD_EVERY = 4
GRAMMARS, TEMPLATES, REQUEST_TEMPLATES = "grammars", "chat templates", "chat templates of requests"
PREDICTED_SHARE = 0.85  # of the time a first token may take: predictions err in both directions

if TYPE_CHECKING:
    from quire.frontend.llm_engine import EngineArguments

T = TypeVar("T")
Wait = Callable[[Coroutine[Any, Any, T]], Awaitable[T]]


async def until_done(work: Coroutine[Any, Any, T]) -> T:
    """Wait for work, whatever happens meanwhile; see `AsyncLLM.submit`."""
    return await work


class AsyncLLM:
    """An engine and everything in front of it, for one asyncio loop.

    Args:
        config: all options; or give them as keywords, by the names `EngineConfig.from_kwargs` takes.
        listeners: called for every step, token and finished request.
        client, front_model: what would be made from the config otherwise (for tests and for embedding).
        make_client: where the engines come from that replace one that died; without it, a `client` is not replaced.

    Attributes:
        share_load: called with what this one has queued, whenever that changes; returns what all other clients of the
            engine have, which the bounds of the queue count, too.

    Raises:
        ConfigError: an unknown option, or a bad value. Everything else is raised by `start`.
    """

    def __init__(
        self,
        config: EngineConfig | None = None,
        *,
        listeners: Iterable[StatListener] = (),
        client: EngineClient | None = None,
        front_model: FrontModel | None = None,
        make_client: Callable[[], EngineClient] | None = None,
        **options: Any,
    ) -> None:
        if config is not None and options:
            raise TypeError("give a config or keywords, not both")
        self.config = config or EngineConfig.from_kwargs(groups=SERVER_GROUPS, **options)
        self.ttft = TTFTEstimator()
        self._listeners = [self.ttft, *listeners]
        server = self.config.server
        if client is None and server.engine == "process":
            make_client = partial(create_client, self.config, "process")
        self._client = RecoveringClient(
            client or create_client(self.config, server.engine),
            make_client if server.max_engine_restarts else None,
            outputs=lambda: self._started().outputs,
            max_restarts=server.max_engine_restarts,
            stall_timeout=server.engine_stall_timeout,
            on_death=self._on_engine_death,
            on_restart=self._on_engine_restart,
        )
        self._front = front_model
        self._startup: asyncio.Task[None] | None = None
        self._requests: RequestProcessor | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._receiver: asyncio.Task[None] | None = None
        self._threads: ThreadPoolExecutor | None = None
        self._grammars = GrammarCompiler()
        self._waiting = {kind: WaitingThreads(kind) for kind in (GRAMMARS, TEMPLATES, REQUEST_TEMPLATES)}
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._num_calls = 0
        self._stats_call = 0  # the latest one of `refresh_stats`
        self._num_admitting = 0
        self._dead: QuireError | None = None
        self._stats = SchedulerStats()
        self.share_load: Callable[[QueueLoad], QueueLoad] = lambda load: NO_LOAD
        self._stats_time = 0.0
        self.max_num_queued_reqs = self.config.scheduler.resolved_max_num_queued_reqs
        self.adapters = AdapterRegistry(self.config, self.call)
        self._sleep_level = 0  # as the engine has last said
        self._num_falling_asleep = 0  # calls of `sleep` that are not answered; no request begins from there

    @classmethod
    def from_engine_args(cls, engine_args: EngineArguments) -> AsyncLLM:
        """Return the engine of these arguments, which starts with the first request, or `start`."""
        return cls(engine_args.create_engine_config())

    async def start(self) -> None:
        """Load tokenizer and model; return when requests can be served.

        All callers wait for the same startup. It continues if they are cancelled, and ends with `close`.

        Raises:
            QuireError: the options or the model are unusable.
        """
        if self._receiver is not None:
            return
        if self._startup is None:
            await self.check_health()
            self._startup = asyncio.create_task(self._start(), name="quire-startup")
            self._startup.add_done_callback(lambda task: task.cancelled() or task.exception())  # it may have no waiter
        try:
            await asyncio.shield(self._startup)
        except asyncio.CancelledError:
            if self._startup.cancelled():
                await self.check_health()  # closed, by another task
            raise

    async def _start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._threads = ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="quire-tokenizer")
        engine = asyncio.ensure_future(self._client.start())
        try:
            if self._front is None:
                self._front = await self._in_thread(lambda: load_front_model(self.config))
            ready = await engine
            self._sleep_level = ready.sleep_level
            self._requests = RequestProcessor(
                self._front,
                ready,
                self._client.send,
                listeners=self._listeners,
                on_idle=self.refresh_stats,
            )
        except BaseException as error:
            self._dead = error if isinstance(error, QuireError) else EngineDeadError("the engine did not start")
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            await self._client.close()
            self._threads.shutdown(wait=False)
            raise
        self._receiver = asyncio.create_task(self._receive(), name="quire-receiver")

    async def __aenter__(self) -> AsyncLLM:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        background: bool = False,
        param: str = "prompt",
        message_spec: MessageSpec | None = None,
        max_ttft: float | None = None,
        lora_request: LoRARequest | None = None,
        wait: Wait[Any] = until_done,
    ) -> RequestStream:
        """Check a request, hand it to the engine, and return the stream of its outputs.

        Args:
            prompt: a text, token ids, {"prompt": text} or {"prompt_token_ids": ids}.
            sampling_params: None takes the model's defaults; `BeamSearchParams` have one output, with all beams.
            request_id: None makes one up. priority: lower runs earlier, with the priority policy.
            cache_salt: prefix blocks are shared only among requests with the same salt. lora_request: its adapter.
            tenant: the account it runs on. background: whether it runs behind all others. param: what errors call the
                prompt. message_spec: what the message that follows may contain; None for a plain completion.
                max_ttft: most seconds to the first token; see `check_room`. wait: how to wait for a worker process; the
                server ends that when the client is gone.

        Raises:
            RequestError: the request is malformed. ContextLengthError: it does not fit.
            OverloadedError: as `check_room`. EngineDeadError: the engine is gone. EngineAsleepError: it sleeps.
        """
        await self.start()
        processor = self._alive().inputs
        if self._sleep_level or self._num_falling_asleep:
            raise EngineAsleepError("the engine is asleep; wake it up first")
        self.check_room(max_ttft=max_ttft)
        arrival_time = time.monotonic()
        params = sampling_params if sampling_params is not None else processor.default_sampling_params()
        request_id = f"req-{uuid.uuid4().hex}" if request_id is None else request_id
        self._num_admitting += 1
        self._share_load()
        try:
            token_ids = await self._tokenize(prompt, params, param, lora_request)
            grammar, thinking = await self._constraints(params, token_ids, message_spec, wait)
        finally:
            self._num_admitting -= 1
            self._share_load()
        self.check_room(len(token_ids), max_ttft)
        requests = self._alive()
        engine_requests = requests.inputs.build(
            token_ids,
            params,
            request_id,
            arrival_time=arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            background=background,
            grammar=grammar,
            thinking=thinking,
            lora=lora_request,
        )
        changed = asyncio.Event()
        state = requests.start(request_id, prompt, params.clone(), engine_requests, changed.set)
        self.ttft.add(len(token_ids))
        self._share_load()
        return RequestStream(
            state,
            changed,
            abort=partial(self.abort_now, [request_id]),
            abort_threadsafe=partial(self.abort_from_anywhere, request_id),
        )

    def check_room(self, num_tokens: int = 0, max_ttft: float | None = None) -> None:
        """Raise `OverloadedError` if a request with so many prompt tokens had better come later.

        That is, if too many requests are unfinished, or with it too many prompt tokens would wait, or its first token
        is estimated to come later than `max_ttft` seconds (here or in the options). An empty queue accepts every
        request.
        """
        others = self._share_load()
        num_unfinished = self._num_queued + others.num_requests
        queued = self.ttft.num_queued_tokens + others.num_tokens
        wait = self.ttft.estimate(num_tokens, others)
        later = 1.0 if wait is None else max(1.0, wait)
        if num_unfinished >= self.max_num_queued_reqs:
            raise OverloadedError(
                f"{num_unfinished} requests are waiting or running; try again later", retry_after=later
            )
        if queued and queued + num_tokens > self.config.scheduler.resolved_max_num_queued_tokens:
            raise OverloadedError(f"{queued} prompt tokens are waiting; try again later", retry_after=later)
        limits = [limit for limit in (max_ttft, self.config.server.max_ttft) if limit is not None]
        if limits and queued and wait is not None and wait > PREDICTED_SHARE * min(limits):
            raise OverloadedError(
                f"the first token is expected in {wait:.3g} s, but may take at most {min(limits):.3g} s (max_ttft)",
                retry_after=max(1.0, wait - PREDICTED_SHARE * min(limits)),
            )

    def _share_load(self) -> QueueLoad:
        """Say what is queued here, and return what other clients of the engine have queued."""
        if self.num_unfinished == 0:
            self.ttft.clear()  # an engine's death empties it without an event for each request
        return self.share_load(self.ttft.load(self._num_queued))

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the outputs of a request; closing the generator aborts it. Arguments and errors as `submit`."""
        options = {"priority": priority, "cache_salt": cache_salt, "tenant": tenant, "lora_request": lora_request}
        async with await self.submit(prompt, sampling_params, request_id, **options) as stream:  # type: ignore[arg-type]
            async for output in stream:
                yield output

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        request_id: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
    ) -> BeamSearchOutput:
        """Return the most likely continuations of a prompt, best first. Arguments and errors as `submit`.

        Raises also what ended the search in the engine: `RequestError` or `GenerationError`.
        """
        options = {"priority": priority, "cache_salt": cache_salt, "tenant": tenant, "lora_request": lora_request}
        async with await self.submit(prompt, params.sampling_params(), request_id, **options) as stream:  # type: ignore[arg-type]
            return beam_search_output(await anext(stream), params, self.tokenizer)

    async def encode(
        self,
        prompt: Prompt,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        prompt_name: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
    ) -> AsyncGenerator[Pooled, None]:
        """Yield what the model makes of a prompt, once; closing the generator aborts it.

        Arguments and errors as for `LLM.encode` and `AsyncLLM.submit`.
        """
        await self.start()
        text = with_prompt(self.front_model, prompt, prompt_name)
        params, options = pooling_params or PoolingParams(), {"cache_salt": cache_salt, "tenant": tenant}
        async with await self.submit(text, params, request_id, priority=priority, **options) as stream:  # type: ignore[arg-type]
            yield await _pooled(stream)

    async def embed(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt; options are those of `encode`."""
        return [as_embedding(output) for output in await self._encode_all(prompts, "embed", options)]

    async def classify(self, prompts: Prompt | Sequence[Prompt], **options: Any) -> list[ClassificationRequestOutput]:
        """Return how well each class fits each prompt; options are those of `encode`."""
        return [as_classification(output) for output in await self._encode_all(prompts, "classify", options)]

    async def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        pooling_params: PoolingParams | None = None,
        *,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document fits the query, or its query; as `LLM.score`."""
        await self.start()
        texts = as_texts(queries, "queries"), as_texts(documents, "documents")
        params = pooling_params or PoolingParams()
        scoring = await asyncio.to_thread(PairScoring, self.front_model, self.processor, *texts, params, instruction)
        return scoring.scores(await self.pool_all(scoring.inputs))

    async def pool_all(
        self,
        inputs: Sequence[RequestInput],
        *,
        note: Callable[[RequestStream], None] = lambda stream: None,
        **options: Any,
    ) -> list[Pooled]:
        """Run pooling requests concurrently, within a window; return their outputs in order.

        All are aborted if one fails. `note` is called with the stream of each; options are those of `submit`.
        """
        window = max(1, min(POOLING_WINDOW, self.max_num_queued_reqs // POOLING_QUEUE_SHARE))
        in_flight: deque[RequestStream] = deque()
        outputs: list[Pooled] = []

        async def finish_oldest() -> None:
            outputs.append(await _pooled(in_flight[0]))
            in_flight.popleft()

        try:
            for count, item in enumerate(inputs, 1):
                if len(in_flight) == window:
                    await finish_oldest()
                while True:
                    try:
                        stream = await self.submit(item.prompt, item.params, param=item.param, **options)
                        break
                    except OverloadedError:
                        if not in_flight:
                            raise
                        await finish_oldest()
                in_flight.append(stream)
                note(stream)
                if count % YIELD_EVERY == 0:
                    await asyncio.sleep(0)  # other requests have their turn between many texts
            while in_flight:
                await finish_oldest()
            return outputs
        finally:
            for stream in in_flight:
                stream.close()

    async def _encode_all(
        self, prompts: Prompt | Sequence[Prompt], task: str, options: Mapping[str, Any]
    ) -> list[Pooled]:
        await self.start()
        front, rest = self.front_model, dict(options)
        check_task(spec_of(front), task)
        params, name = rest.pop("pooling_params", None), rest.pop("prompt_name", None)
        return await self.pool_all(pooling_inputs(front, prompts, params, task=task, prompt_name=name), **rest)

    async def chat_prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        truncate_prompt_tokens: int | None = None,
        wait: Wait[Any] = until_done,
    ) -> list[int]:
        """Render a conversation with the model's chat template and tokenize it, for `submit`.

        Control tokens that the messages spell out are tokenized as ordinary text. `truncate_prompt_tokens` keeps only
        the last so many tokens; it belongs here, because otherwise a longer conversation is refused. `chat_template` is
        Jinja text to use in the place of the model's template; whether a caller may bring one is for the server to say.
        `wait` is as for `submit`.

        Raises:
            RequestError: the template refuses the messages, or the model has none.
            ContextLengthError: the conversation does not fit.
        """
        await self.start()
        requests = self._alive()

        def render() -> list[int]:
            return requests.model.template(chat_template).encode(
                messages,
                requests.inputs.limit,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                variables=chat_template_kwargs,
                truncate_prompt_tokens=truncate_prompt_tokens,
            )

        def render_now(max_chars: int, *, on_loop: bool) -> list[int]:
            with without_waiting(max_chars, together=on_loop):
                return render()

        if chat_template is None:
            size = text_size([messages, tools, documents, chat_template_kwargs], enough=THREAD_CHARS)
            try:
                if size <= THREAD_CHARS:
                    return render_now(MAX_LOOP_CHARS, on_loop=True)
                return await self._in_thread(lambda: render_now(MAX_TEXT, on_loop=False))
            except MustWaitError:
                pass
        kind = TEMPLATES if chat_template is None else REQUEST_TEMPLATES
        rendered: list[int] = await wait(self._waiting[kind].run(render))
        return rendered

    async def chat_template(self, source: str | None = None, wait: Wait[Any] = until_done) -> ChatTemplate:
        """Return the model's chat template, or that with the Jinja text `source`. Raises `RequestError`."""
        front = self._alive().model
        if source is None:
            return front.template()
        compiled = self._waiting[REQUEST_TEMPLATES].run(lambda: front.template(source))  # again, if it is not kept
        template: ChatTemplate = await wait(compiled)
        return template

    async def _tokenize(self, prompt: Prompt, params: Params, param: str, lora: LoRARequest | None) -> list[int]:
        work = partial(self.processor.tokenize, prompt, params, param=param, lora=lora)
        content, _ = split_prompt(prompt, param)
        return await self._in_thread(work) if len(content) > THREAD_CHARS else work()

    async def _constraints(
        self, params: Params, token_ids: list[int], message_spec: MessageSpec | None, wait: Wait[Any]
    ) -> tuple[str | None, ThinkingData | None]:
        """Return the grammar of a request, compiled, and the bound on its reasoning."""
        constraints = self.front_model.constraints(params, token_ids, message_spec)
        job = constraints.job
        if job is None:
            return None, constraints.thinking
        cached = self._grammars.cached(job)
        if cached is not None:
            return cached.unwrap(), constraints.thinking
        grammar: str | None = await wait(self._waiting[GRAMMARS].run(lambda: self._grammars.compile(job)))
        return grammar, constraints.thinking

    def _in_thread(self, work: Callable[[], T]) -> Awaitable[T]:
        assert self._loop is not None
        return self._loop.run_in_executor(self._threads, work)

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last output with finish_reason "abort". Unknown ids are ignored."""
        self.abort_now([request_id])

    def abort_now(self, request_ids: Sequence[str]) -> None:
        """As `abort`, for several requests and without a coroutine; call it on the event loop."""
        if self._requests is not None:
            self._requests.abort(request_ids)
            self._share_load()

    def abort_from_anywhere(self, request_id: str) -> None:
        """As `abort`, from any thread, also when the event loop is closed already."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.abort_now, [request_id])

    async def call(self, method: str, **arguments: int | bool | str) -> dict[str, Any]:
        """Run an engine operation between steps, such as "stats"; while the engine is replaced, wait for the new one.

        Raises `QuireError` if it fails, and `EngineDeadError` if the engine dies meanwhile.
        """
        await self.start()
        self._alive()
        await self._client.wait()
        self._alive()
        assert self._loop is not None
        answer = self._calls[self._send_call(method, **arguments)] = self._loop.create_future()
        return await answer

    def _send_call(self, method: str, **arguments: int | bool | str) -> int:
        self._num_calls += 1
        self._client.send(Call(call_id=self._num_calls, method=method, arguments=arguments))
        return self._num_calls

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes that no running request uses."""
        await self.call("reset_prefix_cache")

    async def sleep(self, level: int = 1) -> int:
        """Free memory until `wake_up`, as `LLM.sleep`; return how many bytes. Requests are refused meanwhile.

        Raises `RequestError` while requests are unfinished.
        """
        check_sleep_level(level)
        if self.num_unfinished:
            raise RequestError(
                f"{self.num_unfinished} requests are unfinished; the engine can sleep once they have ended",
                code="engine_busy",
            )
        self._num_falling_asleep += 1
        try:
            return int((await self.call("sleep", level=level))["freed"])
        finally:
            self._num_falling_asleep -= 1

    async def wake_up(self) -> None:
        """Allocate again what `sleep` has freed. Raises `QuireError`, and goes on sleeping, if it is not free."""
        await self.call("wake_up")  # whoever has put it to sleep

    async def start_profile(self) -> None:
        """Begin to trace the engine's steps, as `LLM.start_profile`; those of all its clients."""
        await self.call("start_profile")

    async def stop_profile(self) -> list[str]:
        """End what `start_profile` began; return the paths of its files, as `LLM.stop_profile`."""
        paths: list[str] = (await self.call("stop_profile"))["paths"]
        return paths

    @property
    def is_sleeping(self) -> bool:
        """Whether the engine was put to sleep, by any of its clients, and not woken up since."""
        return self._sleep_level > 0

    @property
    def sleep_level(self) -> int:
        """At which level the engine sleeps; 0 while it is awake."""
        return self._sleep_level

    async def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine is dead, or the error that prevented its start."""
        if self._dead is not None:
            raise self._dead

    async def close(self) -> None:
        """End the engine; streams still open raise `EngineDeadError`. Later calls do nothing."""
        if self._startup is not None and not self._startup.done():
            self._startup.cancel()
            await asyncio.gather(self._startup, return_exceptions=True)
        if self._receiver is not None:
            self._receiver.cancel()
            await asyncio.gather(self._receiver, return_exceptions=True)
        self._die(EngineDeadError("the engine was closed"))
        await self._client.close()
        for waiting in self._waiting.values():
            waiting.close()
        self._grammars.close()
        if self._front is not None:
            self._front.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _receive(self) -> None:
        """Process the messages of the engine until it is dead; a background task."""
        logs.request_id.set(None)  # the task belongs to no request
        try:
            while True:
                message = await self._client.receive()
                if isinstance(message, CallResult):
                    self._answer(message)
                else:
                    self._stats, self._sleep_level = message.stats, message.sleep_level
                    self._stats_time = message.timestamp
                    self._started().process(message)
                    self._share_load()
        except EngineDeadError as error:
            self._die(error)
        except Exception as error:  # task boundary: it ends every stream
            logger.exception("the frontend failed")
            self._die(EngineDeadError(f"the frontend failed: {type(error).__name__}"))

    def refresh_stats(self) -> None:
        """Request new numbers: an idle engine sends nothing, so those of its last step would stay."""
        if self._client.running:
            self._stats_call = self._send_call("stats")

    def _on_engine_death(self) -> None:
        self._fail_calls(EngineDeadError("the engine died before it had answered"))

    def _on_engine_restart(self) -> None:
        self._sleep_level = 0  # a new engine is awake
        self.refresh_stats()

    def _answer(self, result: CallResult) -> None:
        if result.call_id == self._stats_call and result.value is not None:
            self._stats, self._stats_time = msgspec.convert(result.value, SchedulerStats), time.monotonic()
        answer = self._calls.pop(result.call_id, None)
        if answer is None or answer.done():
            return  # the caller was cancelled
        if result.error is not None:
            answer.set_exception(result.error.exception())
        else:
            answer.set_result(result.value or {})

    def _die(self, error: QuireError) -> None:
        if self._dead is None:
            self._dead = error
        if self._requests is not None:
            self._requests.outputs.fail_all(self._dead)
        self._share_load()
        self._fail_calls(self._dead)

    def _fail_calls(self, error: QuireError) -> None:
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._calls.clear()

    def _started(self) -> RequestProcessor:
        assert self._requests is not None, "start() comes first"
        return self._requests

    def _alive(self) -> RequestProcessor:
        if self._dead is not None:
            raise self._dead
        return self._started()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer, once started; None with `skip_tokenizer_init`."""
        return None if self._front is None else self._front.tokenizer

    @property
    def model_info(self) -> ModelInfo:
        """What the model's config.json says; there once started."""
        return self.front_model.info

    @property
    def front_model(self) -> FrontModel:
        """Config, tokenizer and chat template of the model; there once started."""
        assert self._front is not None, "start() comes first"
        return self._front

    @property
    def processor(self) -> InputProcessor:
        """Request checks and default sampling parameters; there once started."""
        return self._started().inputs

    @property
    def max_model_len(self) -> int:
        """Context length [tokens]; there once started."""
        return self.processor.max_model_len

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table; there once started."""
        return self.processor.vocab_size

    @property
    def stats(self) -> SchedulerStats:
        """The scheduler's numbers after the latest step, or after the abort that left nothing to do."""
        return self._stats

    @property
    def stats_time(self) -> float:
        """When `stats` came [monotonic seconds]; 0.0 before the first ones."""
        return self._stats_time

    @property
    def num_unfinished(self) -> int:
        """Requests that were accepted and have not ended."""
        num_started = 0 if self._requests is None else self._requests.outputs.num_unfinished
        return num_started + self._num_admitting

    @property
    def _num_queued(self) -> int:
        """As `num_unfinished`, but a request counts as often as the engine gets its sequences in parts."""
        num_started = 0 if self._requests is None else self._requests.outputs.num_engine_requests
        return num_started + self._num_admitting

    @property
    def errored(self) -> bool:
        """Whether the engine is gone, and will not be replaced."""
        return self._dead is not None

    @property
    def ready(self) -> bool:
        """Whether requests are accepted; while the engine is replaced, they wait."""
        return self._receiver is not None and self._dead is None

    @property
    def recovering(self) -> bool:
        """Whether the engine died and is being replaced."""
        return self._client.recovering

    @property
    def stalled(self) -> bool:
        """Whether the engine has been silent for longer than its work explains."""
        return self._client.stalled

    @property
    def replaceable(self) -> bool:
        """Whether an engine that dies or hangs is replaced."""
        return self._client.replaceable

    @property
    def silent_seconds(self) -> float:
        """For how long the engine has been silent; 0.0 while its work explains that, and while it is replaced."""
        return self._client.silent_seconds

    @property
    def num_restarts(self) -> int:
        """How often the engine was replaced."""
        return self._client.num_restarts

    @property
    def num_poison_requests(self) -> int:
        """Requests that were ended because they killed engines."""
        return self._client.num_poison_requests

    @property
    def last_recovery_seconds(self) -> float | None:
        """How long the last replacement took, from death to replay; None if there was none."""
        return self._client.last_recovery_seconds


async def _pooled(stream: RequestStream) -> Pooled:
    """Wait for a pooling request and return its output. Raises `QuireError` if it failed."""
    async for _ in stream:
        pass
    return pooled_output(stream.state)

"""`LLM`: prompts in, finished outputs out, synchronously, with the engine in the same process."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Literal

from quire.checks import wrong_value
from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.messages import check_sleep_level, check_wake_tags
from quire.engine_request import LoRARequest
from quire.errors import RequestError, UnsupportedError
from quire.frontend.formats.message import Message as AssistantMessage
from quire.frontend.llm_engine import LLMEngine
from quire.frontend.output_processor import RequestState, beam_search_output
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
)
from quire.frontend.prompts import Prompt, RequestInput, as_prompts, one_each, prompt_text, request_inputs
from quire.frontend.tools import requested_tools
from quire.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from quire.pooling_params import PoolingParams
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

Message = Mapping[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """A model, its memory, and everything to generate with it. Use it as a context manager, or call `close`.

    One thread at a time may use it.

    Args:
        model: folder, Hugging Face id, or "quire-demo".
        options: any option of `EngineConfig`, by name.

    Raises:
        ConfigError: an unknown option (the message has the nearest known one), or a bad value.
        ModelError: the model cannot be served; the message names file and field.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        self._set_up(LLMEngine.from_config(EngineConfig.from_kwargs(model=model, **options)))

    @classmethod
    def from_engine(cls, llm_engine: LLMEngine) -> LLM:
        """Return the `LLM` of an engine, which is closed with it."""
        llm = cls.__new__(cls)
        llm._set_up(llm_engine)
        return llm

    def _set_up(self, llm_engine: LLMEngine) -> None:
        self.llm_engine = llm_engine
        self.config = llm_engine.config
        self._front = llm_engine.front_model
        self._requests = llm_engine.requests
        self._num_requests = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        lora_request: Adapters = None,
        on_error: Literal["raise", "return"] = "raise",
    ) -> list[RequestOutput]:
        """Generate for all prompts, batched as the engine sees fit; return the outputs in the order of the prompts.

        Args:
            prompts: one prompt or a list of them. A prompt is a text, a list of token ids, {"prompt": text} or
                {"prompt_token_ids": ids}.
            sampling_params: for all prompts, or one for each; None takes the model's defaults.
            use_tqdm: show a progress bar on standard error.
            priority: for all prompts, or one for each; lower runs earlier, with the priority policy.
            tenant: on whose account they run, all of them or each.
            lora_request: the LoRA adapter for all prompts, or one (or None) for each.
            on_error: with "return", a prompt that is bad leaves the others alone, as does one that fails in the engine.

        A request that fails in the engine leaves the others alone: its `outputs` say so, with `finish_reason` "error"
        and an `error` that may be raised.

        Raises:
            RequestError: a prompt or parameter is bad; nothing was generated then. ContextLengthError: too long.
        """
        if on_error not in ("raise", "return"):
            raise wrong_value("on_error", "'raise' or 'return'", on_error)
        inputs = self._inputs(as_prompts(prompts), sampling_params)
        failed: dict[int, RequestOutput] = {}
        refused = failed if on_error == "return" else None
        outputs = iter(_outputs(self._run(inputs, use_tqdm, priority, tenant, lora_request, refused)))
        return [failed[index] if index in failed else next(outputs) for index in range(len(inputs))]

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = False,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        lora_request: Adapters = None,
    ) -> list[BeamSearchOutput]:
        """Return the `beam_width` most likely continuations of each prompt that the search finds, best first.

        Arguments as for `generate`.

        Raises:
            RequestError: a prompt or parameter is bad, or a search can never fit; other prompts have no result then.
            GenerationError: the engine could not go on with a search.
        """
        items = as_prompts(prompts)
        [params] = one_each([params], 1, "params", BeamSearchParams)
        inputs = request_inputs(items, [params.sampling_params()] * len(items))
        outputs = _outputs(self._run(inputs, use_tqdm, priority, tenant, lora_request))
        return [beam_search_output(output, params, self._front.tokenizer) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool | str = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        lora_request: Adapters = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each in a list of them.

        Args:
            messages: [{"role": "user", "content": "..."}, ...], or a list of such lists.
            add_generation_prompt, continue_final_message, tools, documents, chat_template_kwargs: as for
                `ChatTemplate.render`.
            tool_choice, parallel_tool_calls: as in OpenAI's API; by default "auto", if it is known how this model calls
                tools. `read_message` finds the calls in the output.
            chat_template: Jinja text to use in the place of the model's template. The others as for `generate`.

        Raises:
            RequestError: as `generate`; also if the template refuses the messages, or the model has none.
        """
        template, fmt = self._front.template(chat_template), self._front.message_format
        requested = requested_tools(None if tools is None else list(tools), tool_choice, parallel_tool_calls)
        if not fmt.handles_tools and tool_choice not in (None, "none"):
            raise UnsupportedError("tool_choice: how this model calls tools is not known", param="tool_choice")
        several = isinstance(messages, list | tuple) and messages and not isinstance(messages[0], Mapping)
        conversations = list(messages) if several else [messages]
        prompts = [
            template.encode(
                conversation,  # type: ignore[arg-type]
                self._requests.inputs.limit,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        offered = requested.callable if fmt.handles_tools else ()
        options: dict[str, Any] = {"choice": requested.choice, "parallel": requested.parallel}
        specs = [self._front.message_spec(prompt, tools=offered, **options) for prompt in prompts]
        inputs = self._inputs(prompts, sampling_params)
        inputs = [replace(item, message_spec=spec) for item, spec in zip(inputs, specs, strict=True)]
        return _outputs(self._run(inputs, use_tqdm, priority, tenant, lora_request))

    def read_message(
        self, output: RequestOutput, index: int = 0, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> AssistantMessage:
        """Return reasoning, content and tool calls of completion number `index` of what `chat` returned.

        Args:
            tools: those that `chat` was given; without them there are no calls.
        """
        tokenizer = self.get_tokenizer()
        requested = requested_tools(None if tools is None else list(tools), None, True)
        spec = self._front.message_spec(output.prompt_token_ids, tools=requested.callable, choice=requested.choice)
        completion = output.outputs[index]
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=False)
        if isinstance(completion.stop_reason, str) and completion.stop_reason in text:
            text = text[: text.rindex(completion.stop_reason)]
        parser = self._front.message_format.parser(spec)
        message = AssistantMessage()
        message.add(parser.feed(text))
        message.add(parser.finish())
        return message

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        use_tqdm: bool = True,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
    ) -> list[Pooled]:
        """Return what the model makes of each prompt, as arrays.

        Args:
            prompts: as for `generate`.
            pooling_params: for all prompts, or one for each.
            pooling_task: "embed", "token_embed", "classify" or "score"; None: what the model is made for.
            truncate_prompt_tokens: as in `PoolingParams`.
            prompt_name: which of the prompts in the model's folder is put before texts; None: its default, if any.
            use_tqdm, priority, tenant: as for `generate`.

        Raises:
            RequestError: a prompt or parameter is bad, or the model generates text. GenerationError: it failed.
        """
        inputs = pooling_inputs(
            self._front,
            prompts,
            pooling_params,
            task=pooling_task,
            truncate_prompt_tokens=truncate_prompt_tokens,
            prompt_name=prompt_name,
        )
        return [pooled_output(state) for state in self._run(inputs, use_tqdm, priority, tenant)]

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt. Arguments and errors as for `encode`."""
        check_task(spec_of(self._front), "embed")
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="embed",
            truncate_prompt_tokens=truncate_prompt_tokens,
            prompt_name=prompt_name,
        )
        return [as_embedding(output) for output in found]

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Return how well each class fits each prompt. Arguments and errors as for `encode`."""
        check_task(spec_of(self._front), "classify")
        found = self.encode(
            prompts,
            pooling_params,
            use_tqdm=use_tqdm,
            pooling_task="classify",
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [as_classification(output) for output in found]

    def score(
        self,
        queries: str | Sequence[str],
        documents: str | Sequence[str],
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
        instruction: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Return how well each document fits the query, or its query.

        A cross-encoder reads both together. With a model of vectors it is their cosine, of queries and documents with
        the prompts that the folder has for them.

        Args:
            queries: one, or as many as documents. instruction: what rerankers that are asked for yes or no judge by.
            The others as for `encode`.
        """
        [params] = one_each(pooling_params or PoolingParams(), 1, "pooling_params", PoolingParams)
        if truncate_prompt_tokens is not None:
            params = params.clone(truncate_prompt_tokens=truncate_prompt_tokens)
        texts = as_texts(queries, "queries"), as_texts(documents, "documents")
        scoring = PairScoring(self._front, self._requests.inputs, *texts, params, instruction)
        return scoring.scores([pooled_output(state) for state in self._run(scoring.inputs, use_tqdm)])

    def _inputs(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[RequestInput]:
        """Return the prompts with their parameters, which all have one output at their end."""
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        chosen = one_each(sampling_params, len(prompts), "sampling_params", SamplingParams)
        return request_inputs(prompts, [item.clone(output_kind=RequestOutputKind.FINAL_ONLY) for item in chosen])

    def _run(
        self,
        inputs: Sequence[RequestInput],
        use_tqdm: bool,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        adapters: Adapters = None,
        refused: dict[int, RequestOutput] | None = None,
    ) -> list[RequestState]:
        """Run requests to their end; return their states in the same order, without those in `refused`.

        Args:
            refused: gets an output for each bad one, by its index; None: the first one's error is raised.
        """
        self.llm_engine.check_awake()
        priorities = one_each(priority, len(inputs), "priority")
        tenants = one_each(tenant, len(inputs), "tenant")
        states = self._admit(inputs, priorities, tenants, one_each(adapters, len(inputs), "lora_request"), refused)
        num_prompt_tokens = sum(len(state.prompt_token_ids) for state in states)
        num_left = len(states)
        with (
            deferred_interrupt() as check_interrupt,
            self._aborting(states),
            progress_bar(num_left, num_prompt_tokens, enabled=use_tqdm) as advance,
        ):
            while num_left:
                check_interrupt()
                updated, num_tokens = self.llm_engine.advance()
                num_finished = sum(state.finished for state in updated)
                advance(num_finished, num_tokens)
                num_left -= num_finished
        return states

    def _admit(
        self,
        inputs: Sequence[RequestInput],
        priorities: Sequence[int],
        tenants: Sequence[str],
        adapters: Sequence[LoRARequest | None],
        refused: dict[int, RequestOutput] | None,
    ) -> list[RequestState]:
        """Check all requests, then hand all that are not refused to the engine."""
        checked = []
        for index, (item, priority, tenant, lora) in enumerate(zip(inputs, priorities, tenants, adapters, strict=True)):
            request_id = str(self._num_requests + index)
            try:
                checked.append(
                    self.llm_engine.check_request(
                        request_id,
                        item.prompt,
                        item.params,
                        param=item.param,
                        message_spec=item.message_spec,
                        priority=priority,
                        tenant=tenant,
                        lora_request=lora,
                    )
                )
            except RequestError as error:
                if refused is None:
                    raise
                completion = CompletionOutput(0, "", [], finish_reason="error", error=error, lora_request=lora)
                text = prompt_text(item.prompt)
                refused[index] = RequestOutput(request_id, text, [], [completion], True, lora_request=lora)
        self._num_requests += len(inputs)
        states: list[RequestState] = []
        with self._aborting(states):
            for request in checked:
                states.append(self.llm_engine.start(request))
        return states

    @contextlib.contextmanager
    def _aborting(self, states: Sequence[RequestState]) -> Iterator[None]:
        """Whatever ends the work early (Ctrl-C, an error) takes its requests out of the engine."""
        try:
            yield
        except BaseException:
            self._requests.abort([state.request_id for state in states])
            raise

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table."""
        return self._requests.inputs.vocab_size

    @property
    def max_model_len(self) -> int:
        """Context length [tokens]."""
        return self._requests.inputs.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `RequestError` if the engine runs without one."""
        return self.llm_engine.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's makers recommend (a new object each time)."""
        return self._requests.inputs.default_sampling_params()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self.llm_engine.core.call("reset_prefix_cache")

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`: at level 1 that of the KV cache, at level 2 also the weights'.

        Cached prefixes are forgotten, except those on disk. Meanwhile `generate` and its like raise
        `EngineAsleepError`; only `wake_up` takes the memory again.

        Raises:
            RequestError: there is no such level.
        """
        check_sleep_level(level)
        self.llm_engine.core.call("sleep", {"level": level})

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate again what `sleep` has freed; outputs are as before. Does nothing for one that is awake.

        Args:
            tags: "weights" and "kv_cache", as for vLLM. Weights and cache are allocated together here, with the first
                call, so that the second one does nothing.

        Raises:
            QuireError: the memory is not free any more; this LLM goes on sleeping then. RequestError: no such tag.
        """
        check_wake_tags(tags)
        self.llm_engine.core.call("wake_up")

    def start_profile(self) -> None:
        """Begin to trace the engine's steps: its phases, and every instruction or kernel of the device.

        Raises:
            UnsupportedError: the option `profiler_dir` was not given. ConflictError: it is being traced already.
        """
        self.llm_engine.core.call("start_profile")

    def stop_profile(self) -> list[str]:
        """End what `start_profile` began; return the paths of its files, in the trace event format.

        Perfetto (https://ui.perfetto.dev) and chrome://tracing open them.

        Raises:
            ConflictError: nothing is being traced. QuireError: the file cannot be written.
        """
        paths: list[str] = self.llm_engine.core.call("stop_profile")["paths"]
        return paths

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and no `wake_up` after it."""
        return not self.llm_engine.is_closed and self.llm_engine.core.sleep_level > 0

    def close(self) -> None:
        """Release the model and its memory. Later calls do nothing."""
        self.llm_engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The constructor may have failed before there was anything to close.
        if hasattr(self, "llm_engine"):
            self.close()


def _outputs(states: Sequence[RequestState]) -> list[RequestOutput]:
    outputs = [state.take() for state in states]
    return [output for output in outputs if output is not None]


@contextlib.contextmanager
def progress_bar(num_requests: int, num_prompt_tokens: int, *, enabled: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error, unless not `enabled`, with finished requests and tokens per second.

    Yields a function that takes newly finished requests and newly generated tokens.
    """
    if not enabled or not num_requests:
        yield lambda num_requests, num_tokens: None
        return
    from rich.console import Console  # lazy: only those who show a bar pay for it
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=Console(stderr=True),
    )
    with bar:
        task = bar.add_task("Generating", total=num_requests, speed="")
        started = time.monotonic()
        num_generated = 0

        def advance(num_requests: int, num_tokens: int) -> None:
            nonlocal num_generated
            num_generated += num_tokens
            seconds = max(time.monotonic() - started, 1e-9)
            speed = f"{num_prompt_tokens / seconds:.0f} in, {num_generated / seconds:.0f} out tokens/s"
            bar.update(task, advance=num_requests, speed=speed)

        yield advance


@contextlib.contextmanager
def deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C raise `KeyboardInterrupt` only when the yielded function is called next, never within an engine step.

    A second Ctrl-C raises at once. Nothing changes outside the main thread, or if the program has its own handler.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    noted: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if noted:
            raise KeyboardInterrupt
        noted.append(number)

    def check() -> None:
        if noted:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)

"""`LLM`: prompts in, finished outputs out, synchronously, with the engine in the same process."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from quire.config import DEMO_MODEL, EngineConfig
from quire.engine.create import create_inline_engine
from quire.engine.messages import AbortRequests
from quire.engine_request import LoRARequest
from quire.errors import EngineAsleepError, EngineDeadError, RequestError, UnsupportedError
from quire.frontend.asking import demand, message_spec
from quire.frontend.beams import beam_search_output, check_beam_params
from quire.frontend.formats.message import Message as AssistantMessage
from quire.frontend.formats.message import MessageSpec
from quire.frontend.grammars import GrammarCompiler
from quire.frontend.interrupt import deferred_interrupt
from quire.frontend.loading import FrontModel, load_front_model
from quire.frontend.output_processor import OutputProcessor, RequestState
from quire.frontend.pooling_calls import PoolingCalls, as_prompts
from quire.frontend.processor import Params, Prompt, prompt_text
from quire.frontend.progress import Progress, progress_bar
from quire.frontend.reading import read_message
from quire.frontend.sleeping import check_level
from quire.frontend.tools import requested_tools
from quire.outputs import BeamSearchOutput, RequestOutput
from quire.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.inline import InlineEngine

Message = Mapping[str, Any]
Adapters = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(PoolingCalls):
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
        self._engine: InlineEngine | None = None
        config = EngineConfig.from_kwargs(model=model, **options)
        front_model = load_front_model(config)  # first, since a bad folder shows here without loading weights
        self._set_up(config, create_inline_engine(config), front_model)

    @classmethod
    def from_parts(cls, config: EngineConfig, engine: InlineEngine, front_model: FrontModel) -> LLM:
        """Put an `LLM` together from parts made elsewhere; it closes the engine when it is closed."""
        llm = cls.__new__(cls)
        llm._set_up(config, engine, front_model)
        return llm

    def _set_up(self, config: EngineConfig, engine: InlineEngine, front_model: FrontModel) -> None:
        self.config = config
        self._engine = engine
        self._front = front_model
        self._processor = front_model.processor(engine.ready, seed=config.model.seed)
        self._outputs = OutputProcessor(front_model.tokenizer)
        self._grammars = GrammarCompiler()
        self._num_requests = 0
        self._sleep_level = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: int | Sequence[int] = 0,
        tenant: str | Sequence[str] = "",
        lora_request: Adapters = None,
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

        A request that fails in the engine leaves the others alone: its `outputs` say so, with `finish_reason` "error"
        and an `error` that may be raised.

        Raises:
            RequestError: a prompt or parameter is bad; nothing was generated then. ContextLengthError: too long.
        """
        items = as_prompts(prompts)
        params = self._params_for(items, sampling_params)
        return self._run(items, params, priority, use_tqdm, tenant, adapters=lora_request)

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
        check_beam_params(params)
        items = as_prompts(prompts)
        outputs = self._run(items, [params] * len(items), priority, use_tqdm, tenant, adapters=lora_request)
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
        asked = requested_tools(None if tools is None else list(tools), tool_choice, parallel_tool_calls)
        if not fmt.handles_tools and tool_choice not in (None, "none"):
            raise UnsupportedError("tool_choice: how this model calls tools is not known", param="tool_choice")
        conversations = [messages] if _is_conversation(messages) else list(messages)
        prompts = [
            template.encode(
                conversation,  # type: ignore[arg-type]
                self._processor,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
                variables=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        asks = [
            message_spec(
                self._front,
                prompt,
                tools=asked.callable if fmt.handles_tools else (),
                choice=asked.choice,
                parallel=asked.parallel,
            )
            for prompt in prompts
        ]
        params = self._params_for(prompts, sampling_params)
        return self._run(prompts, params, priority, use_tqdm, tenant, asks, lora_request)

    def read_message(
        self, output: RequestOutput, index: int = 0, *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> AssistantMessage:
        """Return reasoning, content and tool calls of completion number `index` of what `chat` returned.

        Args:
            tools: those that `chat` was given; without them there are no calls.
        """
        return read_message(self._front, output, output.outputs[index], tools)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        priority: int | Sequence[int],
        use_tqdm: bool,
        tenant: str | Sequence[str],
        asks: Sequence[MessageSpec] | None = None,
        adapters: Adapters = None,
    ) -> list[RequestOutput]:
        states = self._run_states(prompts, params, priority, use_tqdm, tenant, asks, adapters)
        outputs = [state.take() for state in states]
        return [output for output in outputs if output is not None]

    def _run_states(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        priority: int | Sequence[int],
        use_tqdm: bool,
        tenant: str | Sequence[str],
        asks: Sequence[MessageSpec] | None = None,
        adapters: Adapters = None,
    ) -> list[RequestState]:
        """Run requests to their end; return their states in the order of the prompts."""
        engine = self._open_engine()
        if self._sleep_level:
            raise EngineAsleepError("this LLM is asleep; call wake_up() first")
        priorities = _one_each(priority, len(prompts), "priority")
        tenants = _one_each(tenant, len(prompts), "tenant")
        loras = _one_each(adapters, len(prompts), "lora_request")
        states = self._admit(prompts, params, priorities, tenants, asks, loras)
        num_prompt_tokens = sum(len(state.prompt_token_ids) for state in states)
        left = len(states)
        with (
            deferred_interrupt() as check_interrupt,
            self._aborting(states),
            progress_bar(left, num_prompt_tokens, enabled=use_tqdm) as progress,
        ):
            while left:
                check_interrupt()
                if not engine.has_unfinished():
                    raise EngineDeadError(f"the engine lost {left} requests")
                left -= self._step(engine, progress)
        return states

    def _params_for(
        self, prompts: Sequence[Prompt], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        chosen = _one_each(sampling_params, len(prompts), "sampling_params")
        for item in chosen:
            if not isinstance(item, SamplingParams):
                raise RequestError(
                    f"sampling_params must be SamplingParams, got {type(item).__name__}",
                    param="sampling_params",
                    code="invalid_type",
                )
        return [item.clone(output_kind=RequestOutputKind.FINAL_ONLY) for item in chosen]

    def _admit(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[Params],
        priorities: Sequence[int],
        tenants: Sequence[str],
        asks: Sequence[MessageSpec] | None,
        loras: Sequence[LoRARequest | None],
    ) -> list[RequestState]:
        """Check all requests, then hand all of them to the engine."""
        engine = self._open_engine()
        checked = []
        for index, (prompt, item) in enumerate(zip(prompts, params, strict=True)):
            param = "prompt" if len(prompts) == 1 else f"prompts[{index}]"
            request_id = str(self._num_requests + index)
            arrival_time = time.monotonic()
            token_ids = self._processor.tokenize(prompt, item, param=param, lora=loras[index])
            wanted = demand(self._front, item, token_ids, None if asks is None else asks[index])
            adds = self._processor.build(
                token_ids,
                item,
                request_id,
                arrival_time=arrival_time,
                priority=priorities[index],
                tenant=tenants[index],
                grammar=None if wanted.job is None else self._grammars.compile(wanted.job),
                thinking=wanted.thinking,
                lora=loras[index],
            )
            checked.append((request_id, prompt, adds, item))
        self._num_requests += len(checked)
        states = []
        for request_id, prompt, adds, item in checked:
            states.append(self._outputs.add(request_id, prompt_text(prompt), adds, item))
            for add in adds:
                engine.send(add)
        return states

    def _step(self, engine: InlineEngine, progress: Progress) -> int:
        """Run a step; return how many requests it finished."""
        outputs = engine.step()
        updated, aborts = self._outputs.process(outputs)
        if aborts:
            engine.send(AbortRequests(request_ids=aborts))
        num_finished = sum(state.finished for state in updated)
        num_tokens = sum(
            len(output.new_token_ids) + sum(len(beam.token_ids) for beam in output.beams or ())
            for output in outputs.outputs
        )
        progress.advance(num_finished, num_tokens)
        return num_finished

    @contextlib.contextmanager
    def _aborting(self, states: Sequence[RequestState]) -> Iterator[None]:
        """Whatever ends the work early (Ctrl-C, an error) takes its requests out of the engine."""
        try:
            yield
        except BaseException:
            aborts = self._outputs.abort([state.request_id for state in states])
            if aborts and self._engine is not None:
                self._engine.send(AbortRequests(request_ids=aborts))
            raise

    @property
    def vocab_size(self) -> int:
        """Rows of the model's embedding table."""
        return self._processor.vocab_size

    @property
    def max_model_len(self) -> int:
        """Context length [tokens]."""
        return self._processor.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `RequestError` if the engine runs without one."""
        if self._front.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self._front.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the parameters that the model's makers recommend (a new object each time)."""
        return self._processor.default_sampling_params()

    def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        self._open_engine().call("reset_prefix_cache")

    def sleep(self, level: int = 1) -> None:
        """Free memory until `wake_up`: at level 1 that of the KV cache, at level 2 also the weights'.

        Cached prefixes are forgotten, except those on disk. Meanwhile `generate` and its like raise
        `EngineAsleepError`: whoever wants the memory for something else must not lose it by surprise.

        Raises:
            RequestError: there is no such level.
        """
        check_level(level)
        self._sleep_level = self._open_engine().call("sleep", {"level": level})["level"]

    def wake_up(self) -> None:
        """Allocate again what `sleep` has freed; outputs are as before. Does nothing for one that is awake.

        Raises:
            QuireError: the memory is not free any more; this LLM goes on sleeping then.
        """
        self._sleep_level = self._open_engine().call("wake_up")["level"]

    @property
    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and no `wake_up` after it."""
        return self._sleep_level > 0

    def close(self) -> None:
        """Release the model and its memory. Later calls do nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self._grammars.close()
            engine.close()

    def _open_engine(self) -> InlineEngine:
        if self._engine is None:
            raise EngineDeadError("this LLM was closed")
        return self._engine

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # The constructor may have failed before there was anything to close.
        if getattr(self, "_engine", None) is not None:
            self.close()


def _is_conversation(messages: Any) -> bool:
    return not messages or not isinstance(messages, list | tuple) or isinstance(messages[0], Mapping)


def _one_each(value: Any, count: int, name: str) -> list[Any]:
    """Repeat a single value, or check that a list has one for each prompt."""
    if not isinstance(value, list | tuple):
        return [value] * count
    if len(value) != count:
        raise RequestError(f"{name} has {len(value)} items for {count} prompts", param=name)
    return list(value)

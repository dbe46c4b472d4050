"""`LLMEngine`: an engine in this process that its caller drives: requests are added, and each step returns what is new.

Its methods have vLLM's names. `LLM` is built on it; serving many callers at once is for `AsyncLLM`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quire.config import EngineConfig
from quire.engine_request import EngineRequest, LoRARequest
from quire.errors import EngineAsleepError, EngineDeadError, RequestError
from quire.frontend.formats.message import MessageSpec
from quire.frontend.front_model import FrontModel, load_front_model
from quire.frontend.grammars import GrammarCompiler
from quire.frontend.output_processor import RequestState
from quire.frontend.prompts import Params, Prompt
from quire.frontend.request_processor import RequestProcessor
from quire.outputs import RequestOutput
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.engine.core import EngineCore


class EngineArguments(Protocol):
    """What an engine is made from: `quire.EngineArgs`."""

    def create_engine_config(self) -> EngineConfig:
        """Return the checked options."""


@dataclass(frozen=True, slots=True)
class CheckedRequest:
    """A request that can be served."""

    request_id: str
    prompt: Prompt
    params: Params
    engine_requests: Sequence[EngineRequest]


class LLMEngine:
    """An engine and the requests to it. One thread at a time may use it; `close` releases the model.

    Args:
        config: checked options. engine: closed with this. front_model: the model as prompts and outputs need it.
    """

    def __init__(self, config: EngineConfig, engine: EngineCore, front_model: FrontModel) -> None:
        self.config = config
        self.front_model = front_model
        self.grammars = GrammarCompiler()
        self.requests = RequestProcessor(front_model, engine.ready, engine.send, seed=config.model.seed)
        self._engine: EngineCore | None = engine

    @classmethod
    def from_config(cls, config: EngineConfig) -> LLMEngine:
        """Load a model. Raises `ModelError` if it cannot be served."""
        front_model = load_front_model(config)  # first, since a bad folder shows here without loading weights
        from quire.engine.core import EngineCore  # heavy: only once the options are known to be good

        return cls(config, EngineCore(config), front_model)

    @classmethod
    def from_engine_args(cls, engine_args: EngineArguments) -> LLMEngine:
        """Load the model of these arguments. Raises as `from_config`."""
        return cls.from_config(engine_args.create_engine_config())

    @property
    def core(self) -> EngineCore:
        """The engine itself. Raises `EngineDeadError` if this was closed."""
        if self._engine is None:
            raise EngineDeadError("this LLM was closed")
        return self._engine

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._engine is None

    def check_awake(self) -> None:
        """Raise `EngineAsleepError` if it sleeps, and `EngineDeadError` if it was closed."""
        if self.core.sleep_level:
            raise EngineAsleepError("this LLM is asleep; call wake_up() first")

    # ---- requests ----

    def check_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        *,
        param: str = "prompt",
        message_spec: MessageSpec | None = None,
        priority: int = 0,
        tenant: str = "",
        lora_request: LoRARequest | None = None,
    ) -> CheckedRequest:
        """Return a request as the engine takes it.

        Args:
            param: what errors call the prompt. Everything else is as for `LLM.generate` and `RequestInput`.

        Raises:
            RequestError: the prompt or a parameter is bad. ContextLengthError: it is too long.
        """
        arrival_time = time.monotonic()
        processor = self.requests.inputs
        token_ids = processor.tokenize(prompt, params, param=param, lora=lora_request)
        constraints = self.front_model.constraints(params, token_ids, message_spec)
        engine_requests = processor.build(
            token_ids,
            params,
            request_id,
            arrival_time=arrival_time,
            priority=priority,
            tenant=tenant,
            grammar=None if constraints.job is None else self.grammars.compile(constraints.job),
            thinking=constraints.thinking,
            lora=lora_request,
        )
        return CheckedRequest(request_id, prompt, params, engine_requests)

    def start(self, request: CheckedRequest) -> RequestState:
        """Hand a request to the engine. Raises `RequestError` if an unfinished one has its id."""
        return self.requests.start(request.request_id, request.prompt, request.params, request.engine_requests)

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: Params,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> None:
        """Add a request, whose outputs the next steps return. Raises as `check_request` and `start`."""
        self.check_awake()
        self.start(self.check_request(request_id, prompt, params, lora_request=lora_request, priority=priority))

    def abort_request(self, request_ids: str | Sequence[str]) -> None:
        """End requests; unknown ids are ignored. The next step returns nothing of them."""
        self.requests.abort([request_ids] if isinstance(request_ids, str) else request_ids)

    def has_unfinished_requests(self) -> bool:
        """Whether another step is needed."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Return how many requests have not ended."""
        return self.requests.outputs.num_unfinished

    def step(self) -> list[RequestOutput]:
        """Run one step; return what is new of each request, as its `output_kind` says."""
        updated, _ = self.advance()
        outputs = [state.take() for state in updated]
        return [output for output in outputs if output is not None]

    def advance(self) -> tuple[list[RequestState], int]:
        """Run one step; return the requests that it changed, and how many tokens it generated."""
        core = self.core
        if not core.has_unfinished():
            if self.has_unfinished_requests():
                raise EngineDeadError(f"the engine lost {self.get_num_unfinished_requests()} requests")
            return [], 0
        outputs = core.step()
        updated = self.requests.process(outputs)
        num_tokens = sum(
            len(output.new_token_ids) + sum(len(beam.token_ids) for beam in output.beams or ())
            for output in outputs.outputs
        )
        return updated, num_tokens

    # ---- the rest ----

    def get_tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Raises `RequestError` if the engine runs without one."""
        if self.front_model.tokenizer is None:
            raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)")
        return self.front_model.tokenizer

    def close(self) -> None:
        """Release the model and its memory. Later calls do nothing."""
        engine, self._engine = self._engine, None
        if engine is not None:
            self.grammars.close()
            self.front_model.close()
            engine.close()

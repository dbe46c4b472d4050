"""`OpenAIBackend`: programs on any server with OpenAI's API, through the `openai` package (extra `lang`).

Plain text goes to completions, programs with roles to chat completions. The endpoint is a black box: each call sends
the whole text, and whether forks share a prefix is up to its prefix cache. What an endpoint cannot do is refused before
anything is sent.

With speculation (SGLang, Zheng et al. 2024, section "API speculative execution") a gen with a stop text asks for more
than its own piece, without the stop. What follows the piece, the *surplus*, is how the model would go on; if the
program goes on with the same words, the next gen is taken from the surplus without a call. A piece is used only where a
call of its own would have given it, as far as that can be known without the endpoint's tokenizer: its stop text was
found, or the text ended, within `max_tokens` bytes, since a token has at least one byte (the end of text is a token,
too). A deterministic endpoint gives the same results with and without speculation, as long as how the text is tokenized
does not change how it goes on.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec

from quire.errors import (
    ConfigError,
    GenerationError,
    NotFoundError,
    OverloadedError,
    QuireError,
    RequestError,
    UnsupportedError,
    echo,
)
from quire.frontend.detokenizer import StopChecker
from quire.lang.backend import Backend, Capture, Context, Emit
from quire.lang.parts import Gen, Select, max_tokens_of
from quire.structured_outputs import KINDS, StructuredOutputParams

if TYPE_CHECKING:
    from openai import AsyncOpenAI

# What may differ between two gens that share a call. Seeds are drawn for each gen, so they cannot be the same.
OWN_OPTIONS = frozenset(("stop", "max_tokens", "seed"))


@dataclass(frozen=True, slots=True)
class Surplus:
    """Text that the endpoint has generated beyond what the program asked for.

    Attributes:
        ended: whether the model ended the text there. options: of the call that generated it.
    """

    text: str = ""
    ended: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def after(self, text: str) -> Surplus:
        """Return what is left behind text of the program: nothing if the model has generated something else."""
        return replace(self, text=self.text[len(text) :]) if self.text.startswith(text) else Surplus()

    def take(self, options: dict[str, Any]) -> Capture | None:
        """Return what a gen with these options gets out of it, or None if it needs a call of its own."""
        if not (self.text or self.ended) or self.options != _shared(options):
            return None
        stops = options.get("stop") or []
        checker = StopChecker([stops] if isinstance(stops, str) else stops, include=False)
        piece = checker.add(self.text)
        if checker.matched is None:
            piece += checker.flush()
            if not self.ended:
                return None
        most = max_tokens_of(options)
        num_bytes = len(piece.encode()) + (1 if checker.matched is None else len(checker.matched.encode()))
        if most is not None and num_bytes > most:
            return None
        return Capture(piece, "stop", checker.matched, speculated=True)


def _shared(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in OWN_OPTIONS}


DIALECTS = ("basic", "openai", "vllm")
# Sampling options that every endpoint knows; others are fields of vLLM's dialect, which Quire's servers speak.
COMMON_OPTIONS = frozenset(
    ("temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "logit_bias", "max_tokens")
)


class OpenAIBackend(Backend):
    """An endpoint.

    Args:
        base_url: such as http://127.0.0.1:8000/v1. model: None takes the first that the endpoint lists.
        api_key: the environment is not looked at. timeout: of a call [s]. max_retries: of a call that was not answered.
        dialect: what the endpoint knows. "basic": text and the common sampling options. "openai": also, in chats,
            `response_format` with a JSON schema. "vllm": also the fields of vLLM and Quire, so that everything works
            but select by log-probability: `structured_outputs`, `continue_final_message`, all sampling options.
        speculate: take several gens out of one call where they fit, see `speculation`. Then text is not streamed.
        speculated_tokens: how many tokens more than its `max_tokens` such a call asks for.

    Attributes:
        num_calls: generations that were asked of the endpoint.
    """

    def __init__(
        self,
        base_url: str,
        model: str | None = None,
        *,
        api_key: str = "none",
        dialect: str = "openai",
        speculate: bool = False,
        speculated_tokens: int = 64,
        timeout: float = 600.0,
        max_retries: int = 2,
    ) -> None:
        super().__init__()
        if dialect not in DIALECTS:
            raise ConfigError(f"dialect must be one of {', '.join(DIALECTS)}, got {echo(dialect)}", param="dialect")
        if speculated_tokens < 1:
            raise ConfigError(
                f"speculated_tokens must be at least 1, got {speculated_tokens}", param="speculated_tokens"
            )
        self.dialect = dialect
        self.speculate = speculate
        self.speculated_tokens = speculated_tokens
        self.num_calls = 0
        self._model = model
        self._options: dict[str, Any] = {
            "base_url": base_url,
            "api_key": api_key,
            "timeout": timeout,
            "max_retries": max_retries,
        }
        self._client: AsyncOpenAI | None = None

    def context(self) -> Context:
        return EndpointContext(self)

    async def shut_down(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def call(self, context: Context, options: dict[str, Any], extra: dict[str, Any], emit: Emit) -> Capture:
        """Generate behind a context, in its open turn; nothing is appended.

        Args:
            extra: fields of the body that are not sampling options, and that only some endpoints know.

        Raises:
            QuireError: the endpoint cannot be reached, or what it answered.
        """
        client = self._open()
        import httpx  # these come together
        import openai

        body = {name: value for name, value in options.items() if name in COMMON_OPTIONS}
        more = {name: value for name, value in options.items() if name not in COMMON_OPTIONS}
        if self.dialect == "vllm":
            body["stream_options"] = {"include_usage": True}
        try:
            body["model"] = self._model = self._model or await self._first_model(client)
            self.num_calls += 1
            if context.turns:
                body["max_completion_tokens"] = max_tokens_of(body)
                body.pop("max_tokens", None)
                body["messages"] = [turn.message() for turn in context.turns if turn.content or not turn.open]
                create: Any = client.chat.completions.create
            else:
                body["max_tokens"], body["prompt"] = max_tokens_of(body), context.text
                create = client.completions.create
            async with await create(stream=True, extra_body={**more, **extra}, **body) as chunks:
                return await _read(chunks, emit)
        except (openai.OpenAIError, httpx.HTTPError) as error:
            raise _as_quire_error(error, getattr(error, "status_code", None)) from error

    def _open(self) -> AsyncOpenAI:
        if self._client is None:
            try:
                from openai import AsyncOpenAI  # lazy: only this backend needs it
            except ImportError:
                raise ConfigError("OpenAIBackend needs the openai package: pip install 'quire[lang]'") from None
            self._client = AsyncOpenAI(**self._options)
        return self._client

    async def _first_model(self, client: AsyncOpenAI) -> str:
        models = await client.models.list()
        if not models.data:
            raise NotFoundError("the endpoint lists no model; name one", param="model")
        return models.data[0].id


class EndpointContext(Context):
    """See `Context`."""

    def __init__(self, backend: OpenAIBackend) -> None:
        super().__init__()
        self._backend = backend
        self._surplus = Surplus()

    def literal(self, text: str) -> None:
        super().literal(text)
        self._surplus = self._surplus.after(text)

    def end(self) -> str:
        self._surplus = Surplus()
        return super().end()

    async def generate(self, gen: Gen, options: dict[str, Any], emit: Emit) -> Capture:
        self.check_open()
        opened = self.open_turn
        if opened is not None and opened.role != "assistant":
            raise UnsupportedError(f"an endpoint cannot write in a turn of {opened.role}", param="role")
        self._check_options(options)
        extra = self._structured_fields(gen.structured_outputs)
        capture = None
        if self._backend.speculate and gen.structured_outputs is None:
            capture = self._surplus.take(options) or await self._speculate(options)
        if capture is not None:
            emit(capture.text)
            # A piece that takes all of the surplus also takes its end.
            self._surplus = Surplus() if capture.text == self._surplus.text else self._surplus.after(capture.text)
        else:
            self._surplus = Surplus()
            capture = await self._backend.call(self, options, {**extra, **self._turn_fields()}, emit)
        self.append(capture.text)
        return capture

    async def select(self, select: Select, options: dict[str, Any], emit: Emit) -> Capture:
        if select.method == "logprob":
            raise UnsupportedError(
                "an endpoint cannot select by log-probability; use method='constrained'", param="method"
            )
        return await self.constrained(select, options, emit)

    async def _speculate(self, options: dict[str, Any]) -> Capture | None:
        """Ask for more than a gen needs, and take its piece; None if that is not certain to be what it asks for.

        Where an endpoint cannot go on within a turn, the whole turn is asked for again, and must begin with what is
        there already. For this the program shows the model before in which form to answer.
        """
        context, before = self, ""
        most = max_tokens_of(options)
        if not self._can_go_on():
            context = self.copy()
            before, context.turns[-1].content = context.turns[-1].content, ""
        elif not options.get("stop"):
            return None  # it goes on to its end; there is no surplus
        extra = {} if before else self._turn_fields()
        asked = {name: value for name, value in options.items() if name not in ("stop", "max_tokens")}
        # None stays None: as many as fit.
        asked["max_tokens"] = most and most + len(before.encode()) + self._backend.speculated_tokens
        answer = await self._backend.call(context, asked, extra, lambda piece: None)
        if not answer.text.startswith(before):
            raise UnsupportedError(
                f"this endpoint cannot go on within a turn, and its own turn is another one: {echo(answer.text)}; "
                "show the model the form of the answer, or use an endpoint with dialect='vllm'",
                param="speculate",
            )
        self._surplus = Surplus(answer.text[len(before) :], answer.finish_reason == "stop", _shared(options))
        return self._surplus.take(options)

    def _can_go_on(self) -> bool:
        opened = self.open_turn
        return opened is None or not opened.content or self._backend.dialect == "vllm"

    def _turn_fields(self) -> dict[str, Any]:
        """Return the fields that make an endpoint go on within the open turn."""
        opened = self.open_turn
        if opened is None or not opened.content:
            return {}
        if not self._can_go_on():
            raise UnsupportedError(
                "only with dialect='vllm' (or speculate=True) can a gen follow other text in a turn", param="dialect"
            )
        return {"continue_final_message": True, "add_generation_prompt": False}

    def _check_options(self, options: dict[str, Any]) -> None:
        unknown = sorted(options.keys() - COMMON_OPTIONS)
        if unknown and self._backend.dialect != "vllm":
            raise UnsupportedError(f"{unknown[0]} needs an endpoint with dialect='vllm'", param=unknown[0])

    def _structured_fields(self, params: StructuredOutputParams | None) -> dict[str, Any]:
        """Return the fields that ask for structured output."""
        if params is None:
            return {}
        dialect = self._backend.dialect
        if dialect == "vllm":
            return {"structured_outputs": msgspec.to_builtins(params)}
        if dialect == "openai" and params.json is not None and self.turns:
            schema = json.loads(params.json) if isinstance(params.json, str) else params.json
            named = {"name": "answer", "schema": schema, "strict": True}
            return {"response_format": {"type": "json_schema", "json_schema": named}}
        kind = next(name for name in KINDS if getattr(params, name) is not None)
        name = {"json": "a schema", "choice": "a choice (select)"}.get(kind, f"a {kind}")
        where = " (or dialect='openai', in a turn)" if kind == "json" else ""
        raise UnsupportedError(f"{name} needs an endpoint with dialect='vllm'{where}", param=kind)


async def _read(chunks: AsyncIterator[Any], emit: Emit) -> Capture:
    """Put the chunks of a stream together."""
    texts = []
    answer = Capture("")
    async for chunk in chunks:
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            answer.num_prompt_tokens = chunk.usage.prompt_tokens
            answer.num_cached_tokens = None if details is None else details.cached_tokens
        for choice in chunk.choices:
            text = choice.delta.content if hasattr(choice, "delta") else choice.text
            if text:
                emit(text)
                texts.append(text)
            answer.finish_reason = choice.finish_reason or answer.finish_reason
    if answer.finish_reason not in ("stop", "length"):
        raise GenerationError(f"the endpoint ended the text with finish_reason {answer.finish_reason}")
    answer.text = "".join(texts)
    return answer


def _as_quire_error(error: Exception, status: int | None) -> QuireError:
    """Return what an error of the `openai` package is here."""
    message = f"the endpoint answered {status}: {error}" if status else f"the endpoint did not answer: {error}"
    if status in (429, 503):
        return OverloadedError(message)
    if status == 404:
        return NotFoundError(message)
    return RequestError(message) if status in (400, 413, 422) else QuireError(message)

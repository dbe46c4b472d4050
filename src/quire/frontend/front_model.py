"""`FrontModel`: config, tokenizer and chat template of a model, which the frontend loads while the engine starts.

It also derives from them what the message of a request may contain, and what constrains its tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from quire.checkpoint.folder import resolve_model
from quire.checkpoint.hf_config import ModelInfo
from quire.checks import INT64_MAX
from quire.config import EngineConfig, ModelConfig
from quire.engine.resolve import load_info
from quire.engine_request import ThinkingData
from quire.errors import RequestError, UnsupportedError
from quire.frontend.chat import ChatTemplate, RequestTemplates
from quire.frontend.chat_worker import TemplateWorkers
from quire.frontend.formats.message import MessageSpec, Tool
from quire.frontend.formats.registry import MessageFormat, format_named
from quire.frontend.grammars import Job, MessageJob, StructuredOutputJob
from quire.frontend.prompts import Params
from quire.frontend.tokenizer_check import load_tokenizer
from quire.pooling_params import PoolingParams
from quire.sampling.processors import registered_names
from quire.sampling_params import SamplingParams
from quire.tokenizer.files import read_chat_template
from quire.tokenizer.tokenizer import Tokenizer

TAIL_TOKENS = 64  # of a prompt, searched for the mark that begins reasoning


@dataclass(frozen=True, slots=True)
class OutputConstraints:
    """What constrains the tokens of a request: a grammar to compile (`job`), and a bound on reasoning."""

    job: Job | None = None
    thinking: ThinkingData | None = None


@dataclass(frozen=True, slots=True)
class FrontModel:
    """A model as the frontend sees it.

    Attributes:
        tokenizer: None with `skip_tokenizer_init`. chat_template: None if the model has none.
        request_templates: compiles the chat templates that requests bring, and renders them in processes of their own.
        use_sampling_defaults: whether requests without parameters take those of generation_config.json.
        max_logprobs: most log-probabilities per position of a request; -1: no bound.
        logits_processors: names that requests may use.
        message_format: how the model writes reasoning and tool calls.
    """

    info: ModelInfo
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    use_sampling_defaults: bool = True
    request_templates: RequestTemplates = field(default_factory=RequestTemplates)
    max_logprobs: int = 20
    logits_processors: tuple[str, ...] = ()
    message_format: MessageFormat = field(default_factory=lambda: MessageFormat(None, None))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: those of the model, or else the tokenizer's."""
        if not self.info.eos_token_ids and self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            return (self.tokenizer.eos_token_id,)
        return tuple(self.info.eos_token_ids)

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        """Fields of `SamplingParams` that generation_config.json recommends; none where it is to be ignored."""
        return dict(self.info.sampling_defaults) if self.use_sampling_defaults else {}

    @property
    def end_tokens(self) -> list[str]:
        """Texts of the tokens that end a message."""
        if self.tokenizer is None:
            return []
        texts = (self.tokenizer.id_to_token(index) for index in self.eos_token_ids)
        return [text for text in texts if text is not None]

    def close(self) -> None:
        """End the processes that render chat templates."""
        self.request_templates.workers.close()
        if self.chat_template is not None:
            self.chat_template.workers.close()

    def template(self, source: str | None = None) -> ChatTemplate:
        """Return the model's chat template, or that with the Jinja text `source`, which a request brought.

        Raises:
            RequestError: the model has no template, or the text is not a valid one.
        """
        if source is not None:
            if self.tokenizer is None:
                raise RequestError("this engine runs without a tokenizer (skip_tokenizer_init)", param="chat_template")
            return self.request_templates.get(source, self.tokenizer)
        if self.chat_template is None:
            raise RequestError("this model has no chat template; use completions, or give one with chat_template")
        return self.chat_template

    def message_spec(
        self,
        prompt_token_ids: Sequence[int],
        *,
        tools: Sequence[Tool] = (),
        choice: str = "auto",
        parallel: bool = True,
    ) -> MessageSpec:
        """Return what an assistant's message may contain that the end of this prompt begins."""
        assert self.tokenizer is not None, "there is a chat template"
        fmt, tail = self.message_format, self._tail(prompt_token_ids)
        return MessageSpec(
            tools=list(tools),
            choice=choice if tools else "none",
            parallel=parallel,
            reasoning_open=fmt.reasoning_open(tail),
            can_reason=fmt.can_reason and not fmt.reasoning_closed(tail),
            special_tokens=self.tokenizer.control_tokens,
            end_tokens=self.end_tokens,
        )

    def constraints(
        self, params: Params, prompt_token_ids: Sequence[int], spec: MessageSpec | None
    ) -> OutputConstraints:
        """Return what constrains the tokens of a request.

        Args:
            spec: what its message may contain; None for a plain completion, which is constrained as a whole.

        Raises:
            UnsupportedError: thinking_token_budget is set, but the model does not mark its reasoning.
        """
        if isinstance(params, PoolingParams):
            return OutputConstraints()
        structured = params.structured_outputs
        job: Job | None = None
        if spec is not None:
            if structured is not None or (spec.tools and spec.choice != "none"):
                calls, reasoning = self.message_format.calls, self.message_format.reasoning
                job = MessageJob(
                    None if calls is None else calls.name,
                    None if reasoning is None else reasoning.name,
                    msgspec.structs.replace(spec, structured_outputs=structured),
                )
        elif structured is not None:
            special = self.tokenizer.control_tokens if self.tokenizer is not None else {}
            job = StructuredOutputJob(structured, special if structured.structural_tag is not None else {})
        budget = params.thinking_token_budget if isinstance(params, SamplingParams) else None
        if budget is None:
            return OutputConstraints(job)
        if spec is None:
            is_open = self.message_format.reasoning_open(self._tail(prompt_token_ids))
        else:
            is_open = spec.reasoning_open
        return OutputConstraints(job, self._thinking(budget, is_open))

    def reasoning_tokens(self, spec: MessageSpec) -> ThinkingData | None:
        """Return the tokens that enclose the reasoning of a message, without a bound.

        None if the message has no reasoning, or if the text that ends it is several tokens: the model may generate the
        same text with other tokens.
        """
        if not (spec.can_reason or spec.reasoning_open) or self.message_format.thinking_texts is None:
            return None
        tokens = self._thinking(INT64_MAX, spec.reasoning_open)
        return tokens if len(tokens.end_ids) == 1 else None

    def _tail(self, prompt_token_ids: Sequence[int]) -> str:
        """Return the last characters of a prompt, special tokens as text."""
        if self.tokenizer is None:
            return ""
        return self.tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)

    def _thinking(self, budget: int, is_open: bool) -> ThinkingData:
        tokenizer, texts = self.tokenizer, self.message_format.thinking_texts
        if tokenizer is None or texts is None:
            raise UnsupportedError(
                "thinking_token_budget needs a model whose reasoning is marked, and this one's chat template marks "
                "none; --reasoning-parser names the marks",
                param="thinking_token_budget",
            )
        start, end = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
        return ThinkingData(start, end, budget, open=is_open)


def load_front_model(config: EngineConfig) -> FrontModel:
    """Load config, tokenizer and chat template of `config.model`.

    Raises:
        ModelError: a file is missing or malformed; the message names it.
    """
    model = config.model
    info = load_info(config)
    tokenizer = chat_template = None
    request_templates = RequestTemplates(model.chat_template_content_format, model.default_chat_template_kwargs)
    if config.server.trust_request_chat_template:
        request_templates.workers.prestart()
    if not model.skip_tokenizer_init:
        folder = info.path
        if model.tokenizer is not None:
            folder = resolve_model(model.tokenizer, download_dir=model.download_dir)
        tokenizer = load_tokenizer(folder)
        chat_template = _load_template(model, tokenizer, folder)
    return FrontModel(
        info,
        tokenizer,
        chat_template,
        use_sampling_defaults=model.generation_config == "auto",
        request_templates=request_templates,
        max_logprobs=model.max_logprobs,
        logits_processors=tuple(registered_names(model.logits_processors)),
        message_format=_message_format(model, tokenizer, chat_template),
    )


def _message_format(model: ModelConfig, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> MessageFormat:
    """Return the format that the options name, or else the one found in the chat template for tools."""
    source = "" if template is None else template.for_tools.source
    special = {} if tokenizer is None else tokenizer.control_tokens
    return format_named(model.tool_call_parser, model.reasoning_parser, source, special)


def _load_template(model: ModelConfig, tokenizer: Tokenizer, folder: Path) -> ChatTemplate | None:
    source, tool_source, origin = tokenizer.chat_template, tokenizer.tool_template, str(folder)
    if model.chat_template is not None:
        path = Path(model.chat_template).expanduser()
        source, tool_source, origin = read_chat_template(path), None, str(path)
    if source is None:
        return None

    workers = TemplateWorkers()  # for both

    def make(text: str, for_tools: ChatTemplate | None = None) -> ChatTemplate:
        return ChatTemplate(
            text,
            tokenizer,
            origin=origin,
            content_format=model.chat_template_content_format,
            default_kwargs=model.default_chat_template_kwargs,
            for_tools=for_tools,
            workers=workers,
        )

    return make(source, None if tool_source is None else make(tool_source))

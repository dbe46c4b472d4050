"""What a request demands of the form of its text, put together: grammar, bound on reasoning, what a message may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from quire.checks import INT64_MAX
from quire.engine_request import ThinkingData
from quire.errors import UnsupportedError
from quire.frontend.formats.message import MessageSpec, Tool
from quire.frontend.grammar_jobs import Job, MessageJob, StructuredOutputJob
from quire.frontend.loading import FrontModel
from quire.frontend.processor import Params
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams

TAIL_TOKENS = 64  # of a prompt, in which the beginning of reasoning is looked for


@dataclass(frozen=True, slots=True)
class Demand:
    """`job` for `GrammarCompiler`, if there is anything to compile; `thinking` for the engine."""

    job: Job | None = None
    thinking: ThinkingData | None = None


def prompt_tail(front: FrontModel, prompt_token_ids: Sequence[int]) -> str:
    """Return the last characters of a prompt, special tokens as text."""
    if front.tokenizer is None:
        return ""
    return front.tokenizer.decode(prompt_token_ids[-TAIL_TOKENS:], skip_special_tokens=False)


def message_spec(
    front: FrontModel,
    prompt_token_ids: Sequence[int],
    *,
    tools: Sequence[Tool] = (),
    choice: str = "auto",
    parallel: bool = True,
) -> MessageSpec:
    """Return what may follow a prompt that ends with the beginning of an assistant's message."""
    assert front.tokenizer is not None, "there is a chat template"
    fmt = front.message_format
    tail = prompt_tail(front, prompt_token_ids)
    return MessageSpec(
        tools=list(tools),
        choice=choice if tools else "none",
        parallel=parallel,
        reasoning_open=fmt.reasoning_open(tail),
        can_reason=fmt.can_reason and not fmt.reasoning_closed(tail),
        special_tokens=front.tokenizer.control_tokens,
        end_tokens=front.end_tokens,
    )


def demand(
    front: FrontModel, params: Params, prompt_token_ids: Sequence[int], message_spec: MessageSpec | None
) -> Demand:
    """Return what a request needs beyond sampling.

    Args:
        message_spec: what its message may contain; None for a text that is no chat message, all of which
            `structured_outputs` then constrains.

    Raises:
        UnsupportedError: the model's reasoning cannot be told from the rest, so that it cannot be bounded.
    """
    if isinstance(params, PoolingParams):
        return Demand()
    form = params.structured_outputs
    job: Job | None = None
    if message_spec is not None:
        if form is not None or (message_spec.tools and message_spec.choice != "none"):
            calls, reasoning = front.message_format.calls, front.message_format.reasoning
            job = MessageJob(
                None if calls is None else calls.name,
                None if reasoning is None else reasoning.name,
                msgspec.structs.replace(message_spec, structured_outputs=form),
            )
    elif form is not None:
        special = front.tokenizer.control_tokens if front.tokenizer is not None else {}
        job = StructuredOutputJob(form, special if form.structural_tag is not None else {})
    budget = params.thinking_token_budget if isinstance(params, SamplingParams) else None
    if budget is None:
        return Demand(job)
    if message_spec is None:
        is_open = front.message_format.reasoning_open(prompt_tail(front, prompt_token_ids))
    else:
        is_open = message_spec.reasoning_open
    return Demand(job, _thinking(front, budget, is_open))


def reasoning_marks(front: FrontModel, message_spec: MessageSpec) -> ThinkingData | None:
    """Return how the reasoning of a message is told from the rest by its tokens.

    None if there is none, or if its end is no token of its own: spelled out it may be in any pieces.
    """
    if not (message_spec.can_reason or message_spec.reasoning_open) or front.message_format.thinking_texts is None:
        return None
    marks = _thinking(front, INT64_MAX, message_spec.reasoning_open)
    return marks if len(marks.end_ids) == 1 else None


def _thinking(front: FrontModel, budget: int, is_open: bool) -> ThinkingData:
    fmt, tokenizer = front.message_format, front.tokenizer
    texts = fmt.thinking_texts
    if tokenizer is None or texts is None:
        raise UnsupportedError(
            "thinking_token_budget needs a model whose reasoning is marked, and this one's chat template marks none; "
            "--reasoning-parser names the marks",
            param="thinking_token_budget",
        )
    start, end = (tokenizer.encode(text, add_special_tokens=False) for text in texts)
    return ThinkingData(start, end, budget, open=is_open)

"""Prompts and parameters as callers give them, and how they are told apart.

What they must satisfy to be served by a model is checked in `input_processor.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from quire.checks import wrong_type, wrong_value
from quire.errors import RequestError
from quire.frontend.formats.message import MessageSpec
from quire.pooling_params import PoolingParams
from quire.sampling_params import SamplingParams


class TextPrompt(TypedDict):
    """A text."""

    prompt: str


class TokensPrompt(TypedDict):
    """Token ids."""

    prompt_token_ids: list[int]


Prompt = str | list[int] | Mapping[str, Any]
Params = SamplingParams | PoolingParams


class TokensOfText(list[int]):
    """Token ids that the tokenizer has made of a text or a conversation: errors name that, not one of the ids."""


@dataclass(frozen=True, slots=True)
class RequestInput:
    """A prompt with its parameters.

    Attributes:
        param: what errors call the prompt.
        message_spec: what the message that follows the prompt may contain; None if it is no message.
    """

    prompt: Prompt
    params: Params
    param: str = "prompt"
    message_spec: MessageSpec | None = None


PROMPT_KINDS = "a text, a list of token ids, {'prompt': text} or {'prompt_token_ids': ids}"


def as_prompts(prompts: Any) -> list[Prompt]:
    """Tell one prompt from a list of prompts: a list of ints is one prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        shown = type(prompts).__name__
        message = f"prompts must be a prompt or a list of prompts, got {shown}"
        raise RequestError(message, param="prompts", code="invalid_type")
    if prompts and all(isinstance(item, int) for item in prompts):
        return [list(prompts)]
    return list(prompts)


def one_each(value: Any, count: int, name: str, kind: type | None = None) -> list[Any]:
    """Repeat a single value, or check that a list has one for each prompt; and that each is of this kind."""
    items = list(value) if isinstance(value, list | tuple) else [value] * count
    if len(items) != count:
        raise RequestError(f"{name} has {len(items)} items for {count} prompts", param=name)
    for item in items:
        if kind is not None and not isinstance(item, kind):
            message = f"{name} must be {kind.__name__}, got {type(item).__name__}"
            raise RequestError(message, param=name, code="invalid_type")
    return items


def request_inputs(prompts: Sequence[Prompt], params: Sequence[Params]) -> list[RequestInput]:
    """Return prompts with their parameters, named by their place if there are several."""
    names = ["prompt"] if len(prompts) == 1 else [f"prompts[{index}]" for index in range(len(prompts))]
    return [RequestInput(*item) for item in zip(prompts, params, names, strict=True)]


def split_prompt(prompt: Prompt, param: str = "prompt") -> tuple[str | Sequence[int], str]:
    """Return the text or ids of a prompt of any kind, and the name that errors should give it."""
    if isinstance(prompt, Mapping):
        keys = [key for key in ("prompt_token_ids", "prompt") if prompt.get(key) is not None]
        if not keys or set(prompt) - {"prompt_token_ids", "prompt"}:
            raise wrong_value(param, f"{PROMPT_KINDS}", dict(prompt))
        prompt, param = prompt[keys[0]], keys[0]
    if isinstance(prompt, str) or (isinstance(prompt, list | tuple) and not isinstance(prompt, str)):
        return prompt, param
    raise wrong_type(param, f"{PROMPT_KINDS}", prompt)


def prompt_text(prompt: Prompt) -> str | None:
    """Return the text of a prompt, or None if it came as token ids."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt")  # type: ignore[assignment]
    return prompt if isinstance(prompt, str) else None


def text_size(value: Any, enough: float = math.inf) -> int:
    """Return the number of characters in all texts of a JSON-like value, with some for each container and item.

    What is beyond `enough` need not be counted.
    """
    total = 0
    left = [value]
    while left and total <= enough:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            total += 16 * (1 + len(item))
            left.extend(item.values())
        elif isinstance(item, list | tuple):
            total += 16 + 2 * len(item)
            left.extend(item)
    return total

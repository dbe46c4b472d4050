"""Prompts of `quire generate`: read from text or JSON lines, and results as JSON lines. No engine in sight."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from quire.errors import QuireError, RequestError, echo
from quire.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.sampling_params import SamplingParams

PROMPT_KEYS = ("prompt", "messages", "prompt_token_ids")
LINE_KEYS = (*PROMPT_KEYS, "id", "sampling_params")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One prompt of the input.

    Attributes:
        index: counted from 0. source: the fields repeated in the result (what was asked, and the caller's id).
        key: which of `PROMPT_KEYS` it has. value: its text, messages or token ids.
        params: sampling fields of this line alone.
    """

    index: int
    source: dict[str, Any]
    key: str
    value: Any
    params: dict[str, Any]


def read_prompts(lines: Iterable[str], name: str) -> list[PromptLine]:
    """Read one prompt per line; blank lines are skipped.

    If the first line is a JSON object with one of `PROMPT_KEYS`, all lines must be; otherwise each line is a prompt as
    it stands.

    Raises:
        RequestError: names `name`, the line, and what is wrong with it.
    """
    prompts: list[PromptLine] = []
    as_json: bool | None = None
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        if as_json is None:
            as_json = name.endswith(".jsonl") or _looks_like_json(text)
        if as_json:
            prompts.append(_json_prompt(text, len(prompts), f"{name}: line {number}"))
        else:
            prompts.append(PromptLine(index=len(prompts), source={"prompt": text}, key="prompt", value=text, params={}))
    if not prompts:
        raise RequestError(f"{name}: there is no prompt in it", param="prompt")
    return prompts


def _looks_like_json(text: str) -> bool:
    if not text.lstrip().startswith("{"):
        return False
    try:
        loaded = json.loads(text)
    except ValueError:
        return False
    return any(key in loaded for key in PROMPT_KEYS)


def _json_prompt(text: str, index: int, where: str) -> PromptLine:
    try:
        item = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(item, dict):
        raise RequestError(f"{where}: must be a JSON object, got {echo(item)}")
    for key in item:
        if key not in LINE_KEYS:
            raise RequestError(f"{where}: unknown field {echo(key)}; known are {', '.join(LINE_KEYS)}", param=key)
    given = [key for key in PROMPT_KEYS if key in item]
    if len(given) != 1:
        raise RequestError(f"{where}: must have exactly one of {', '.join(PROMPT_KEYS)}", param="prompt")
    key = given[0]
    if not isinstance(item[key], str if key == "prompt" else list):
        kind = "a string" if key == "prompt" else "a list"
        raise RequestError(f"{where}: {key} must be {kind}, got {echo(item[key])}", param=key)
    params = item.get("sampling_params", {})
    if not isinstance(params, dict):
        raise RequestError(f"{where}: sampling_params must be an object, got {echo(params)}", param="sampling_params")
    for name in params:
        if name not in SamplingParams.__struct_fields__:
            raise RequestError(f"{where}: unknown sampling field {echo(name)}", param=name)
    source = {name: value for name, value in item.items() if name != "sampling_params"}
    return PromptLine(index=index, source=source, key=key, value=item[key], params=params)


def result_line(prompt: PromptLine, output: RequestOutput) -> str:
    """Return the result of one prompt as a line of JSON."""
    usage = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": output.num_generated_tokens,
        "cached_tokens": output.num_cached_tokens,
    }
    result: dict[str, Any] = {"index": prompt.index, **prompt.source}
    result["outputs"] = [_completion(item) for item in output.outputs]
    if output.prompt_logprobs is not None:
        result["prompt_token_ids"] = output.prompt_token_ids
        result["prompt_logprobs"] = [position and _logprobs(position) for position in output.prompt_logprobs]
    return _json_line(result | {"usage": usage})


def error_line(prompt: PromptLine, error: QuireError) -> str:
    """Return the failure of one prompt as a line of JSON."""
    details = {"message": error.message, "param": error.param, "code": error.code}
    return _json_line({"index": prompt.index, **prompt.source, "error": details})


def _json_line(value: dict[str, Any]) -> str:
    """Return `value` as readable JSON; escaped where it repeats what is no Unicode text (half a surrogate pair)."""
    line = json.dumps(value, ensure_ascii=False)
    try:
        line.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return line


def _completion(item: CompletionOutput) -> dict[str, Any]:
    result: dict[str, Any] = {"text": item.text, "finish_reason": item.finish_reason}
    if item.stop_reason is not None:
        result["stop_reason"] = item.stop_reason
    if item.logprobs is not None:
        result["token_ids"] = item.token_ids
        result["logprobs"] = [_logprobs(position) for position in item.logprobs]
    return result


def _logprobs(position: TokenLogprobs) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "token": entry.decoded_token, "logprob": entry.logprob, "rank": entry.rank}
        for token, entry in position.items()
    ]

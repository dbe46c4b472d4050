"""`quire generate`: completes one prompt to the terminal as it comes, or many to JSON lines in the order of the input.

Everything goes through one `AsyncLLM` with its engine in this process, so that many prompts share steps and the first
result is written while others still run. A prompt that cannot be served becomes a line with an error; the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from quire import logs
from quire.cli.flags import Command, flags_of
from quire.cli.offline import (
    OFFLINE_GROUPS,
    READY_PER_RUNNING,
    LogOptions,
    engine_config,
    options_from,
    sampling_flags,
    sampling_values,
    started_llm,
    utf8_stdin,
    with_long_queues,
)
from quire.cli.output import open_output, progress_bar
from quire.config import EngineConfig
from quire.errors import ConfigError, GenerationError, OverloadedError, QuireError, RequestError, echo
from quire.options import option
from quire.ordered import in_order
from quire.outputs import CompletionOutput, RequestOutput, TokenLogprobs
from quire.sampling_params import (
    MAX_N,
    OPTIONS,
    RequestOutputKind,
    SamplingParams,
    with_recommended,
)

if TYPE_CHECKING:
    from quire.frontend.async_llm import AsyncLLM


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A line of JSON; exactly one of the first three fields must be there."""

    prompt: str | msgspec.UnsetType = msgspec.UNSET
    messages: list[Any] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[Any] | msgspec.UnsetType = msgspec.UNSET
    id: Any = None
    sampling_params: dict[str, Any] = {}


PROMPT_KEYS = _Line.__struct_fields__[:3]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """One prompt of the input.

    Attributes:
        index: counted from 0. source: the fields repeated in the result (the prompt, and the caller's id).
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
        line = msgspec.convert(item, _Line)
    except (ValueError, msgspec.MsgspecError) as error:
        raise RequestError(f"{where}: {error}") from None
    given = [key for key in PROMPT_KEYS if key in item]
    if len(given) != 1:
        raise RequestError(f"{where}: must have exactly one of {', '.join(PROMPT_KEYS)}", param="prompt")
    for name in line.sampling_params:
        if name not in SamplingParams.__struct_fields__:
            raise RequestError(f"{where}: unknown sampling field {echo(name)}", param=name)
    source = {name: value for name, value in item.items() if name != "sampling_params"}
    return PromptLine(index=index, source=source, key=given[0], value=item[given[0]], params=line.sampling_params)


def result_line(prompt: PromptLine, output: RequestOutput) -> bytes:
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


def error_line(prompt: PromptLine, error: QuireError) -> bytes:
    """Return the failure of one prompt as a line of JSON."""
    details = {"message": error.message, "param": error.param, "code": error.code}
    return _json_line({"index": prompt.index, **prompt.source, "error": details})


def _json_line(value: dict[str, Any]) -> bytes:
    """Return `value` as readable JSON; escaped if it repeats text that is not Unicode (half a surrogate pair)."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return json.dumps(value).encode()


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


MAX_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateOptions:
    """Input and output"""

    prompt: str | None = option(None, "One prompt; its completion streams to standard output as plain text.")
    input: str | None = option(
        None, "File of prompts, one per line, or JSON lines; default: standard input.", metavar="FILE"
    )
    output: str | None = option(None, "File for results, as JSON lines; default: standard output.", metavar="FILE")


FLAGS = [
    *flags_of((GenerateOptions,)),
    *sampling_flags(defaults={"max_tokens": MAX_TOKENS}),
    *flags_of(OFFLINE_GROUPS),
]


def run(values: dict[str, Any]) -> int:
    """Generate; return 0, or 1 if any prompt failed."""
    config = engine_config(values)
    options: GenerateOptions = options_from(GenerateOptions, values)
    sampling = sampling_values(values)
    flags = SamplingFlags(sampling)
    flags.params({})  # raises for contradictions before a model is loaded
    logs.setup(options_from(LogOptions, values).log_level)
    if options.prompt is not None and options.input is not None:
        raise ConfigError("prompt contradicts input; give one of them", param="prompt")
    if options.prompt is not None and options.output is None and not _needs_lines(sampling):
        return asyncio.run(_stream(config, options.prompt, flags))
    prompts = _prompts(options)
    with open_output(options.output) as output:
        failed = asyncio.run(_batch(config, prompts, flags, output))
    if failed:
        print(f"error: {failed} of {len(prompts)} prompts failed; their lines say why", file=sys.stderr)
    return 1 if failed else 0


def _needs_lines(sampling: dict[str, Any]) -> bool:
    """Whether the result is more than one text."""
    scored = any(OPTIONS[name].affects in ("logprobs", "prompt_logprobs") for name in sampling)
    return scored or sampling.get("n", 1) > 1


def _prompts(options: GenerateOptions) -> list[PromptLine]:
    if options.prompt is not None:
        return [PromptLine(index=0, source={"prompt": options.prompt}, key="prompt", value=options.prompt, params={})]
    if options.input is None:
        if sys.stdin.isatty():
            raise ConfigError("there is nothing to complete: give --prompt TEXT, --input FILE, or lines on stdin")
        with utf8_stdin() as lines:
            return read_prompts(lines, "standard input")
    try:
        with open(options.input, encoding="utf-8") as lines:
            return read_prompts(lines, options.input)
    except OSError as error:
        raise ConfigError(f"input: cannot read {options.input!r}: {error.strerror}", param="input") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"input: {options.input!r} is not UTF-8 text: {error}", param="input") from None


class SamplingFlags:
    """The sampling options on the command line, and requests made with them."""

    def __init__(self, sampling: dict[str, Any]) -> None:
        self._sampling = sampling

    @property
    def num_sequences(self) -> int:
        """Sequences of a prompt without sampling options of its own."""
        return int(self._sampling.get("best_of", self._sampling.get("n", 1)))

    def params(
        self, recommended: dict[str, Any], own: dict[str, Any] | None = None, *, stream: bool = False
    ) -> SamplingParams:
        """Return the model's recommended values, overridden by the command line's, and these by the prompt's `own`."""
        given = {**self._sampling, **(own or {})}
        n = given.get("n", 1)
        whole = given.get("best_of", n) != n or given.get("use_beam_search", False)
        kind = RequestOutputKind.DELTA if stream and not whole else RequestOutputKind.FINAL_ONLY
        values = with_recommended(recommended, given)
        return SamplingParams(**{"max_tokens": MAX_TOKENS, **values, "output_kind": kind})

    async def complete(self, llm: AsyncLLM, line: PromptLine) -> RequestOutput:
        """Return the whole completion of a prompt. Raises the error of the request."""
        params = self.params(llm.front_model.sampling_defaults, line.params)
        prompt = await llm.chat_prompt(line.value) if line.key == "messages" else line.value
        async with contextlib.aclosing(await llm.submit(prompt, params)) as stream:
            async for output in stream:
                final = output
        for completion in final.outputs:
            if completion.error is not None:
                raise completion.error
        return final


async def _stream(config: EngineConfig, prompt: str, flags: SamplingFlags) -> int:
    """Write the completion of one prompt to standard output while it is generated."""
    async with started_llm(config) as llm:
        params = flags.params(llm.front_model.sampling_defaults, stream=True)
        async with contextlib.aclosing(await llm.submit(prompt, params)) as stream:
            async for output in stream:
                sys.stdout.write(output.outputs[0].text)
                sys.stdout.flush()
                if output.outputs[0].error is not None:
                    raise output.outputs[0].error
    print()
    return 0


async def _batch(
    config: EngineConfig, prompts: list[PromptLine], flags: SamplingFlags, write: Callable[[bytes], None]
) -> int:
    """Complete all prompts, write their results in order, and return how many failed."""
    failed = 0
    concurrency = _prompts_at_once(config, flags.num_sequences)
    async with started_llm(with_long_queues(config, concurrency * MAX_N)) as llm:
        with progress_bar("prompts", len(prompts)) as on_done:

            async def complete(prompt: PromptLine) -> tuple[bool, bytes]:
                try:
                    return True, result_line(prompt, await flags.complete(llm, prompt))
                except (RequestError, GenerationError, OverloadedError) as error:
                    return False, error_line(prompt, error)
                finally:
                    on_done()

            async with contextlib.aclosing(in_order(complete, prompts, concurrency)) as results:
                async for succeeded, line in results:
                    failed += not succeeded
                    write(line)
    return failed


def _prompts_at_once(config: EngineConfig, num_sequences: int) -> int:
    most = READY_PER_RUNNING * config.scheduler.max_num_seqs
    if config.scheduler.max_num_queued_reqs is not None:
        most = min(most, config.scheduler.max_num_queued_reqs)
    return max(1, most // num_sequences)


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description='Complete prompts. A line of input is a prompt, or JSON with "prompt", "messages" or '
    '"prompt_token_ids" (and optionally "id" and "sampling_params").',
    short={"prompt": "-p", "input": "-i", "output": "-o"},
)

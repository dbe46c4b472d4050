"""`SamplingParams` and `BeamSearchParams`: the sampling options of one request, each declared once with check and help.

Names and defaults are those of the common OpenAI and vLLM interfaces. The server's fields and the flags of the command
line follow these declarations and report whatever they raise; nothing here knows about HTTP, tokenizers, or models
(token ids are checked against the vocabulary in `frontend.input_processor`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from typing import Annotated, Any, TypeVar, get_args, get_type_hints

import msgspec

from quire.checks import (
    FLOAT64_MAX,
    INT64_MAX,
    MAX_TEXT_LENGTH,
    check_bool,
    check_float,
    check_int,
    check_list,
    check_sendable,
    check_strings,
    check_unicode,
    wrong_type,
    wrong_value,
)
from quire.errors import RequestError, UnsupportedError, echo
from quire.structured_outputs import StructuredOutputParams

logger = logging.getLogger(__name__)

MAX_N = 16384
MAX_BEAM_WIDTH = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 128
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_ALLOWED_TOKEN_IDS = 2**20
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_REPETITION_PENALTY = 10.0
GREEDY_EPSILON = 1e-5
MAX_TEMPERATURE = 1e30  # above it the inverse has no normal float32; all tokens are equally likely long before
MIN_TEMPERATURE = 0.01  # below it logits of ordinary size overflow; less means greedy or is raised to it
MAX_SEQUENCE_BREAKERS = 16
MAX_BREAKER_LENGTH = 40
MAX_PATTERN_SIZE = 1024  # a step looks at each size
MAX_PATTERN_COUNT = 2**20
MAX_PROCESSORS = 16
MAX_NAME_LENGTH = 256
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_LENGTH_PENALTY = 10.0
# Mirostat chooses how many tokens stay; nothing else may.
MIROSTAT_REPLACES = ("top_k", "top_p", "min_p", "typical_p", "top_n_sigma", "xtc_probability")
OTHER_DEFAULTS = {"top_k": -1}  # values that mean the same as the default
# What has no meaning when the likeliest token is always taken.
NOT_GREEDY = ("mirostat", "dynatemp_range")
OLLAMA = ("ollama",)
HF_OLLAMA = ("hf", "ollama")

StructuredOutputsParams = GuidedDecodingParams = StructuredOutputParams  # vLLM's names, the newer and the older

_S = TypeVar("_S", bound=msgspec.Struct)
Check = Callable[[str, Any], Any]


class RequestOutputKind(IntEnum):
    """What each streamed `RequestOutput` carries: everything so far, only what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(frozen=True, slots=True)
class Option:
    """The declaration of one field, as its annotation.

    Attributes:
        check: takes name and value, not None; returns the value, or raises `RequestError`.
        help: one line for the command line; a field without it has no flag.
        needs: a value other than the default means nothing unless one of these fields is set.
        refused: exists elsewhere, but cannot be honoured, for this reason.
        names: other interfaces that know the field, each as "interface", or "interface.name" where it has another name.
        affects: what of a result it changes: the "text", the "number" of texts, their "logprobs", the "prompt", or
            the "prompt_logprobs".
        frontend: the frontend alone acts on it; the engine gets the default.
        token_ids: the value has token ids, which must be in the vocabulary.
        tokenizer: a value other than the default needs a tokenizer.
        optional: whether None is a value (by the field's type).
    """

    check: Check | None = None
    help: str = ""
    needs: tuple[str, ...] = ()
    refused: str = ""
    names: tuple[str, ...] = ()
    affects: str = "text"
    frontend: bool = False
    token_ids: bool = False
    tokenizer: bool = False
    optional: bool = False


def _number(low: float, high: float, *, low_open: bool = False) -> Check:
    return partial(check_float, low=low, high=high, low_open=low_open)


def _integer(low: int, high: int = INT64_MAX) -> Check:
    return partial(check_int, low=low, high=high)


def _integer_or_unset(low: int) -> Check:
    """An integer of which -1 means None."""
    return lambda name, value: None if check_int(name, value, low, INT64_MAX) == -1 else value


def _check_truncation(name: str, value: Any) -> int:
    return value if value == -1 and type(value) is int else check_int(name, value, 1, INT64_MAX)


def _check_n(name: str, value: Any) -> int:
    if isinstance(value, float):  # the first argument, where a temperature is expected by many
        raise RequestError(
            f"n must be an integer, got {value:g}; for a temperature write temperature={value:g}",
            param=name,
            code="invalid_type",
        )
    return check_int(name, value, 1, MAX_N)


def _strings(most: int, longest: int = MAX_TEXT_LENGTH) -> Check:
    return partial(check_strings, most=most, longest=longest)


def _token_ids(most: int, *, least: int = 0) -> Check:
    def check(name: str, value: Any) -> list[int]:
        if least and value in ([], ()):
            raise RequestError(f"{name} must not be empty", param=name, code="empty_array")
        return [_check_token_id(f"{name}[{i}]", item) for i, item in enumerate(check_list(name, value, most))]

    return check


def _check_token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise wrong_type(name, "a token id", value)
    if value < 0:
        raise wrong_value(name, "a token id >= 0", value)
    return value


def _check_logit_bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(f"{name} must map token ids to numbers, got {echo(value)}", param=name, code="invalid_type")
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"{name} may have at most {MAX_LOGIT_BIAS} entries, got {len(value)}",
            param=name,
            code="array_above_max_length",
        )
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19 else key
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"{name} has key {echo(key)}; keys must be token ids >= 0", param=name)
        checked[token] = check_float(name, bias, -100.0, 100.0)
    return checked


def _check_logprobs(name: str, value: Any) -> int:
    return check_int(name, 1 if value is True else value, -1, INT64_MAX)


def _check_top_n_sigma(name: str, value: Any) -> float:
    sigma = check_float(name, value, -1.0, 1000.0)
    if sigma < 0.0 and sigma != -1.0:
        raise RequestError(
            f"{name} must be -1 or at least 0, got {sigma:g}", param=name, code="decimal_below_min_value"
        )
    return max(sigma, 0.0)


def _check_object(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_type(name, "an object", value)
    _check_arguments(value, name)
    return value


def _check_arguments(arguments: dict[Any, Any], name: str) -> None:
    """Raise `RequestError` for arguments of logits processors that an engine process could not read."""
    for key in arguments:
        if not isinstance(key, str):
            raise RequestError(f"{name} has key {echo(key)}; keys must be texts", param=name, code="invalid_type")
    check_sendable(arguments, name)


def _check_early_stopping(name: str, value: Any) -> bool | str:
    value = {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value  # a command line's
    if not isinstance(value, bool) and value != "never":
        raise wrong_value(name, "true, false or 'never'", value)
    return value


class RepetitionDetectionParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """End an output that repeats itself. Raises `RequestError` naming the field.

    The output ends as soon as its last `min_count` (at least 2) times s tokens are one pattern of s tokens over and
    over, for any s from `min_pattern_size` to `max_pattern_size`.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        name = "repetition_detection"
        check_int(f"{name}.max_pattern_size", self.max_pattern_size, 1, MAX_PATTERN_SIZE)
        check_int(f"{name}.min_pattern_size", self.min_pattern_size, 1, self.max_pattern_size)
        check_int(f"{name}.min_count", self.min_count, 2, MAX_PATTERN_COUNT)


class LogitsProcessorParams(msgspec.Struct, omit_defaults=True):
    """One logits processor of a request: the name it is registered under, and its arguments."""

    name: str
    args: dict[str, Any] = {}

    def __post_init__(self) -> None:
        """Check both fields. Structs decoded from the wire pass through here too."""
        if not isinstance(self.name, str) or not 0 < len(self.name) <= MAX_NAME_LENGTH:
            raise RequestError(
                f"logits_processors: a name must be a text of 1 to {MAX_NAME_LENGTH} characters, got {echo(self.name)}",
                param="logits_processors",
                code="invalid_type",
            )
        if not isinstance(self.args, dict):
            raise RequestError(
                f"logits_processors: args of {self.name} must be an object, got {echo(self.args)}",
                param="logits_processors",
                code="invalid_type",
            )
        check_unicode(self.name, "logits_processors")
        _check_arguments(self.args, "logits_processors")


def as_struct(name: str, value: Any, kind: type[_S]) -> _S:
    """Return `value`, a struct of this kind or a mapping of its fields, as a struct; raise `RequestError` else."""
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise wrong_type(name, "an object", value)
    unknown = [key for key in value if key not in kind.__struct_fields__]
    if unknown:
        raise RequestError(f"unknown parameter {name}.{echo(unknown[0])[1:-1]}", param=name, code="unknown_parameter")
    for field in msgspec.structs.fields(kind):
        if field.required and field.name not in value:
            raise RequestError(f"{name}.{field.name} is missing", param=name, code="missing_required_parameter")
    return kind(**value)


def _check_processors(name: str, value: Any) -> list[LogitsProcessorParams] | None:
    """Return names, or objects of name and args, as structs; raise `RequestError` else."""
    items = check_list(name, value, MAX_PROCESSORS)
    return [
        LogitsProcessorParams(item) if isinstance(item, str) else as_struct(f"{name}[{i}]", item, LogitsProcessorParams)
        for i, item in enumerate(items)
    ] or None


_check_repetition = partial(as_struct, kind=RepetitionDetectionParams)
check_structured_outputs = partial(as_struct, kind=StructuredOutputParams)


class SamplingParams(msgspec.Struct, omit_defaults=True):
    """Sampling options of one request. Raises `RequestError` naming the field, the value, and what is allowed.

    The fields from `n` to `prompt_logprobs` may be given by position, in vLLM's order.

    Attributes:
        best_of: number of completions to generate, n..16384, of which the `n` with the highest sum of log-probabilities
            are returned, best first. None means n. More than n are not streamed, and need a temperature.
        presence_penalty, frequency_penalty: over generated tokens.
        repetition_penalty: over prompt and generated tokens; 1 is off (CTRL, Keskar et al. 2019, sec. 4.1).
        temperature: below 1e-5 means greedy, where top_p, top_k and min_p change nothing and are reset; what is between
            that and 0.01 is raised to 0.01, with a warning.
        top_p: nucleus sampling (Holtzman et al. 2019). top_k: 0 or -1 means all tokens.
        seed: makes sampling reproducible whatever else is in the batch; None or -1 draws one.
        max_tokens: None means as many as fit in the context.
        logprobs, prompt_logprobs: number of alternatives per position, at most the model option `max_logprobs`; -1:
            the whole vocabulary; True: 1; None: no log-probabilities at all.
        logprob_token_ids: ids whose log-probabilities are given at each position, in place of the likeliest; `logprobs`
            is then absent or their number.
        flat_logprobs: log-probabilities come as `outputs.FlatLogprobs`, which has few objects for many numbers.
        structured_outputs: constrains the text; with reasoning, what comes after it. guided_decoding: its former name.
        thinking_token_budget: most tokens of reasoning; then it is ended. None or -1: no bound.
        stream_interval: tokens of a completion between two outputs of a stream; the first and the last always come.
        skip_reading_prefix_cache: compute the whole prompt. skip_clone: the caller will not change this object, so that
            no copy is made.
        repetition_detection: ends an output that repeats itself, with finish_reason "repetition".
        logits_processors: names (or names and arguments) of plug-ins of the model option `logits_processors`;
            extra_args: arguments for all of them.
        typical_p, top_n_sigma, xtc_*, dry_*, dynatemp_*, mirostat*: the samplers of llama.cpp, see `sampling.penalties`
            and `sampling.truncation`; all off by default. dry_sequence_breakers: None means newline, colon, double
            quote, and asterisk.
    """

    n: Annotated[
        int,
        Option(
            _check_n,
            "Number of completions per prompt; with beam search, of beams.",
            affects="number",
            frontend=True,
        ),
    ] = 1
    presence_penalty: Annotated[
        float, Option(_number(-2.0, 2.0), "Subtracted from the logits of tokens generated before.", names=OLLAMA)
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Option(
            _number(-2.0, 2.0),
            "Subtracted from the logits of tokens generated before, once per occurrence.",
            names=OLLAMA,
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Option(
            _number(0.0, MAX_REPETITION_PENALTY, low_open=True),
            "Divides the logits of tokens in prompt and output; 1 is off.",
            names=("hf.repetition_penalty", "ollama.repeat_penalty"),
        ),
    ] = 1.0
    temperature: Annotated[
        float,
        Option(
            _number(0.0, FLOAT64_MAX),
            "Sampling temperature; 0 is greedy decoding, higher values are more random.",
            names=HF_OLLAMA,
        ),
    ] = 1.0
    top_p: Annotated[
        float,
        Option(
            _number(0.0, 1.0, low_open=True),
            "Sample from the smallest set of tokens with this total probability.",
            names=HF_OLLAMA,
        ),
    ] = 1.0
    top_k: Annotated[
        int, Option(_integer(-1), "Sample from this number of most likely tokens; 0: all.", names=HF_OLLAMA)
    ] = 0
    min_p: Annotated[
        float,
        Option(
            _number(0.0, 1.0),
            "Exclude tokens less likely than this fraction of the most likely token.",
            names=HF_OLLAMA,
        ),
    ] = 0.0
    seed: Annotated[
        int | None,
        Option(
            _integer_or_unset(-(2**63)),
            "Seed that makes sampling reproducible in any batch; default: that of --seed, if given.",
            names=OLLAMA,
        ),
    ] = None
    stop: Annotated[
        list[str] | str | None,
        Option(
            _strings(MAX_STOP_STRINGS, MAX_STOP_LENGTH),
            "Text that ends the output; may be repeated.",
            names=OLLAMA,
            tokenizer=True,
        ),
    ] = None
    stop_token_ids: Annotated[
        list[int] | None,
        Option(_token_ids(MAX_STOP_TOKEN_IDS), "Token id that ends the output; may be repeated.", token_ids=True),
    ] = None
    ignore_eos: Annotated[bool, Option(check_bool, "Continue after the end-of-sequence token.")] = False
    max_tokens: Annotated[
        int | None, Option(_integer(1), "Maximum number of tokens to generate.", names=("hf.max_new_tokens",))
    ] = 16
    min_tokens: Annotated[
        int, Option(_integer(0), "Minimum number of tokens before the end-of-sequence token is allowed.")
    ] = 0
    logprobs: Annotated[
        int | None,
        Option(
            _check_logprobs,
            "Return the log-probability of each token and of this number of alternatives.",
            affects="logprobs",
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None, Option(_check_logprobs, "The same for each token of the prompt.", affects="prompt_logprobs")
    ] = None
    best_of: Annotated[
        int | None,
        Option(
            _integer(1, MAX_N),
            "Number of completions to generate, of which the n most likely are returned.",
            affects="number",
            frontend=True,
        ),
    ] = None
    bad_words: Annotated[
        list[str] | None,
        Option(_strings(MAX_BAD_WORDS), "Text that may not be generated; may be repeated.", tokenizer=True),
    ] = None
    logit_bias: Annotated[
        dict[int, float] | None,
        Option(_check_logit_bias, "JSON object that maps token ids to numbers added to their logits."),
    ] = None
    allowed_token_ids: Annotated[
        list[int] | None,
        Option(
            _token_ids(MAX_ALLOWED_TOKEN_IDS, least=1),
            "Allowed token id; all others are excluded; may be repeated.",
            token_ids=True,
        ),
    ] = None
    truncate_prompt_tokens: Annotated[
        int | None,
        Option(
            _check_truncation,
            "Keep only this number of tokens at the end of the prompt; -1: as many as leave room for max_tokens.",
            affects="prompt",
        ),
    ] = None
    structured_outputs: Annotated[StructuredOutputParams | None, Option(check_structured_outputs, frontend=True)] = None
    guided_decoding: Annotated[StructuredOutputParams | None, Option(check_structured_outputs, frontend=True)] = None
    thinking_token_budget: Annotated[
        int | None, Option(_integer_or_unset(-1), "Maximum number of reasoning tokens.")
    ] = None
    detokenize: Annotated[bool, Option(check_bool)] = True
    skip_special_tokens: Annotated[bool, Option(check_bool, "Remove special tokens from the text.")] = True
    include_stop_str_in_output: Annotated[bool, Option(check_bool, "Keep the stop text at the end of the output.")] = (
        False
    )
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    spaces_between_special_tokens: Annotated[
        bool, Option(check_bool, "Keep the spaces that a tokenizer adds around special tokens.", needs=("detokenize",))
    ] = True
    stream_interval: Annotated[int | None, Option(_integer(1), frontend=True)] = None
    logprob_token_ids: Annotated[
        list[int] | None,
        Option(
            _token_ids(MAX_LOGPROB_TOKEN_IDS, least=1),
            "Return the log-probability of this token id at each position; may be repeated.",
            affects="logprobs",
            token_ids=True,
        ),
    ] = None
    prompt_logprob_token_ids: Annotated[
        list[list[int]] | None, Option(refused="prompt_logprobs scores the prompt's own tokens and the likeliest ones")
    ] = None
    prompt_logprob_start: Annotated[
        int | None,
        Option(
            _integer(0),
            "First prompt position whose log-probability is returned.",
            needs=("prompt_logprobs",),
            affects="prompt_logprobs",
        ),
    ] = None
    flat_logprobs: Annotated[
        bool,
        Option(
            check_bool, needs=("logprobs", "logprob_token_ids", "prompt_logprobs"), affects="logprobs", frontend=True
        ),
    ] = False
    skip_reading_prefix_cache: Annotated[bool, Option(check_bool)] = False
    skip_clone: Annotated[bool, Option(check_bool)] = False
    repetition_detection: Annotated[RepetitionDetectionParams | None, Option(_check_repetition)] = None
    logits_processors: Annotated[list[LogitsProcessorParams] | None, Option(_check_processors)] = None
    extra_args: Annotated[dict[str, Any] | None, Option(_check_object)] = None
    typical_p: Annotated[
        float,
        Option(
            _number(0.0, 1.0, low_open=True),
            "Locally typical sampling: the total probability of the tokens kept; 1 is off.",
            names=OLLAMA,
        ),
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        Option(
            _check_top_n_sigma,
            "Exclude tokens whose logit is this many standard deviations below the maximum; 0 is off.",
        ),
    ] = 0.0
    xtc_probability: Annotated[
        float, Option(_number(0.0, 1.0), "Probability of excluding the most likely tokens (XTC).")
    ] = 0.0
    xtc_threshold: Annotated[
        float,
        Option(
            _number(0.0, 1.0),
            "Minimum probability of tokens that XTC excludes; the least likely of them is kept.",
            needs=("xtc_probability",),
        ),
    ] = 0.1
    dry_multiplier: Annotated[
        float,
        Option(
            _number(0.0, 100.0), "Strength of the DRY penalty on tokens that would continue a repetition; 0 is off."
        ),
    ] = 0.0
    dry_base: Annotated[
        float,
        Option(
            _number(1.0, 100.0),
            "Base of the DRY penalty, by which it grows with each repeated token.",
            needs=("dry_multiplier",),
        ),
    ] = 1.75
    dry_allowed_length: Annotated[
        int, Option(_integer(1), "Minimum length of a repetition that DRY penalizes.", needs=("dry_multiplier",))
    ] = 2
    dry_penalty_last_n: Annotated[
        int, Option(_integer(-1), "Number of previous tokens that DRY scans; -1: all.", needs=("dry_multiplier",))
    ] = -1
    dry_sequence_breakers: Annotated[
        list[str] | None,
        Option(
            _strings(MAX_SEQUENCE_BREAKERS, MAX_BREAKER_LENGTH),
            "Text at which DRY stops matching a repetition; may be repeated.",
            needs=("dry_multiplier",),
        ),
    ] = None
    dynatemp_range: Annotated[
        float, Option(_number(0.0, 2.0), "Dynamic temperature: range around the temperature, by entropy; 0 is off.")
    ] = 0.0
    dynatemp_exponent: Annotated[
        float,
        Option(_number(0.0, 100.0), "Dynamic temperature: exponent applied to the entropy.", needs=("dynatemp_range",)),
    ] = 1.0
    mirostat: Annotated[
        int,
        Option(
            _integer(0, 2),
            "Version of mirostat, which keeps the surprise of the text constant, 1 or 2; 0 is off.",
            names=OLLAMA,
        ),
    ] = 0
    mirostat_tau: Annotated[
        float,
        Option(
            _number(0.0, 100.0, low_open=True),
            "Target surprise of mirostat, in bits.",
            needs=("mirostat",),
            names=OLLAMA,
        ),
    ] = 5.0
    mirostat_eta: Annotated[
        float, Option(_number(0.0, 1.0), "Learning rate of mirostat.", needs=("mirostat",), names=OLLAMA)
    ] = 0.1
    use_beam_search: Annotated[
        bool,
        Option(
            check_bool,
            "Use beam search: return the n most likely completions of best-of beams.",
            affects="number",
            frontend=True,
        ),
    ] = False
    length_penalty: Annotated[
        float,
        Option(
            _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY),
            "Beams are ranked by the sum of log-probabilities over length to this power.",
            needs=("use_beam_search",),
            affects="number",
            frontend=True,
        ),
    ] = 1.0
    early_stopping: Annotated[
        str | bool,
        Option(
            _check_early_stopping,
            "When enough beams have finished, stop at once (true), if no running beam looks better (false), or only "
            "if none can become better (never).",
            needs=("use_beam_search",),
            affects="number",
            frontend=True,
        ),
    ] = False
    watermarking: Annotated[Any, Option(refused="texts are not watermarked")] = None
    routed_experts_prompt_start: Annotated[int | None, Option(refused="the choice of experts is not reported")] = None
    trace_decode_token_ids: Annotated[list[int] | None, Option(refused="decoding is not traced")] = None

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        _check_fields(self, _CHECKS)
        self.stop, self.stop_token_ids = self.stop or [], self.stop_token_ids or []
        self.bad_words = self.bad_words or []
        if self.guided_decoding is not None:
            if self.structured_outputs not in (None, self.guided_decoding):
                message = "guided_decoding is another name of structured_outputs; give one of them"
                raise RequestError(message, param="guided_decoding")
            self.structured_outputs, self.guided_decoding = self.guided_decoding, None
        if self.use_beam_search:
            self._check_beams()
        if self.greedy:  # the likeliest token survives all three
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature > MAX_TEMPERATURE:
            self.temperature = MAX_TEMPERATURE
        elif self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature %g is raised to %g; 0 is greedy", self.temperature, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
        for name, reason in REFUSED.items():
            if getattr(self, name) != DEFAULTS[name]:
                raise UnsupportedError(f"{name} is not supported: {reason}; leave it out", param=name)
        for name, message in self._conflicts():
            raise RequestError(message, param=name)

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Yield each field that cannot be honoured together with the others, and why."""
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield "min_tokens", f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})"
        if self.stop and not self.detokenize:
            yield "stop", "stop strings need detokenize=True"
        if self.best_of is not None and check_int("best_of", self.best_of, 1, MAX_N) < self.n:
            yield "best_of", f"best_of must be at least n ({self.n}), got {self.best_of}"
        ranked = f"best_of must equal n ({self.n})"
        if self.num_sequences > self.n and self.greedy and not self.use_beam_search:
            yield "best_of", f"{ranked} with temperature 0, which gives equal completions; got {self.best_of}"
        if self.num_sequences > self.n and self.output_kind == RequestOutputKind.DELTA:
            yield "best_of", f"{ranked} in a stream, because the best are known at the end only; got {self.best_of}"
        for name, needs in NEEDS.items():
            if getattr(self, name) != DEFAULTS[name] and not any(self._is_set(other) for other in needs):
                yield name, f"{name} has no effect without {' or '.join(needs)}; leave it out, or set that as well"
        replaced = MIROSTAT_REPLACES if self.mirostat else ()
        yield from self._contradict(replaced, "mirostat, which decides itself how many tokens to choose from")
        why = f"temperature {self.temperature:g}, which always takes the likeliest token"
        yield from self._contradict(NOT_GREEDY if self.greedy else (), why)
        ids = self.logprob_token_ids
        if ids is not None and self.logprobs not in (None, len(ids)):
            expected = f"absent or {len(ids)}, the number of logprob_token_ids"
            yield "logprobs", f"logprobs must be {expected}, got {echo(self.logprobs)}"
        if self.stream_interval is not None and self.output_kind == RequestOutputKind.FINAL_ONLY:
            yield "stream_interval", "stream_interval needs a stream; this request has one output at its end"
        if self.stream_interval is not None and self.num_sequences > self.n:
            why = f"best_of ({self.best_of}) above n ({self.n}), whose completions are known at the end only"
            yield "stream_interval", f"stream_interval contradicts {why}"

    def _check_beams(self) -> None:
        """Raise for what a beam search cannot honour: beams follow the model's own probabilities, to their end."""
        if self.temperature not in (0.0, 1.0):
            message = f"temperature must be 0, 1 or absent with beam search, got {self.temperature:g}"
            raise UnsupportedError(message, param="temperature")
        if self.output_kind == RequestOutputKind.DELTA:
            raise UnsupportedError(
                "stream is not supported with beam search, which knows its beams at the end only", param="stream"
            )
        for name in SamplingParams.__struct_fields__:
            neutral: tuple[Any, ...] = ([], DEFAULTS[name], OTHER_DEFAULTS.get(name, DEFAULTS[name]))
            if name not in BEAM_FIELDS and getattr(self, name) not in neutral:
                raise UnsupportedError(f"{name} is not supported with beam search; leave it out", param=name)
        check_int("n" if self.best_of is None else "best_of", self.num_sequences, 1, MAX_BEAM_WIDTH)
        self.temperature, self.output_kind = 0.0, RequestOutputKind.FINAL_ONLY

    def _is_set(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and (bool(value) or name.endswith("logprobs"))  # 0 logprobs are some

    def _contradict(self, names: tuple[str, ...], why: str) -> Iterator[tuple[str, str]]:
        for name in names:
            if getattr(self, name) not in (DEFAULTS[name], OTHER_DEFAULTS.get(name, DEFAULTS[name])):
                yield name, f"{name} contradicts {why}; leave it out"

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def num_sequences(self) -> int:
        """How many completions are generated: `best_of`, or else `n`."""
        return self.n if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """Alternatives per output token: `logprobs`, or the number of `logprob_token_ids`; None without either."""
        ids = self.logprob_token_ids
        return self.logprobs if self.logprobs is not None or ids is None else len(ids)

    @property
    def returns_logprobs(self) -> bool:
        """Whether log-probabilities of output tokens are returned."""
        return self.num_logprobs is not None

    def beam_search_params(self) -> BeamSearchParams:
        """Return the search that `use_beam_search` means, less its grammar; `max_tokens` must not be None."""
        shared = DEFAULTS.keys() & set(BeamSearchParams.__struct_fields__) - {"structured_outputs"}
        return BeamSearchParams(beam_width=self.num_sequences, **{name: getattr(self, name) for name in shared})

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields replaced (and all of them checked again)."""
        return msgspec.structs.replace(self, **changes)


def _check_fields(params: msgspec.Struct, checks: Sequence[tuple[str, Check, bool]]) -> None:
    """Replace each field that has a check by what the check returns; None stands where the field may be None."""
    for name, check, optional in checks:
        value = getattr(params, name)
        if value is not None or not optional:
            setattr(params, name, check(name, value))


def with_recommended(recommended: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a request over those a model's makers recommend, less what the request replaces."""
    if given.get("use_beam_search"):
        return dict(given)
    replaced = MIROSTAT_REPLACES if given.get("mirostat") else ()
    return {**{name: value for name, value in recommended.items() if name not in replaced}, **given}


class BeamSearchParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Options of a beam search. Raises `RequestError` naming the field, the value, and what is allowed.

    Attributes:
        beam_width: beams kept at each step, and returned, 1..128. max_tokens: longest continuation.
        ignore_eos: go on after EOS. temperature: only 0: beams follow the model's own probabilities.
        length_penalty: beams are ranked by the sum of log-probabilities over length ** length_penalty.
        early_stopping: True ends the search with the first `beam_width` finished beams; False, when no running one can
            rank before them, judged by its present length; "never", judged by the longest possible one (those of
            `transformers`).
        include_stop_str_in_output, skip_special_tokens, truncate_prompt_tokens, structured_outputs: as for
            `SamplingParams`.
    """

    beam_width: Annotated[int, Option(_integer(1, MAX_BEAM_WIDTH))]
    max_tokens: Annotated[int, Option(_integer(1))] = 16
    ignore_eos: Annotated[bool, Option(check_bool)] = False
    temperature: Annotated[float, Option(_number(0.0, 0.0))] = 0.0
    length_penalty: Annotated[float, Option(_number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY))] = 1.0
    early_stopping: Annotated[bool | str, Option(_check_early_stopping)] = False
    include_stop_str_in_output: Annotated[bool, Option(check_bool)] = False
    skip_special_tokens: Annotated[bool, Option(check_bool)] = True
    truncate_prompt_tokens: Annotated[int | None, Option(_check_truncation)] = None
    structured_outputs: Annotated[StructuredOutputParams | None, Option(check_structured_outputs)] = None

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        _check_fields(self, _BEAM_CHECKS)

    def sampling_params(self) -> SamplingParams:
        """Return the parameters of a request for all beams of this search."""
        shared = DEFAULTS.keys() & set(self.__struct_fields__)
        options = {name: getattr(self, name) for name in shared}
        return SamplingParams(n=self.beam_width, use_beam_search=True, **options)

    def clone(self, **changes: Any) -> BeamSearchParams:
        """Return a copy with some fields replaced (and all of them checked again)."""
        return msgspec.structs.replace(self, **changes)


def _options_of(kind: type[msgspec.Struct]) -> dict[str, Option]:
    """Return the declarations of a struct's fields."""
    hints = get_type_hints(kind, include_extras=True)
    found = {}
    for name in kind.__struct_fields__:
        option = next((item for item in getattr(hints[name], "__metadata__", ()) if isinstance(item, Option)), Option())
        nullable = type(None) in get_args(get_args(hints[name])[0]) if option.check is not None else True
        found[name] = replace(option, optional=nullable)
    return found


def _checks_of(options: Mapping[str, Option]) -> list[tuple[str, Check, bool]]:
    return [(name, option.check, option.optional) for name, option in options.items() if option.check is not None]


def names_in(interface: str) -> dict[str, str]:
    """Return the names that "hf" (generation_config.json) or "ollama" have for sampling fields, with the fields."""
    names = ((name.partition("."), field) for field, option in OPTIONS.items() for name in option.names)
    return {name or field: field for (known_to, _, name), field in names if known_to == interface}


OPTIONS = _options_of(SamplingParams)
REFUSED = {name: option.refused for name, option in OPTIONS.items() if option.refused}
NEEDS = {name: option.needs for name, option in OPTIONS.items() if option.needs}
_CHECKS = _checks_of(OPTIONS)
_BEAM_CHECKS = _checks_of(_options_of(BeamSearchParams))
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}
# Fields that have a meaning with `use_beam_search`, or cannot change the result of a search.
BEAM_FIELDS = {
    *BeamSearchParams.__struct_fields__,
    *("use_beam_search", "n", "best_of", "seed", "output_kind"),
} & DEFAULTS.keys()
# Changes that take the frontend's own options, or the log-probabilities of the prompt, out of a request.
WITHOUT_FRONTEND = {name: DEFAULTS[name] for name, option in OPTIONS.items() if option.frontend}
WITHOUT_PROMPT_LOGPROBS = {
    name: DEFAULTS[name] for name, option in OPTIONS.items() if option.affects == "prompt_logprobs"
}

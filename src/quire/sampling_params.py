"""`SamplingParams` and `BeamSearchParams`: how one request wants its tokens chosen. Fields, defaults and bounds.

Names and defaults are those of the common OpenAI and vLLM interfaces. The HTTP layer maps its fields onto this class
and reports whatever it raises; nothing here knows about HTTP, tokenizers, or models (token ids are checked against the
vocabulary in `frontend.processor`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from quire.checks import INT64_MAX, check_bool, check_float, check_int, check_list, check_strings
from quire.errors import RequestError, UnsupportedError, echo
from quire.sampling_options import (
    LogitsProcessorParams,
    RepetitionDetectionParams,
    as_struct,
    check_processors,
)
from quire.sampling_rules import check_combinations
from quire.structured_outputs import StructuredOutputParams

logger = logging.getLogger(__name__)

MAX_N = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_STOP_STRINGS = 4
MAX_STOP_TOKEN_IDS = 128
MAX_BAD_WORDS = 128
MAX_LOGIT_BIAS = 1024
MAX_REPETITION_PENALTY = 10.0
GREEDY_EPSILON = 1e-5
LEAST_TEMPERATURE = 0.01  # below it logits of ordinary size overflow; less means greedy or is raised to it
MAX_SEQUENCE_BREAKERS = 16
MAX_BREAKER_LENGTH = 40
DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
MAX_LENGTH_PENALTY = 10.0
# What `BeamSearchParams.from_fields` takes over, and `seed`, which cannot change the result of a search.
BEAM_FIELDS = frozenset(
    (
        "n",
        "max_tokens",
        "temperature",
        "ignore_eos",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "truncate_prompt_tokens",
        "structured_outputs",
        "seed",
    )
)


class RequestOutputKind(IntEnum):
    """What each streamed `RequestOutput` carries: everything so far, only what is new, or one output at the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def _check_token_ids(name: str, value: Any, most: int) -> list[int]:
    return [_check_token_id(f"{name}[{i}]", item) for i, item in enumerate(check_list(name, value, most))]


def _check_token_id(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be a token id, got {echo(value)}", param=name, code="invalid_type")
    if value < 0:
        raise RequestError(f"{name} must be a token id >= 0, got {echo(value)}", param=name, code="invalid_value")
    return value


def _check_logit_bias(value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise RequestError(
            f"logit_bias must map token ids to numbers, got {echo(value)}", param="logit_bias", code="invalid_type"
        )
    if len(value) > MAX_LOGIT_BIAS:
        raise RequestError(
            f"logit_bias may have at most {MAX_LOGIT_BIAS} entries, got {len(value)}",
            param="logit_bias",
            code="array_above_max_length",
        )
    checked: dict[int, float] = {}
    for key, bias in value.items():
        token = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 19 else key
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise RequestError(f"logit_bias has key {echo(key)}; keys must be token ids >= 0", param="logit_bias")
        checked[token] = check_float("logit_bias", bias, -100.0, 100.0)
    return checked


def check_best_of(value: Any, n: int) -> int:
    """Return `best_of` if it is an int within [n, 128]; raise `RequestError` else."""
    if check_int("best_of", value, 1, MAX_N) < n:
        raise RequestError(f"best_of must be at least n ({n}), got {value}", param="best_of")
    return int(value)


def check_form(value: Any) -> StructuredOutputParams | None:
    """Return structured-output parameters, given as such or as a mapping; raise `RequestError` else."""
    return None if value is None else as_struct("structured_outputs", value, StructuredOutputParams)


class SamplingParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Sampling options of one request. Raises `RequestError` naming the field, the value, and what is allowed.

    Attributes:
        n: number of completions, 1..128.
        best_of: so many completions are generated, n..128, and the `n` with the highest sum of log-probabilities are
            returned, best first. None means n. More than n of them are not streamed, and need a temperature.
        presence_penalty, frequency_penalty: [-2, 2], over generated tokens.
        repetition_penalty: (0, 10], over prompt and generated tokens; 1 is off (CTRL, Keskar et al. 2019, sec. 4.1).
        temperature: [0, 2]; below 1e-5 means greedy, where top_p, top_k and min_p change nothing and are reset; what
            is between that and 0.01 is raised to 0.01, with a warning.
        top_p: (0, 1], nucleus sampling (Holtzman et al. 2019). top_k: 0 or -1 means all tokens. min_p: [0, 1].
        seed: makes sampling reproducible whatever else is in the batch; None or -1 draws one.
        stop: up to 4 strings that end the text; stop_token_ids: ids that end it.
        max_tokens: None means as many as fit in the context. min_tokens: EOS and stop ids are barred before.
        logprobs, prompt_logprobs: number of alternatives per position, at most the model option `max_logprobs`; -1:
            the whole vocabulary; True: 1; None: no log-probabilities at all.
        logprob_token_ids: up to 128 ids whose log-probabilities are given at each position, in place of the likeliest;
            `logprobs` is then absent or their number. prompt_logprob_start: first position of the prompt to score.
        flat_logprobs: log-probabilities come as `outputs.FlatLogprobs`, which has few objects for many numbers.
        logit_bias: token id -> value in [-100, 100] added to the logit. allowed_token_ids: nothing else may be
            sampled. bad_words: texts that may not be generated.
        truncate_prompt_tokens: keep only the last so many tokens of the prompt; None keeps all.
        structured_outputs: the form of the text; with reasoning, of what comes after it.
        thinking_token_budget: most tokens of reasoning; then it is ended. None or -1: no bound.
        spaces_between_special_tokens: False: special tokens in the text have no blanks beside them that the
            tokenizer's decoder would put there.
        stream_interval: a stream has an output every so many tokens of a completion; first and last always come.
        skip_reading_prefix_cache: compute the whole prompt. skip_clone: this object will not be changed by whoever
            gave it, and is used as it is.
        repetition_detection: ends an output that goes round in circles, with finish_reason "repetition".
        logits_processors: names (or names and arguments) of plug-ins of the model option `logits_processors`;
            extra_args: arguments for all of them.
        typical_p, top_n_sigma, xtc_*, dry_*, dynatemp_*, mirostat*: the samplers of llama.cpp, see `sampling.filters`,
            `sampling.dry` and `sampling.mirostat`; all off by default. dry_sequence_breakers: None means newline,
            colon, double quote, and asterisk.
        prompt_logprob_token_ids, watermarking, routed_experts_prompt_start, trace_decode_token_ids: are refused.

    Which fields exclude or need each other stands in `sampling_rules`.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputParams | None = None
    thinking_token_budget: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    spaces_between_special_tokens: bool = True
    stream_interval: int | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    skip_reading_prefix_cache: bool = False
    skip_clone: bool = False
    repetition_detection: RepetitionDetectionParams | None = None
    logits_processors: list[LogitsProcessorParams] | None = None
    extra_args: dict[str, Any] | None = None
    typical_p: float = 1.0
    top_n_sigma: float = 0.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: list[str] | None = None
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    watermarking: Any = None
    routed_experts_prompt_start: int | None = None
    trace_decode_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        self._check_numbers()
        self._check_samplers()
        self._check_counts()
        self._check_logprobs()
        self._check_lists()
        self._check_parts()
        for name in SWITCHES:
            check_bool(name, getattr(self, name))
        if self.stop and not self.detokenize:
            raise RequestError("stop strings need detokenize=True", param="stop")
        self._check_form()
        if self.best_of is not None:
            self._check_best_of(self.best_of)
        check_combinations(self, DEFAULTS)

    def _check_form(self) -> None:
        self.structured_outputs = check_form(self.structured_outputs)
        if self.thinking_token_budget is not None:
            check_int("thinking_token_budget", self.thinking_token_budget, -1, INT64_MAX)
            if self.thinking_token_budget == -1:
                self.thinking_token_budget = None

    def _check_best_of(self, best_of: int) -> None:
        check_best_of(best_of, self.n)
        if best_of == self.n:
            return
        if self.greedy:
            raise RequestError(
                f"best_of must equal n ({self.n}) with temperature 0, which gives equal completions; got {best_of}",
                param="best_of",
            )
        if self.output_kind == RequestOutputKind.DELTA:
            raise RequestError(
                f"best_of must equal n ({self.n}) in a stream, because the best are known at the end only; "
                f"got {best_of}",
                param="best_of",
            )

    def _check_numbers(self) -> None:
        self.presence_penalty = check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = check_float(
            "repetition_penalty", self.repetition_penalty, 0.0, MAX_REPETITION_PENALTY, low_open=True
        )
        self.temperature = check_float("temperature", self.temperature, 0.0, 2.0)
        self.top_p = check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        self.min_p = check_float("min_p", self.min_p, 0.0, 1.0)
        check_int("top_k", self.top_k, -1, INT64_MAX)
        if self.seed is not None:
            check_int("seed", self.seed, -(2**63), INT64_MAX)
            if self.seed == -1:
                self.seed = None
        if self.greedy:  # the likeliest token survives all three
            self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0
        elif self.temperature < LEAST_TEMPERATURE:
            logger.warning("temperature %g is raised to %g; 0 is greedy", self.temperature, LEAST_TEMPERATURE)
            self.temperature = LEAST_TEMPERATURE

    def _check_samplers(self) -> None:
        self.typical_p = check_float("typical_p", self.typical_p, 0.0, 1.0, low_open=True)
        self.top_n_sigma = check_float("top_n_sigma", self.top_n_sigma, -1.0, 1000.0)
        if self.top_n_sigma < 0.0:
            if self.top_n_sigma != -1.0:
                raise RequestError(
                    f"top_n_sigma must be -1 or at least 0, got {self.top_n_sigma:g}",
                    param="top_n_sigma",
                    code="decimal_below_min_value",
                )
            self.top_n_sigma = 0.0
        self.xtc_probability = check_float("xtc_probability", self.xtc_probability, 0.0, 1.0)
        self.xtc_threshold = check_float("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        self.dry_multiplier = check_float("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        self.dry_base = check_float("dry_base", self.dry_base, 1.0, 100.0)
        check_int("dry_allowed_length", self.dry_allowed_length, 1, INT64_MAX)
        check_int("dry_penalty_last_n", self.dry_penalty_last_n, -1, INT64_MAX)
        if self.dry_sequence_breakers is not None:
            self.dry_sequence_breakers = check_strings(
                "dry_sequence_breakers", self.dry_sequence_breakers, MAX_SEQUENCE_BREAKERS, MAX_BREAKER_LENGTH
            )
        self.dynatemp_range = check_float("dynatemp_range", self.dynatemp_range, 0.0, 2.0)
        self.dynatemp_exponent = check_float("dynatemp_exponent", self.dynatemp_exponent, 0.0, 100.0)
        check_int("mirostat", self.mirostat, 0, 2)
        self.mirostat_tau = check_float("mirostat_tau", self.mirostat_tau, 0.0, 100.0, low_open=True)
        self.mirostat_eta = check_float("mirostat_eta", self.mirostat_eta, 0.0, 1.0)

    def _check_counts(self) -> None:
        check_int("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            check_int("max_tokens", self.max_tokens, 1, INT64_MAX)
        check_int("min_tokens", self.min_tokens, 0, INT64_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("truncate_prompt_tokens", "stream_interval"):
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), 1, INT64_MAX)

    def _check_logprobs(self) -> None:
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                setattr(self, name, 1)
            if getattr(self, name) is not None:
                check_int(name, getattr(self, name), -1, INT64_MAX)
        if self.prompt_logprob_start is not None:
            check_int("prompt_logprob_start", self.prompt_logprob_start, 0, INT64_MAX)
        if self.logprob_token_ids is not None:
            name = "logprob_token_ids"
            self.logprob_token_ids = _check_token_ids(name, self.logprob_token_ids, MAX_LOGPROB_TOKEN_IDS)
            if not self.logprob_token_ids:
                raise RequestError(f"{name} must not be empty", param=name, code="empty_array")

    def _check_parts(self) -> None:
        if self.repetition_detection is not None:
            self.repetition_detection = as_struct(
                "repetition_detection", self.repetition_detection, RepetitionDetectionParams
            )
        if self.logits_processors is not None:
            self.logits_processors = check_processors(self.logits_processors) or None
        if self.extra_args is not None and not isinstance(self.extra_args, dict):
            raise RequestError(
                f"extra_args must be an object, got {echo(self.extra_args)}", param="extra_args", code="invalid_type"
            )

    def _check_lists(self) -> None:
        self.stop = [] if self.stop is None else check_strings("stop", self.stop, MAX_STOP_STRINGS)
        self.bad_words = [] if self.bad_words is None else check_strings("bad_words", self.bad_words, MAX_BAD_WORDS)
        if self.stop_token_ids is None:
            self.stop_token_ids = []
        else:
            self.stop_token_ids = _check_token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        if self.logit_bias is not None:
            self.logit_bias = _check_logit_bias(self.logit_bias)
        if self.allowed_token_ids is not None:
            if not isinstance(self.allowed_token_ids, list | tuple) or len(self.allowed_token_ids) == 0:
                code = "empty_array" if self.allowed_token_ids in ([], ()) else "invalid_type"
                raise RequestError(
                    "allowed_token_ids must be a non-empty list of token ids", param="allowed_token_ids", code=code
                )
            self.allowed_token_ids = _check_token_ids("allowed_token_ids", self.allowed_token_ids, 2**20)

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPSILON

    @property
    def num_sequences(self) -> int:
        """How many completions are generated: `best_of`, or else `n`."""
        return self.n if self.best_of is None else self.best_of

    def clone(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields replaced (and all of them checked again)."""
        return msgspec.structs.replace(self, **changes)


SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "spaces_between_special_tokens",
    "flat_logprobs",
    "skip_reading_prefix_cache",
    "skip_clone",
)
DEFAULTS = {field.name: field.default for field in msgspec.structs.fields(SamplingParams)}


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

    beam_width: int
    max_tokens: int = 16
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    structured_outputs: StructuredOutputParams | None = None

    def __post_init__(self) -> None:
        """Check every field. Structs decoded from the wire pass through here too."""
        check_int("beam_width", self.beam_width, 1, MAX_N)
        check_int("max_tokens", self.max_tokens, 1, INT64_MAX)
        self.temperature = check_float("temperature", self.temperature, 0.0, 0.0)
        self.length_penalty = check_float(
            "length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise RequestError(
                f"early_stopping must be true, false or 'never', got {echo(self.early_stopping)}",
                param="early_stopping",
            )
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        if self.truncate_prompt_tokens is not None:
            check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, INT64_MAX)
        self.structured_outputs = check_form(self.structured_outputs)

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any], *, most_tokens: int) -> BeamSearchParams:
        """Return the search that a request means which says `use_beam_search` among sampling fields.

        Args:
            fields: of `SamplingParams`, and `length_penalty` and `early_stopping`. The beam width is `best_of`, or else
                `n`, of which the caller returns `n`. most_tokens: what `max_tokens` None means.

        Raises:
            UnsupportedError: a field asks for something that beams cannot honour. RequestError: it is malformed.
        """
        rest = dict(fields)
        options = {name: rest.pop(name) for name in ("length_penalty", "early_stopping") if name in rest}
        best_of = rest.pop("best_of", None)
        temperature = check_float("temperature", rest.pop("temperature", 0.0), 0.0, 2.0)
        if temperature != 0.0:
            raise UnsupportedError(
                f"temperature must be 0 or absent with beam search, got {temperature:g}", param="temperature"
            )
        asked = SamplingParams(**rest)
        neutral = SamplingParams(top_k=min(asked.top_k, 0), output_kind=asked.output_kind)  # 0 and -1 are the same
        for name in SamplingParams.__struct_fields__:
            if name not in BEAM_FIELDS and getattr(asked, name) != getattr(neutral, name):
                raise UnsupportedError(f"{name} is not supported with beam search; leave it out", param=name)
        return cls(
            beam_width=asked.n if best_of is None else check_best_of(best_of, asked.n),
            max_tokens=most_tokens if asked.max_tokens is None else asked.max_tokens,
            ignore_eos=asked.ignore_eos,
            include_stop_str_in_output=asked.include_stop_str_in_output,
            skip_special_tokens=asked.skip_special_tokens,
            truncate_prompt_tokens=asked.truncate_prompt_tokens,
            structured_outputs=asked.structured_outputs,
            **options,
        )

    def clone(self, **changes: Any) -> BeamSearchParams:
        """Return a copy with some fields replaced (and all of them checked again)."""
        return msgspec.structs.replace(self, **changes)

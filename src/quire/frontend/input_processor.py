"""`InputProcessor`: from a prompt and parameters to `EngineRequest`s: tokenization and every check.

Nothing that passes here can make the engine read outside a table: all token ids are compared with the model's
vocabulary, the prompt with the context length. Two rules to know:

- The prompt must leave room for at least one token (`ContextLengthError` otherwise). `max_tokens` beyond the context
  is not an error: it is cut to what fits, and the text ends with finish_reason "length".
- A text so long that it cannot possibly fit is refused before it is tokenized; a text that could fit but is long is
  tokenized piece by piece, and refused as soon as the pieces have twice as many tokens as the context.
"""

from __future__ import annotations

import hashlib
import math
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.checkpoint.pooling_spec import PoolingSpec
from quire.checks import check_int, wrong_type, wrong_value
from quire.engine_request import EngineRequest, LoRARequest, ThinkingData
from quire.errors import ContextLengthError, ModelError, RequestError, UnsupportedError, echo
from quire.frontend.formats.message import MessageSpec
from quire.frontend.sequence_breakers import SequenceBreakerIndex, Spelling
from quire.pooling_params import PoolingParams
from quire.sampling_params import (
    DRY_SEQUENCE_BREAKERS,
    MAX_N,
    BeamSearchParams,
    RequestOutputKind,
    SamplingParams,
)
from quire.tokenizer.tokenizer import Tokenizer, check_text

Prompt = str | list[int] | Mapping[str, Any]
TextParams = SamplingParams | BeamSearchParams
Params = TextParams | PoolingParams


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
PIECE_CHARS = 32768
CHECKED_AT_ONCE = 65536
MAX_SALT_LENGTH = 1024
MAX_TENANT_LENGTH = 256
PRIORITY_LIMIT = 2**31


class InputProcessor:
    """Checks and tokenizes requests for one model.

    Args:
        tokenizer: None works on token ids only.
        vocab_size: rows of the model's embedding table. max_model_len: context length [tokens].
        max_num_seqs: most sequences that the engine runs at a time.
        eos_token_ids: ids that end a text.
        sampling_defaults: SamplingParams fields used where the caller gives no parameters at all.
        seed: seeds of requests that bring none follow from it, in order; None draws unpredictable ones.
        max_logprobs: most log-probabilities per position that a request may ask for; -1: no bound.
        logits_processors: names that requests may use.
        lora_vocab_size: as in `Ready`.
        pooling: how the model makes vectors or scores, of `vector_size` numbers; None: it generates text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        max_num_seqs: int = MAX_N,
        eos_token_ids: Sequence[int] = (),
        sampling_defaults: Mapping[str, Any] | None = None,
        seed: int | None = None,
        max_logprobs: int = 20,
        logits_processors: Sequence[str] = (),
        lora_vocab_size: int | None = None,
        pooling: PoolingSpec | None = None,
        vector_size: int = 0,
    ) -> None:
        self._random: random.Random = secrets.SystemRandom() if seed is None else random.Random(seed)
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.eos_token_ids = tuple(eos_token_ids)
        self.lora_vocab_size = lora_vocab_size
        self.max_logprobs = max_logprobs
        self.logits_processors = tuple(logits_processors)
        self.pooling, self.vector_size = pooling, vector_size
        self._breakers: SequenceBreakerIndex | None = None
        self._defaults = dict(sampling_defaults or {})
        try:
            self.default_sampling_params()
        except RequestError as error:
            raise ModelError(f"generation_config.json: {error.message}", param=error.param) from None

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters the model's makers recommend, the neutral ones where they say nothing."""
        return SamplingParams(**self._defaults)

    def tokenize(
        self, prompt: Prompt, params: Params, *, param: str = "prompt", lora: LoRARequest | None = None
    ) -> list[int]:
        """Return the checked token ids of a prompt, after `truncate_prompt_tokens`.

        Raises:
            RequestError: no prompt, of the wrong kind, empty, or with an id outside the vocabulary.
            ContextLengthError: it leaves no room for a single token; the message has both numbers.
        """
        content, where = split_prompt(prompt, param)
        self.check_kind(params)
        pooled = isinstance(params, PoolingParams)
        keep = params.truncate_prompt_tokens
        most = self.max_model_len if keep is None or keep == -1 else min(keep, self.max_model_len)
        if isinstance(content, str):
            token_ids = self._encode(content, None if keep is None else most, where, pooled)
            check_ids(token_ids, self.vocab_size, where, text=True)
        else:
            check_ids(content, self._vocab_size(lora), where)
            token_ids = list(content)
        if keep is not None:  # what is pooled keeps its beginning, what is continued its end
            token_ids = token_ids[:most] if pooled else token_ids[-keep:]
        if not token_ids:
            raise RequestError(f"{where} has no tokens", param=where, code="empty_array")
        self.check_length(len(token_ids), where, room=0 if pooled else 1)
        return token_ids

    def check_kind(self, params: Params) -> None:
        """Raise `UnsupportedError` for vectors from a model of texts, and for text from one that makes vectors."""
        if isinstance(params, PoolingParams) == (self.pooling is not None):
            return
        if self.pooling is None:
            message = "this model generates text; vectors and scores need a model for them, or --runner pooling"
        else:
            message = f"this model does not generate text: it is made to {self.pooling.task}"
        raise UnsupportedError(message, param="model", code="unsupported_endpoint")

    def check_length(self, num_tokens: int, param: str = "prompt", *, at_least: bool = False, room: int = 1) -> None:
        """Raise `ContextLengthError` if a prompt of so many tokens leaves less room than this for output."""
        if num_tokens + room > self.max_model_len:
            shown = f"at least {num_tokens}" if at_least else f"{num_tokens}"
            reason = " and one must be left for the output" if room else ""
            raise ContextLengthError(
                f"{param} has {shown} tokens, but the context length is {self.max_model_len} tokens{reason}",
                param=param,
            )

    def check_chars(self, num_chars: int, param: str = "prompt") -> None:
        """Raise `ContextLengthError` if a text of so many characters cannot fit, however it is tokenized."""
        if self.tokenizer is None or num_chars < self.max_model_len:
            return
        most = self.max_model_len * self.tokenizer.max_chars_per_token
        if num_chars > most:
            raise ContextLengthError(
                f"{param} has {num_chars} characters, more than the {most} that the context length of "
                f"{self.max_model_len} tokens can hold",
                param=param,
            )

    def _encode(self, text: str, most: int | None, param: str, pooled: bool) -> list[int]:
        """Return the ids of a text, or as many as matter if at most `most` of them are kept."""
        if self.tokenizer is None:
            message = f"{param} must be token ids: this engine runs without a tokenizer"
            raise RequestError(message, param=param, code="invalid_type")
        check_text(text, param)
        if most is None:
            self.check_chars(len(text), param)
            self.check_pieces(text, param)
            return self.tokenizer.encode(text)
        # The tokens at one end depend on that end of the text only; the rest need not be tokenized.
        longest = (most + 64) * self.tokenizer.max_chars_per_token
        return self.tokenizer.encode_within(text[:longest], most) if pooled else self.tokenizer.encode(text[-longest:])

    def check_pieces(self, text: str, param: str = "prompt") -> None:
        """Raise `ContextLengthError` if the beginning of a long text alone has twice the tokens that fit.

        A cut through a word changes a few tokens at most, so the factor of two leaves ample room for error.
        """
        assert self.tokenizer is not None
        if len(text) <= 2 * PIECE_CHARS:
            return
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            num_tokens += len(self.tokenizer.encode(piece, add_special_tokens=False))
            if num_tokens >= 2 * self.max_model_len:
                self.check_length(num_tokens, param, at_least=True)

    def build(
        self,
        token_ids: list[int],
        params: Params,
        request_id: str,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str | None = None,
        tenant: str = "",
        grammar: str | None = None,
        thinking: ThinkingData | None = None,
        lora: LoRARequest | None = None,
    ) -> list[EngineRequest]:
        """Return the engine requests of a request, usually one.

        `grammar` is compiled from the structured output that `params` ask for, `thinking` the bound on reasoning
        (`FrontModel.constraints`). Sequences are "{id}", or "{id}-0" and so on for several. The first one uses the seed
        itself, the others seeds derived from it. More sequences than the engine runs at a time go into several engine
        requests, the first of which has the prompt's log-probabilities. A beam search is one sequence.
        """
        self._check_options(request_id, priority, cache_salt, tenant)
        self.check_kind(params)
        request = EngineRequest(
            request_id,
            token_ids,
            SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY),
            arrival_time,
            priority=priority,
            cache_salt=cache_salt,
            tenant=tenant,
            grammar=grammar,
            thinking=thinking,
            lora=lora,
        )
        if isinstance(params, PoolingParams):
            request.pooling = self.pooling_params(params)
            return [request]
        assert params.structured_outputs is None or grammar is not None, "it would be ignored without its grammar"
        beam = None
        if isinstance(params, BeamSearchParams):
            self.check_beam_width(params.beam_width)
            beam, params = params, _params_of_beams(params)
        self._check_params(params, self._vocab_size(lora))
        self.check_logprobs(params, len(token_ids))
        eos_ids = () if params.ignore_eos else self.eos_token_ids
        room = self.max_model_len - len(token_ids)
        request.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        request.stop_ids = sorted({*eos_ids, *(params.stop_token_ids or ())})
        request.bad_words_ids = self.bad_words_ids(params.bad_words or [])
        request.dry_breakers = self._dry_breakers(params)
        if beam is not None:
            request.beam = beam.clone(max_tokens=request.max_tokens, structured_outputs=None)
            request.sampling_params = params
            return [request]
        return self._split(request, params)

    def pooling_params(self, params: PoolingParams) -> PoolingParams:
        """Return the parameters with their task; raise `RequestError` for what the model cannot do."""
        assert self.pooling is not None, "checked before"
        spec, task = self.pooling, params.task or self.pooling.task
        if task not in spec.tasks:
            raise UnsupportedError(
                f"task must be {' or '.join(spec.tasks)} with this model, got {echo(task)}", param="task"
            )
        if params.dimensions is not None:
            if spec.task != "embed":
                raise RequestError("dimensions are those of vectors; this model makes scores", param="dimensions")
            check_int("dimensions", params.dimensions, 1, self.vector_size)
            if spec.matryoshka and params.dimensions not in spec.matryoshka:
                sizes = ", ".join(map(str, spec.matryoshka))
                raise RequestError(
                    f"dimensions must be one of {sizes} with this model, got {params.dimensions}", param="dimensions"
                )
        # What is cached was computed before: its hidden states are gone.
        whole = task == "token_embed" or spec.kinds != ("lasttoken",)
        return params.clone(task=task, skip_reading_prefix_cache=params.skip_reading_prefix_cache or whole)

    def _split(self, request: EngineRequest, params: SamplingParams) -> list[EngineRequest]:
        """Return a request with its sequences, in as many parts as the engine needs."""
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        request_id, count, most = request.request_id, params.num_sequences, self.max_num_seqs
        sequence_ids = [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]
        seeds = [child_seed(seed, index) for index in range(count)]
        first = rest = _params_of_one(params)
        if first.prompt_logprobs is not None:
            rest = first.clone(prompt_logprobs=None, prompt_logprob_start=None)
        return [
            msgspec.structs.replace(
                request,
                request_id=request_id if count <= most else f"{request_id}/{start // most}",
                sampling_params=rest if start else first,
                sequence_ids=sequence_ids[start : start + most],
                seeds=seeds[start : start + most],
            )
            for start in range(0, count, most)
        ]

    def check_beam_width(self, width: int, param: str = "beam_width") -> None:
        """Raise `RequestError` for more beams than the engine runs sequences at a time."""
        if width > self.max_num_seqs:
            raise RequestError(
                f"{param} must be at most {self.max_num_seqs} (max_num_seqs of this engine) with beam search, "
                f"got {width}",
                param=param,
                code="integer_above_max_value",
            )

    def _vocab_size(self, lora: LoRARequest | None) -> int:
        """Return how many token ids a request may have. Raises `UnsupportedError` where there are no adapters."""
        if lora is None:
            return self.vocab_size
        if not isinstance(lora, LoRARequest):
            raise wrong_value("lora_request", "a LoRARequest", lora)
        if self.lora_vocab_size is None:
            raise UnsupportedError("this engine serves no LoRA adapters (enable_lora)", param="lora_request")
        return self.lora_vocab_size

    def _check_params(self, params: SamplingParams, vocab_size: int) -> None:
        if params.output_kind not in list(RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {echo(params.output_kind)}")
        check_ids(params.stop_token_ids or [], vocab_size, "stop_token_ids")
        if params.allowed_token_ids is not None:
            check_ids(params.allowed_token_ids, vocab_size, "allowed_token_ids")
        for token in params.logit_bias or {}:
            if token >= vocab_size:
                raise RequestError(f"logit_bias has token id {echo(token)} >= vocab {vocab_size}", param="logit_bias")
        for item in params.logits_processors or ():
            if item.name not in self.logits_processors:
                raise RequestError(
                    f"logits_processors names {echo(item.name)}; this engine has "
                    f"{', '.join(self.logits_processors) or 'none'}",
                    param="logits_processors",
                )
        if self.tokenizer is None:
            for name in ("stop", "bad_words"):
                if getattr(params, name):
                    raise RequestError(f"{name} needs a tokenizer, and this engine runs without one", param=name)
            if params.dry_multiplier and params.dry_sequence_breakers != []:
                raise RequestError(
                    "dry_sequence_breakers must be [] with this engine, which runs without a tokenizer",
                    param="dry_sequence_breakers",
                )

    def check_logprobs(self, params: SamplingParams, num_prompt_tokens: int) -> None:
        """Raise `RequestError` for more log-probabilities than allowed, and for ids or positions that do not exist."""
        for name in ("logprobs", "prompt_logprobs"):
            requested = getattr(params, name)
            if requested is None or self.max_logprobs < 0:
                continue
            shown = f"{requested}"
            if requested < 0:
                requested, shown = self.vocab_size, f"-1 (the whole vocabulary, {self.vocab_size})"
            if requested > self.max_logprobs:
                raise RequestError(
                    f"{name} must be at most {self.max_logprobs} (max_logprobs of this engine), got {shown}",
                    param=name,
                    code="integer_above_max_value",
                )
        check_ids(params.logprob_token_ids or [], self.vocab_size, "logprob_token_ids")
        if (params.prompt_logprob_start or 0) >= num_prompt_tokens:
            raise RequestError(
                f"prompt_logprob_start must be at most {num_prompt_tokens - 1}, the last position of the prompt, got "
                f"{params.prompt_logprob_start}",
                param="prompt_logprob_start",
                code="integer_above_max_value",
            )

    def _dry_breakers(self, params: SamplingParams) -> list[Spelling]:
        """Return the tokens that spell the sequence breakers of a request with DRY."""
        texts = DRY_SEQUENCE_BREAKERS if params.dry_sequence_breakers is None else params.dry_sequence_breakers
        if params.dry_multiplier == 0.0 or self.tokenizer is None or not texts:
            return []
        if self._breakers is None:
            self._breakers = SequenceBreakerIndex(self.tokenizer, self.vocab_size)
        return self._breakers.spellings(texts)

    @staticmethod
    def _check_options(request_id: str, priority: int, cache_salt: str | None, tenant: str) -> None:
        if not isinstance(request_id, str) or not request_id:
            raise wrong_type("request_id", "a non-empty text", request_id)
        if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > PRIORITY_LIMIT:
            raise wrong_value("priority", f"an integer from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}", priority)
        if cache_salt is not None and not (isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_SALT_LENGTH):
            raise wrong_value("cache_salt", f"a text of 1 to {MAX_SALT_LENGTH} characters", cache_salt)
        if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_LENGTH:
            raise wrong_value("tenant", f"a text of at most {MAX_TENANT_LENGTH} characters", tenant)

    def bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell each word: at the start of a text, after a space, inside a text."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            check_text(word, "bad_words")
            assert self.tokenizer is not None, "checked before"
            for spelled in (word, " " + word.lstrip()):
                sequences[tuple(self.tokenizer.encode(spelled, add_special_tokens=False))] = None
            # SentencePiece tokenizers put a space before a text; the word inside a text has none.
            anchor = self.tokenizer.encode("\n", add_special_tokens=False)
            inside = self.tokenizer.encode("\n" + word, add_special_tokens=False)
            if inside[: len(anchor)] == anchor:
                sequences[tuple(inside[len(anchor) :])] = None
        for ids in sequences:
            check_ids(ids, self.vocab_size, "bad_words", text=True)
        return [list(ids) for ids in sequences if ids]


def _params_of_one(params: SamplingParams) -> SamplingParams:
    """Return what each sequence of a request does; those that are ranked report the log-probability of each token."""
    if params.skip_clone and params.num_sequences == 1 and params.structured_outputs is None:
        return params
    ranked = params.num_sequences > params.n and not params.returns_logprobs
    # The engine gets the grammar; the schema it was compiled from may be large. The front shapes the outputs.
    return params.clone(
        n=1,
        best_of=None,
        logprobs=0 if ranked else params.logprobs,
        structured_outputs=None,
        flat_logprobs=False,
        stream_interval=None,
    )


def _params_of_beams(params: BeamSearchParams) -> SamplingParams:
    """Return the sampling parameters under which a beam's tokens become text."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


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


def check_ids(ids: Sequence[Any], vocab_size: int, param: str, *, text: bool = False) -> None:
    """Raise `RequestError` unless every item is an int (not a bool) in [0, vocab_size).

    Args:
        text: the ids come from tokenizing `param`, so the error names the whole of it.
    """
    pieces = (
        [ids]
        if len(ids) <= CHECKED_AT_ONCE
        else (  # others must have their turn, if this is a thread
            ids[start : start + CHECKED_AT_ONCE] for start in range(0, len(ids), CHECKED_AT_ONCE)
        )
    )
    if not ids or all(set(map(type, part)) == {int} and min(part) >= 0 and max(part) < vocab_size for part in pieces):
        return
    for index, token in enumerate(ids):
        where = param if text else f"{param}[{index}]"
        if isinstance(token, bool) or not isinstance(token, int):
            raise wrong_type(where, "a token id", token)
        if token < 0:
            raise RequestError(f"{where}: token id {echo(token)} < 0", param=where)
        if token >= vocab_size:
            raise RequestError(f"{where}: token id {echo(token)} >= vocab {vocab_size}", param=where)


def child_seed(seed: int, index: int) -> int:
    """Return the seed of one of several completions; number 0 uses the seed itself."""
    if index == 0:
        return seed
    data = seed.to_bytes(8, "little", signed=True) + index.to_bytes(4, "little")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1


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

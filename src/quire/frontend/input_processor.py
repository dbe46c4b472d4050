"""`InputProcessor`: from a prompt and parameters to `EngineRequest`s: tokenization and every check.

Nothing that passes here can make the engine read outside a table: all token ids are compared with the model's
vocabulary, the prompt with the context length (`context_limit.py`). The prompt must leave room for at least one token.
`max_tokens` beyond the context is not an error: it is reduced to what fits, and the text ends with finish_reason
"length".
"""

from __future__ import annotations

import hashlib
import random
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec

from quire.checks import check_int, check_unicode, wrong_type, wrong_value
from quire.engine.messages import Ready
from quire.engine_request import EngineRequest, LoRARequest
from quire.errors import ModelError, RequestError, UnsupportedError, echo
from quire.frontend.context_limit import ContextLimit
from quire.frontend.front_model import FrontModel
from quire.frontend.prompts import Params, Prompt, TokensOfText, split_prompt
from quire.frontend.sequence_breakers import SequenceBreakerIndex, Spelling
from quire.pooling_params import PoolingParams
from quire.sampling_params import (
    DRY_SEQUENCE_BREAKERS,
    OPTIONS,
    WITHOUT_FRONTEND,
    WITHOUT_PROMPT_LOGPROBS,
    RequestOutputKind,
    SamplingParams,
)
from quire.tokenizer.tokenizer import text_called

TOKEN_ID_OPTIONS = [name for name, option in OPTIONS.items() if option.token_ids]
TOKENIZER_OPTIONS = [name for name, option in OPTIONS.items() if option.tokenizer]
CHECKED_AT_ONCE = 65536
MAX_SALT_LENGTH = 1024
MAX_TENANT_LENGTH = 256
PRIORITY_LIMIT = 2**31


class InputProcessor:
    """Checks and tokenizes requests for one model.

    Args:
        model: the model as the frontend sees it. ready: the engine that serves it.
        seed: seeds of requests that bring none follow from it, in order; None draws unpredictable ones.

    Attributes:
        limit: checks prompts against the context length.
        vocab_size: rows of the model's embedding table.
        eos_token_ids: ids that end a text, and that the embedding table has.
        pooling: how the model makes vectors or scores; None: it generates text.

    Raises:
        ModelError: generation_config.json recommends values that `SamplingParams` refuses.
    """

    def __init__(self, model: FrontModel, ready: Ready, seed: int | None = None) -> None:
        self._model = model
        self._ready = ready
        self._random: random.Random = secrets.SystemRandom() if seed is None else random.Random(seed)
        self.tokenizer = model.tokenizer
        self.vocab_size = ready.vocab_size
        self.max_model_len = ready.max_model_len
        self.limit = ContextLimit(model.tokenizer, ready.max_model_len)
        self.eos_token_ids = tuple(token for token in model.eos_token_ids if token < ready.vocab_size)
        self.pooling = model.info.pooling
        self._breakers: SequenceBreakerIndex | None = None
        try:
            self.default_sampling_params()
        except RequestError as error:
            raise ModelError(f"generation_config.json: {error.message}", param=error.param) from None

    def default_sampling_params(self) -> SamplingParams:
        """Return the parameters the model's makers recommend, the neutral ones where they say nothing."""
        return SamplingParams(**self._model.sampling_defaults)

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
        most = self.truncation(params)
        if isinstance(content, str):
            token_ids = self._encode(content, most, where, pooled)
            check_ids(token_ids, self.vocab_size, where, text=True)
        else:
            if most is None:  # millions of ids need not be looked at
                self.limit.check_length(len(content), where, room=0 if pooled else 1)
            check_ids(content, self._vocab_size(lora), where, text=isinstance(content, TokensOfText))
            token_ids = list(content)
        if most is not None:  # what is pooled keeps its beginning, what is continued its end
            token_ids = token_ids[:most] if pooled else token_ids[-most:]
        if not token_ids:
            raise RequestError(f"{where} has no tokens", param=where, code="empty_array")
        self.limit.check_length(len(token_ids), where, room=0 if pooled else 1)
        return token_ids

    def truncation(self, params: Params) -> int | None:
        """Return how many tokens `truncate_prompt_tokens` keeps of a prompt; None for all of them."""
        keep = params.truncate_prompt_tokens
        if keep != -1:
            return keep if keep is None else min(keep, self.max_model_len)
        if isinstance(params, PoolingParams):
            return self.max_model_len
        return max(1, self.max_model_len - (params.max_tokens or 1))

    def check_kind(self, params: Params) -> None:
        """Raise `UnsupportedError` for vectors from a model of texts, and for text from one that makes vectors."""
        if isinstance(params, PoolingParams) == (self.pooling is not None):
            return
        if self.pooling is None:
            message = "this model generates text; vectors and scores need a model for them, or --runner pooling"
        else:
            message = f"this model does not generate text: it is made to {self.pooling.task}"
        raise UnsupportedError(message, param="model", code="unsupported_endpoint")

    def _encode(self, text: str, most: int | None, param: str, pooled: bool) -> list[int]:
        """Return the ids of a text; if it will be truncated to `most`, perhaps only those that are kept."""
        if self.tokenizer is None:
            message = f"{param} must be token ids: this engine runs without a tokenizer"
            raise RequestError(message, param=param, code="invalid_type")
        check_unicode(text, param)
        if most is None:
            self.limit.check_chars(len(text), param)
            self.limit.check_pieces(text, param)
        else:
            # The tokens at one end depend on that end of the text only; the rest need not be tokenized.
            longest = (most + 64) * self.tokenizer.max_chars_per_token
            text = text[:longest] if pooled else text[-longest:]
        with text_called(param):
            if pooled and most is not None:
                return self.tokenizer.encode_within(text, most)
            return self.tokenizer.encode(text)

    def build(self, token_ids: list[int], params: Params, request_id: str, **fields: Any) -> list[EngineRequest]:
        """Return the engine requests of a request, usually one; `fields` are others of `EngineRequest`.

        Of these, `grammar` is compiled from the structured output of `params`, `thinking` the bound on reasoning
        (`FrontModel.constraints`). Sequences are "{id}", or "{id}-0" and so on for several. The first one uses the seed
        itself, the others seeds derived from it. More sequences than the engine runs at a time go into several engine
        requests, the first of which has the prompt's log-probabilities. A beam search is one sequence.
        """
        neutral = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
        request = EngineRequest(request_id, token_ids, neutral, **fields)
        _check_options(request)
        self.check_kind(params)
        if isinstance(params, PoolingParams):
            request.pooling = self.pooling_params(params)
            return [request]
        assert params.structured_outputs is None or request.grammar is not None, (
            "it would be ignored without its grammar"
        )
        if params.use_beam_search:
            self._check_beam_width(params)
        self._check_params(params, self._vocab_size(request.lora))
        self.check_logprobs(params, len(token_ids))
        eos_ids = () if params.ignore_eos else self.eos_token_ids
        room = self.max_model_len - len(token_ids)
        request.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        request.stop_ids = sorted({*eos_ids, *(params.stop_token_ids or ())})
        request.bad_words_ids = self.bad_words_ids(params.bad_words or [])
        request.dry_breakers = self._dry_breakers(params)
        if params.use_beam_search:
            request.beam = params.clone(max_tokens=request.max_tokens).beam_search_params()
            request.sampling_params = _params_of_one(params)
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
            check_int("dimensions", params.dimensions, 1, spec.dimensions(self._model.info.hidden_size))
            if spec.matryoshka and params.dimensions not in spec.matryoshka:
                sizes = ", ".join(map(str, spec.matryoshka))
                raise RequestError(
                    f"dimensions must be one of {sizes} with this model, got {params.dimensions}", param="dimensions"
                )
        # The hidden states of cached tokens are not available.
        whole = task == "token_embed" or spec.kinds != ("lasttoken",)
        return params.clone(task=task, skip_reading_prefix_cache=params.skip_reading_prefix_cache or whole)

    def _split(self, request: EngineRequest, params: SamplingParams) -> list[EngineRequest]:
        """Return a request with its sequences, in as many parts as the engine needs."""
        seed = params.seed if params.seed is not None else self._random.getrandbits(63)
        request_id, count, most = request.request_id, params.num_sequences, self._ready.max_num_seqs
        sequence_ids = [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]
        seeds = [child_seed(seed, index) for index in range(count)]
        first = rest = _params_of_one(params)
        if first.prompt_logprobs is not None:
            rest = first.clone(**WITHOUT_PROMPT_LOGPROBS)
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

    def _check_beam_width(self, params: SamplingParams) -> None:
        """Raise `RequestError` for more beams than the engine runs sequences at a time."""
        param = "n" if params.best_of is None else "best_of"
        if params.num_sequences > self._ready.max_num_seqs:
            raise RequestError(
                f"{param} must be at most {self._ready.max_num_seqs} (max_num_seqs of this engine) with beam search, "
                f"got {params.num_sequences}",
                param=param,
                code="integer_above_max_value",
            )

    def _vocab_size(self, lora: LoRARequest | None) -> int:
        """Return how many token ids a request may have. Raises `UnsupportedError` where there are no adapters."""
        if lora is None:
            return self.vocab_size
        if not isinstance(lora, LoRARequest):
            raise wrong_value("lora_request", "a LoRARequest", lora)
        if self._ready.lora_vocab_size is None:
            raise UnsupportedError("this engine serves no LoRA adapters (enable_lora)", param="lora_request")
        return self._ready.lora_vocab_size

    def _check_params(self, params: SamplingParams, vocab_size: int) -> None:
        if params.output_kind not in list(RequestOutputKind):
            raise RequestError(f"output_kind must be a RequestOutputKind, got {echo(params.output_kind)}")
        for name in TOKEN_ID_OPTIONS:
            # An adapter's own tokens have no log-probabilities.
            size = self.vocab_size if OPTIONS[name].affects == "logprobs" else vocab_size
            check_ids(getattr(params, name) or [], size, name)
        for token in params.logit_bias or {}:
            if token >= vocab_size:
                raise RequestError(f"logit_bias has token id {echo(token)} >= vocab {vocab_size}", param="logit_bias")
        for item in params.logits_processors or ():
            if item.name not in self._model.logits_processors:
                raise RequestError(
                    f"logits_processors names {echo(item.name)}; this engine has "
                    f"{', '.join(self._model.logits_processors) or 'none'}",
                    param="logits_processors",
                )
        if self.tokenizer is None:
            for name in TOKENIZER_OPTIONS:
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
            if requested is None or self._model.max_logprobs < 0:
                continue
            shown = f"{requested}"
            if requested < 0:
                requested, shown = self.vocab_size, f"-1 (the whole vocabulary, {self.vocab_size})"
            if requested > self._model.max_logprobs:
                raise RequestError(
                    f"{name} must be at most {self._model.max_logprobs} (max_logprobs of this engine), got {shown}",
                    param=name,
                    code="integer_above_max_value",
                )
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

    def bad_words_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the token sequences that spell each word: at the start of a text, after a space, inside a text."""
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
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


def _check_options(request: EngineRequest) -> None:
    """Check the options of a request that are not sampling parameters."""
    priority, salt, tenant = request.priority, request.cache_salt, request.tenant
    if not isinstance(request.request_id, str) or not request.request_id:
        raise wrong_type("request_id", "a non-empty text", request.request_id)
    if isinstance(priority, bool) or not isinstance(priority, int) or abs(priority) > PRIORITY_LIMIT:
        raise wrong_value("priority", f"an integer from {-PRIORITY_LIMIT} to {PRIORITY_LIMIT}", priority)
    if salt is not None and not (isinstance(salt, str) and 0 < len(salt) <= MAX_SALT_LENGTH):
        raise wrong_value("cache_salt", f"a text of 1 to {MAX_SALT_LENGTH} characters", salt)
    if not isinstance(tenant, str) or len(tenant) > MAX_TENANT_LENGTH:
        raise wrong_value("tenant", f"a text of at most {MAX_TENANT_LENGTH} characters", tenant)
    for name in ("request_id", "cache_salt", "tenant"):
        check_unicode(getattr(request, name), name)


def _params_of_one(params: SamplingParams) -> SamplingParams:
    """Return what each sequence of a request does; those that are ranked report the log-probability of each token."""
    if params.skip_clone and params.num_sequences == 1 and params.structured_outputs is None:
        return params
    ranked = params.num_sequences > params.n and not params.returns_logprobs and not params.use_beam_search
    # The engine gets the grammar; the schema it was compiled from may be large. The front shapes the outputs.
    return params.clone(**WITHOUT_FRONTEND, logprobs=0 if ranked else params.logprobs)


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

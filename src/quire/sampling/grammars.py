"""`GrammarStore`: grammars compiled beside the step loop, and cached for requests with the same one.

A grammar is a text in the Lark dialect of llguidance. `worker/guidance.py` applies it to rows of the batch; the front
end makes it from structured output options (`quire.structured`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.errors import ErrorData, QuireError, RequestError
from quire.structured.lark import first_line, grammar_failed, parser_limits
from quire.tokenizer.tokenizer import Tokenizer

# Bounds on cached grammars without users: compiled ones are many times as long as their text, and a short one may have
# grown to tens of megabytes of lexer states, which the library does not report.
MAX_UNUSED_CHARS = 1 << 20
MAX_UNUSED = 32
MAX_FORCED_BYTES = 1024  # of forced text that is tokenized at a time; it is requested again after each token
UNSTABLE_TOKENS = 16  # before a cut: they might differ without it
ANCHOR = "\x02"  # a character that merges with no other: text behind it is tokenized as the middle of a text
NO_BYTES = (
    "structured output needs a tokenizer in which every token stands for bytes of its own; the decoder of this model's "
    "tokenizer joins them in another way"
)
NO_TOKENIZER = "structured output needs a tokenizer, and this model has none that can be read"

logger = logging.getLogger(__name__)


class GrammarVocabulary:
    """A tokenizer as llguidance needs it: the bytes of each token, the special tokens, and how text is tokenized.

    Args:
        vocab_size: rows of the model's embedding table. Those without a token are never allowed.
        eos_token_ids: those that end a text, below `vocab_size`. Without any, an id beyond the vocabulary, which cannot
            be sampled, stands for the end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if tokenizer.pieces is None:
            raise RequestError(NO_BYTES, param="structured_outputs", code="unsupported_tokenizer")
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode_segments([ANCHOR])
        special = tokenizer.special_ids
        self.tokens = [
            (tokenizer.id_to_token(index) or "").encode() if index in special else tokenizer.token_bytes(index)
            for index in range(vocab_size)
        ]
        self.special_token_ids = sorted(index for index in special if index < vocab_size)
        # Always, so that masks have the same width for every model of this vocabulary.
        self.tokens.append(b"<end>")
        self.special_token_ids.append(vocab_size)
        self.eos_token_ids = list(eos_token_ids) or [vocab_size]
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._by_bytes = {token: index for index, token in reversed(list(enumerate(self.tokens)))}
        self._longest = max(map(len, self._by_bytes))

    def compiled(self) -> LLTokenizer:
        """Return the tokenizer of llguidance."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.eos_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Tokenize a text that continues another; the spelling of a control token is plain text.

        Of a long text only the first tokens are returned. It must not raise: Rust would panic.
        """
        if len(text) > MAX_FORCED_BYTES:
            end = MAX_FORCED_BYTES
            while text[end] & 0xC0 == 0x80:  # in the middle of a character
                end -= 1
            ids = self._spell(text[:end])
            return ids[: max(len(ids) - UNSTABLE_TOKENS, 1)]
        return self._spell(text)

    def _spell(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode_segments([ANCHOR + text.decode("utf-8", "replace")])
        rest = ids[len(self._anchor) :]
        if ids[: len(self._anchor)] == self._anchor and self._bytes_of(rest) == text:
            return rest
        return self._longest_pieces(text)

    def _bytes_of(self, ids: list[int]) -> bytes | None:
        """Return the bytes of tokens; None if the model lacks one of them."""
        return b"".join([self.tokens[index] for index in ids]) if max(ids, default=0) < len(self.tokens) else None

    def _longest_pieces(self, text: bytes) -> list[int]:
        """Return the longest token at each place, from the left: for tokenizers that normalize text."""
        special = frozenset(self.special_token_ids)
        ids: list[int] = []
        while text:
            for length in range(min(self._longest, len(text)), 0, -1):
                index = self._by_bytes.get(text[:length])
                if index is not None and index not in special:
                    break
            else:
                return []
            ids.append(index)
            text = text[length:]
        return ids


@dataclass(slots=True)
class _Entry:
    """A grammar's matcher before the first token, or its error; neither while it is being compiled."""

    num_users: int = 0
    matcher: LLMatcher | None = None
    error: ErrorData | None = None

    @property
    def ready(self) -> bool:
        return self.matcher is not None or self.error is not None


class GrammarStore:
    """Compiles grammars in a thread, one after the other, and caches them.

    Every `prepare` must be followed by a `release`: grammars in use stay. The others are evicted, the least recently
    used first, when they exceed the bounds.

    Args:
        load_tokenizer: called once, in the thread, when the first grammar comes; may raise `QuireError`.
        vocab_size: rows of the model's embedding table.
        eos_token_ids: the model's; without any, the tokenizer's is taken.
    """

    def __init__(
        self,
        load_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        max_unused_chars: int = MAX_UNUSED_CHARS,
    ) -> None:
        self.vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._max_unused_chars = max_unused_chars
        self._lock = threading.Lock()  # of the entries
        self._loading = threading.Lock()  # of the tokenizer
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._queue: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._vocabulary: GrammarVocabulary | None = None
        self._tokenizer: LLTokenizer | None = None

    def end_ids(self) -> list[int]:
        """Return the ids of the tokens that end a text; complete once a grammar was compiled."""
        vocabulary = self._vocabulary
        ids = self._eos_token_ids if vocabulary is None else vocabulary.eos_token_ids
        return [index for index in ids if index < self.vocab_size]

    def prepare(self, grammar: str) -> None:
        """Begin to use a grammar; `poll` returns it when it is ready."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None:
                entry = self._entries[grammar] = _Entry()
                self._queue.put(grammar)
            entry.num_users += 1
            self._entries.move_to_end(grammar)
            if entry.ready:
                self._done.put(grammar)
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="quire-grammars", daemon=True)
            self._thread.start()

    def release(self, grammar: str) -> None:
        """End one use."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is not None:
                entry.num_users -= 1
                self._shrink()

    def poll(self, wait: float = 0.0) -> dict[str, ErrorData | None]:
        """Return the grammars that became ready, each with its error or None; with none, wait up to `wait` seconds."""
        finished: dict[str, ErrorData | None] = {}
        try:
            while True:
                grammar = self._done.get(block=wait > 0 and not finished, timeout=wait or None)
                with self._lock:
                    entry = self._entries.get(grammar)
                    if entry is not None:
                        finished[grammar] = entry.error
        except queue.Empty:
            return finished

    def start(self, grammar: str) -> LLMatcher:
        """Return a matcher at the beginning of the text.

        The grammar should have been compiled; otherwise this takes as long as compiling it. Raises `QuireError` if it
        is not valid.
        """
        with self._lock:
            entry = self._entries.get(grammar)
            matcher = None if entry is None else entry.matcher
        if matcher is None:
            compiled = self._compile(grammar)
            if isinstance(compiled, ErrorData):
                raise compiled.exception()
            return compiled
        return matcher.deep_copy()

    def close(self) -> None:
        """End the thread after its current grammar."""
        self._queue.put(None)

    def _shrink(self) -> None:
        """Evict grammars without users beyond the bounds. The lock is held."""
        idle = [(grammar, entry) for grammar, entry in self._entries.items() if entry.num_users <= 0 and entry.ready]
        total = sum(len(grammar) for grammar, _ in idle)
        for index, (grammar, entry) in enumerate(idle):
            if total <= self._max_unused_chars and len(idle) - index <= MAX_UNUSED and entry.error is None:
                continue
            total -= len(grammar)
            del self._entries[grammar]

    def _work(self) -> None:
        """Compile grammars of the queue, in the thread."""
        while True:
            grammar = self._queue.get()
            if grammar is None:
                return
            with self._lock:
                entry = self._entries.get(grammar)
                if entry is not None and entry.num_users <= 0:
                    del self._entries[grammar]  # its requests were aborted
                    entry = None
            if entry is None or entry.ready:
                continue
            compiled: LLMatcher | ErrorData
            try:
                compiled = self._compile(grammar)
            except QuireError as error:
                compiled = ErrorData.of(error)
            except BaseException as error:  # thread boundary; panics of Rust are no Exception
                compiled = grammar_failed(f"the grammar could not be compiled: {type(error).__name__}")
            with self._lock:
                if isinstance(compiled, ErrorData):
                    entry.error = compiled
                else:
                    entry.matcher = compiled
                self._shrink()
            self._done.put(grammar)

    def _compile(self, grammar: str) -> LLMatcher | ErrorData:
        """Return a new matcher, or the grammar's error. Raises `QuireError` without a suitable tokenizer."""
        with self._loading:
            if self._tokenizer is None:
                self._vocabulary = self._read_vocabulary()
                self._tokenizer = self._vocabulary.compiled()
        source = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # shared by all copies, and finds grammars without any text
        return grammar_failed(first_line(matcher.get_error())) if matcher.is_error() else matcher

    def _read_vocabulary(self) -> GrammarVocabulary:
        try:
            tokenizer = self._load_tokenizer()
        except QuireError as error:
            logger.warning("no structured output: %s", error.message)
            raise RequestError(NO_TOKENIZER, param="structured_outputs", code="unsupported_tokenizer") from None
        ids = self._eos_token_ids
        if not ids and tokenizer.eos_token_id is not None:
            ids = (tokenizer.eos_token_id,)
        return GrammarVocabulary(tokenizer, self.vocab_size, [index for index in ids if index < self.vocab_size])

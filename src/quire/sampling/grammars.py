"""`GrammarStore`: grammars compiled beside the step loop, and kept for requests that ask for the same.

A grammar is a text in the Lark dialect of llguidance. What it means to a row of the batch is `constraint.py`'s
business; where grammars come from, the front's (`quire.structured`).
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from quire.errors import QuireError, RequestError
from quire.structured.lark import first_line, parser_limits
from quire.tokenizer.tokenizer import Tokenizer

# Of grammars that nobody uses: what they are compiled to is many times as long, and a short one may have grown to tens
# of megabytes of lexer states by being followed, of which the library says nothing.
KEPT_CHARS = 1 << 20
MOST_KEPT = 32
MOST_SPELLED_BYTES = 1024  # of forced text at a time; it is asked for again and again while it is followed
LOOSE_TOKENS = 16  # so many before a cut might be others without it
ANCHOR = "\x02"  # a character that no token joins with others: what stands behind it is in the middle of a text
NO_BYTES = (
    "structured output needs a tokenizer in which every token stands for bytes of its own; the decoder of this model's "
    "tokenizer joins them in another way"
)
NO_TOKENIZER = "structured output needs a tokenizer, and this model has none that can be read"

logger = logging.getLogger(__name__)


class GrammarVocabulary:
    """What llguidance asks of a tokenizer: the bytes of each token, which are special, how text becomes tokens.

    Args:
        vocab_size: rows of the model's embedding table. Those that no token has are never allowed.
        eos_token_ids: those that end a text, below `vocab_size`. Without any, a row beyond the vocabulary, which
            nobody can choose, stands for the end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        if tokenizer.pieces is None:
            raise RequestError(NO_BYTES, code="unsupported_tokenizer")
        self._tokenizer = tokenizer
        self._anchor = tokenizer.encode_segments([ANCHOR])
        special = tokenizer.special_ids
        self.tokens = [
            (tokenizer.id_to_token(index) or "").encode() if index in special else tokenizer.token_bytes(index)
            for index in range(vocab_size)
        ]
        self.special_token_ids = sorted(index for index in special if index < vocab_size)
        # In any case, so that masks are as wide for every model of this vocabulary.
        self.tokens.append(b"<end>")
        self.special_token_ids.append(vocab_size)
        self.eos_token_ids = list(eos_token_ids) or [vocab_size]
        self.eos_token_id = self.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self._by_bytes = {token: index for index, token in reversed(list(enumerate(self.tokens)))}
        self._longest = max(map(len, self._by_bytes))

    def compiled(self) -> LLTokenizer:
        """Return it as llguidance has it."""
        return LLTokenizer(TokenizerWrapper(self), n_vocab=len(self.tokens), eos_token=self.eos_token_ids)

    def __call__(self, text: bytes) -> list[int]:
        """Return the tokens of a text that goes on from another; what spells a control token is letters to it.

        Of a long text only the first are returned. It must not raise: Rust would make a panic of it.
        """
        if len(text) > MOST_SPELLED_BYTES:
            end = MOST_SPELLED_BYTES
            while text[end] & 0xC0 == 0x80:  # in the middle of a character
                end -= 1
            ids = self._spell(text[:end])
            return ids[: max(len(ids) - LOOSE_TOKENS, 1)]
        return self._spell(text)

    def _spell(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode_segments([ANCHOR + text.decode("utf-8", "replace")])
        rest = ids[len(self._anchor) :]
        if ids[: len(self._anchor)] == self._anchor and self._bytes_of(rest) == text:
            return rest
        return self._longest_pieces(text)

    def _bytes_of(self, ids: list[int]) -> bytes | None:
        """Return the bytes of tokens; None if the model has not all of them."""
        return b"".join([self.tokens[index] for index in ids]) if max(ids, default=0) < len(self.tokens) else None

    def _longest_pieces(self, text: bytes) -> list[int]:
        """Return the longest token that the text begins with, and so on: for tokenizers that change what they read."""
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
    """A grammar's matcher before the first token, or what is wrong with it; neither while it is being compiled."""

    num_users: int = 0
    matcher: LLMatcher | None = None
    error: str | None = None

    @property
    def ready(self) -> bool:
        return self.matcher is not None or self.error is not None


class GrammarStore:
    """Compiles grammars in a thread of its own, one after the other, and keeps them.

    Every `prepare` is to be followed by a `release`: what is in use stays. The rest goes, the longest unused first,
    when it is too much.

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
        kept_chars: int = KEPT_CHARS,
    ) -> None:
        self.vocab_size = vocab_size
        self._load_tokenizer = load_tokenizer
        self._eos_token_ids = tuple(eos_token_ids)
        self._kept_chars = kept_chars
        self._lock = threading.Lock()  # of the entries
        self._loading = threading.Lock()  # of the tokenizer
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._asked: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._vocabulary: GrammarVocabulary | None = None
        self._tokenizer: LLTokenizer | None = None

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end a text; complete once a grammar was compiled."""
        vocabulary = self._vocabulary
        ids = self._eos_token_ids if vocabulary is None else vocabulary.eos_token_ids
        return [index for index in ids if index < self.vocab_size]

    def prepare(self, grammar: str) -> None:
        """Begin to use a grammar; `poll` says when it is ready."""
        with self._lock:
            entry = self._entries.get(grammar)
            if entry is None:
                entry = self._entries[grammar] = _Entry()
                self._asked.put(grammar)
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

    def poll(self, wait: float = 0.0) -> dict[str, str | None]:
        """Return what became ready, with what is wrong with it if it cannot be used; wait up to `wait` seconds."""
        finished: dict[str, str | None] = {}
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
            if isinstance(compiled, str):
                raise RequestError(compiled, param="structured_outputs", code="invalid_grammar")
            return compiled
        return matcher.deep_copy()

    def close(self) -> None:
        """Let the thread end after what it is at."""
        self._asked.put(None)

    def _shrink(self) -> None:
        """Forget what nobody uses and is too much. The lock is held."""
        idle = [(grammar, entry) for grammar, entry in self._entries.items() if entry.num_users <= 0 and entry.ready]
        total = sum(len(grammar) for grammar, _ in idle)
        for index, (grammar, entry) in enumerate(idle):
            if total <= self._kept_chars and len(idle) - index <= MOST_KEPT and entry.error is None:
                continue
            total -= len(grammar)
            del self._entries[grammar]

    def _work(self) -> None:
        """The thread's life."""
        while True:
            grammar = self._asked.get()
            if grammar is None:
                return
            with self._lock:
                entry = self._entries.get(grammar)
                if entry is not None and entry.num_users <= 0:
                    del self._entries[grammar]  # nobody waits for it any more
                    entry = None
            if entry is None or entry.ready:
                continue
            try:
                compiled = self._compile(grammar)
            except QuireError as error:
                compiled = error.message
            except BaseException as error:  # thread boundary, and panics of Rust are no Exception: nobody must wait on
                compiled = f"the grammar could not be compiled: {type(error).__name__}"
            with self._lock:
                if isinstance(compiled, str):
                    entry.error = compiled
                else:
                    entry.matcher = compiled
                self._shrink()
            self._done.put(grammar)

    def _compile(self, grammar: str) -> LLMatcher | str:
        """Return a fresh matcher, or what is wrong with the grammar. Raises `QuireError` without a fit tokenizer."""
        with self._loading:
            if self._tokenizer is None:
                self._vocabulary = self._read_vocabulary()
                self._tokenizer = self._vocabulary.compiled()
        source = LLMatcher.grammar_from_lark(grammar)
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # what this computes, all copies have; and it finds that no text is possible
        return first_line(matcher.get_error()) if matcher.is_error() else matcher

    def _read_vocabulary(self) -> GrammarVocabulary:
        try:
            tokenizer = self._load_tokenizer()
        except QuireError as error:
            logger.warning("no structured output: %s", error.message)
            raise RequestError(NO_TOKENIZER, code="unsupported_tokenizer") from None
        ids = self._eos_token_ids
        if not ids and tokenizer.eos_token_id is not None:
            ids = (tokenizer.eos_token_id,)
        return GrammarVocabulary(tokenizer, self.vocab_size, [index for index in ids if index < self.vocab_size])

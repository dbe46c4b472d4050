"""llama.cpp's C interface, through llama-cpp-python, as an engine that runs many sequences together."""

from __future__ import annotations

import time
from typing import Any

import llama_cpp
import numpy as np

BATCH = 2048  # tokens of one call; llama.cpp computes them in its own smaller parts


class LlamaEngine:
    """A model with two contexts, each measured faster at its own: one sequence, and many with a part of the cache each.

    The cache of many has a place for each of `max_sequences` sequences of `max_len` tokens.
    """

    def __init__(self, model: str, threads: int, max_sequences: int, max_len: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise SystemExit(f"llama.cpp could not load {model}: see above")
        self._single = self._context(threads, 1, max_len)
        self._many = self._context(threads, max_sequences, max_len)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.chosen: dict[str, Any] = {"n_ctx": max_sequences * max_len, "n_batch": BATCH, "threads": threads}
        self.chosen |= {"flash_attn": True, "kv_unified": "for one sequence"}

    def _context(self, threads: int, sequences: int, max_len: int) -> Any:
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = sequences * max_len
        options.n_batch = BATCH
        options.n_seq_max = sequences
        options.n_threads = options.n_threads_batch = threads
        options.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_ENABLED
        options.kv_unified = sequences == 1
        context = llama_cpp.llama_init_from_model(self._model, options)
        if not context:
            raise SystemExit("llama.cpp could not make a context: see above")
        return context

    def generate(self, prompts: list[list[int]], max_tokens: int) -> tuple[float, list[int]]:
        """Generate greedily; return the seconds to the first token and the number of tokens of each sequence."""
        started = time.perf_counter()
        context = self._single if len(prompts) == 1 else self._many
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), False)
        jobs = [
            (token, position, sequence, position == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        first = 0.0
        tokens: dict[int, list[int]] = {sequence: [] for sequence in range(len(prompts))}
        for start in range(0, len(jobs), BATCH):
            for sequence, token in self._decode(context, jobs[start : start + BATCH]):
                tokens[sequence].append(token)
                first = first or time.perf_counter() - started
        for step in range(max_tokens - 1):
            jobs = [(made[-1], len(prompts[sequence]) + step, sequence, True) for sequence, made in tokens.items()]
            for sequence, token in self._decode(context, jobs):
                tokens[sequence].append(token)
        return first, [len(made) for made in tokens.values()]

    def _decode(self, context: Any, jobs: list[tuple[int, int, int, bool]]) -> list[tuple[int, int]]:
        """Compute (token, position, sequence, is its output wanted) for each; return (sequence, next token)."""
        batch = self._batch
        batch.n_tokens = len(jobs)
        for index, (token, position, sequence, wanted) in enumerate(jobs):
            batch.token[index] = token
            batch.pos[index] = position
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = sequence
            batch.logits[index] = wanted
        status = llama_cpp.llama_decode(context, batch)
        if status:
            raise SystemExit(f"llama_decode returned {status}")
        wanted_rows = [(index, sequence) for index, (_, _, sequence, wanted) in enumerate(jobs) if wanted]
        return [(sequence, self._best_token(context, index)) for index, sequence in wanted_rows]

    def _best_token(self, context: Any, index: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, index)
        return int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax())

"""Beam search inside the engine beside beam search made of separate requests, in one run: time and KV memory.

    python benchmarks/beam_search.py [--model MODEL] [--beam-width 4] [--prompt-tokens 256] [--output-tokens 64]

"separate" does what a client must do where the engine has no beam search: each step, one request of one token with
log-probabilities for every beam, whose prompts the prefix cache spares from being computed again. Both use the same
model and must give the same beams; the last column is the same client on an engine without a prefix cache. Ideal memory
is that of one sequence with `beam_width` last blocks.
"""

from __future__ import annotations

import argparse
import math
import time

from common import print_header, print_table

from quire import LLM, BeamSearchParams, SamplingParams
from quire.scheduler.beam import BeamSearch

REPEATS = 3


def separate(llm: LLM, prompt: list[int], params: BeamSearchParams, stop_ids: list[int]) -> list[list[int]]:
    """Return the beams of `prompt`, best first, by requests of one token."""
    search = BeamSearch(params, stop_ids=stop_ids, max_tokens=params.max_tokens)
    one = SamplingParams(max_tokens=1, temperature=0.0, logprobs=search.num_candidates, detokenize=False)
    beams = [prompt]
    while True:
        outputs = llm.generate([{"prompt_token_ids": beam} for beam in beams], one, use_tqdm=False)
        candidates = []
        for output in outputs:
            (found,) = output.outputs[0].logprobs or [{}]
            best = sorted(found.items(), key=lambda item: -item[1].logprob)[: search.num_candidates]
            candidates.append(([token for token, _ in best], [entry.logprob for _, entry in best]))
        step = search.advance(candidates)
        if step.over:
            return [beam.token_ids for beam in search.beams()]
        beams = [[*beams[parent], token] for parent, token in step.running]


def inside(llm: LLM, prompt: list[int], params: BeamSearchParams) -> list[list[int]]:
    """Return the beams of `prompt` by the engine's own search."""
    (output,) = llm.beam_search([{"prompt_token_ids": prompt}], params)
    return [sequence.tokens[len(prompt) :] for sequence in output.sequences]


def peak_blocks(llm: LLM, run: object) -> int:
    """Return the most blocks in use at the end of any step of `run()`."""
    assert llm._engine is not None and callable(run)
    scheduler = llm._engine.scheduler
    most = 0
    schedule = scheduler.schedule

    def watched() -> object:
        nonlocal most
        plan = schedule()
        most = max(most, scheduler.kv.pool.num_blocks - scheduler.kv.pool.num_free)
        return plan

    scheduler.schedule = watched  # type: ignore[method-assign,assignment]
    try:
        run()
    finally:
        scheduler.schedule = schedule  # type: ignore[method-assign]
    return most


def best_of(repeats: int, run: object) -> float:
    """Return the shortest time of `run()` [s]."""
    assert callable(run)
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--model", default="quire-demo")
    parser.add_argument("--beam-width", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--output-tokens", type=int, default=64)
    parser.add_argument("--load-format", default="auto")
    args = parser.parse_args()
    options = {"load_format": args.load_format, "kv_cache_memory_bytes": 2**29}
    with LLM(args.model, **options) as llm, LLM(args.model, enable_prefix_caching=False, **options) as plain:
        size = llm.config.cache.block_size
        prompt = [(7 * index) % (llm.vocab_size - 1) + 1 for index in range(args.prompt_tokens)]
        rows = []
        for width in args.beam_width:
            params = BeamSearchParams(beam_width=width, max_tokens=args.output_tokens, ignore_eos=True)
            ours = inside(llm, prompt, params)
            theirs = separate(llm, prompt, params, [])
            if ours != theirs:
                raise SystemExit(f"width {width}: the beams differ")
            fast = best_of(REPEATS, lambda params=params: inside(llm, prompt, params))
            slow = best_of(REPEATS, lambda params=params: separate(llm, prompt, params, []))
            uncached = best_of(1, lambda params=params: separate(plain, prompt, params, []))
            llm.reset_prefix_cache()
            blocks = peak_blocks(llm, lambda params=params: inside(llm, prompt, params))
            one = math.ceil((args.prompt_tokens + args.output_tokens) / size)
            times = [f"{fast:.3f}", f"{slow:.3f}", f"{slow / fast:.1f}", f"{uncached:.3f}", f"{uncached / fast:.1f}"]
            rows.append([str(width), *times, str(blocks), str(one), str(one * width)])
    print_header(f"Beam search of {args.output_tokens} tokens after {args.prompt_tokens}, {args.model}")
    print_table(
        ["beams", "inside [s]", "separate [s]", "times", "uncached [s]", "times", "blocks", "of one", "of as many"],
        rows,
    )


if __name__ == "__main__":
    main()

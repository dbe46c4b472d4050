"""Self-consistency (Wang et al. 2022): sample several answers to a question, and return the most frequent one.

python examples/lang_self_consistency.py [--base-url http://127.0.0.1:8000/v1] [--samples 8]
"""

import argparse
from collections import Counter

from quire.lang import LocalBackend, OpenAIBackend, assistant, gen, program, system, user


@program
def vote(s, question, samples):
    """The forks share the question in the KV cache, and run in the same steps of the engine."""
    s += system("You are a helpful assistant.") + user(question)
    forks = s.fork(samples)
    for fork in forks:
        fork += assistant(gen("answer", max_tokens=24, temperature=1.5))
    s.join(forks)
    [(answer, votes)] = Counter(s["answer"]).most_common(1)
    s += assistant(answer)
    return answer, votes


parser = argparse.ArgumentParser()
parser.add_argument("--base-url", help="an OpenAI endpoint; without one the demo model runs in this process")
parser.add_argument("--samples", type=int, default=8)
args = parser.parse_args()

questions = ["What is 38 plus 47?", "What is the opposite of black?", 'Reverse the word "stone".']
inputs = [{"question": question, "samples": args.samples} for question in questions]
with OpenAIBackend(args.base_url) if args.base_url else LocalBackend() as backend:
    for question, state in zip(questions, vote.run_batch(inputs, backend=backend, seed=1), strict=True):
        answer, votes = state.value
        others = len(set(state["answer"])) - 1
        print(f"{question} -> {answer}  [{votes} of {args.samples}, {others} other answers]")
        if not args.base_url:
            cached = [capture.num_cached_tokens for capture in state.capture("answer")]
            print(f"  prompt tokens found in the cache, by fork: {cached}")

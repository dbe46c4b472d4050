"""Tree of thought (Yao et al. 2023): propose steps, rate them, continue with the best. The task is a sum.

python examples/lang_tree_of_thought.py [--base-url http://127.0.0.1:8000/v1] [17 25 31 12]
"""

import argparse
import re
from itertools import combinations

from quire.lang import LocalBackend, OpenAIBackend, assistant, gen, program, user


def ask(s, question, name, temperature=0.0):
    s += user(question) + assistant(gen(name, max_tokens=16, temperature=temperature))


def number(text):
    return int((re.findall(r"\d+", text) or ["0"])[-1])


def propose(s, left):
    """Begin a thought for each pair of numbers, and two checks of it. Nothing waits here: all run at the same time."""
    pairs = sorted(set(combinations(sorted(left), 2)))
    for (a, b), fork in zip(pairs, s.fork(len(pairs)), strict=True):
        ask(fork, f"What is {a} plus {b}?", "sum")
        checks = fork.fork(2)
        ask(checks[0], f"What is {b} plus {a}?", "check")
        ask(checks[1], f"How much is {a} plus {b}?", "check", temperature=1.5)
        yield fork, checks, left, a, b


def rating(thought):
    fork, checks, *_ = thought  # rated by how many of the checks say the same
    return sum(number(check["check"]) == number(fork["sum"]) for check in checks)


@program
def add(s, numbers, width):
    """Breadth-first over which two numbers to add next; each level keeps the `width` best thoughts."""
    level = [(s, list(numbers))]
    while len(level[0][1]) > 1:
        thoughts = [thought for state, left in level for thought in propose(state, left)]
        print(f"{len(thoughts)} thoughts, of which these are kept:")
        level = []
        for thought in sorted(thoughts, key=rating, reverse=True)[:width]:
            fork, _, left, a, b = thought
            rest = [*left, number(fork["sum"])]
            rest.remove(a), rest.remove(b)
            level.append((fork, rest))
            print(f"  {a} + {b} = {rest[-1]}, {rating(thought)} of 2 checks agree; left: {rest}")
    return level[0][1][0]


parser = argparse.ArgumentParser()
parser.add_argument("--base-url", help="an OpenAI endpoint; without one the demo model runs in this process")
parser.add_argument("numbers", type=int, nargs="*", default=[17, 25, 31, 12])
args = parser.parse_args()
with OpenAIBackend(args.base_url) if args.base_url else LocalBackend() as backend:
    state = add.run(args.numbers, width=2, backend=backend, seed=1)
    print(f"{' + '.join(map(str, args.numbers))} = {state.value} (should be {sum(args.numbers)})")

"""What the demo model can be asked, with the split into training and held-back cases, and the scorer.

A case is one question with the one right answer. Every case of a capability task belongs to exactly one of the
splits "train", "val" and "test" through a hash, so the split is the same on every machine; greetings and the like
are the same in all three. The corpus (`corpus.py`) draws training text from here; the measured scores in
`metrics.json` come from `held_back_cases`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from quire.demo.facts import FACTS, Topic

Split = Literal["train", "val", "test"]

CAPABILITY_TASKS = ("quire_qa", "add", "repeat", "reverse", "opposite")
"""The tasks the model is expected to do reliably; scores are published for these."""


@dataclass(frozen=True)
class Case:
    """One question and its answer; `key` is what the train/held-back split is decided on."""

    task: str
    key: str
    prompt: str
    answer: str


def split_of(key: str) -> Split:
    """Eight tenths of all keys are "train", one tenth "val", one tenth "test"; depends on nothing but the key."""
    digit = hashlib.sha256(key.encode()).digest()[0] % 10
    return "test" if digit == 0 else "val" if digit == 1 else "train"


def score(case: Case, reply: str) -> bool:
    """Return whether the reply is exactly the expected answer, up to surrounding white space."""
    return reply.strip() == case.answer


# ---- addition of two-digit numbers -------------------------------------------------------------------------------


def add_key(a: int, b: int) -> str:
    """Both orders of a pair share one key: a held-back sum is never seen in training in either order."""
    return f"add {min(a, b)} {max(a, b)}"


def _add_case(a: int, b: int, wording: str) -> Case:
    return Case("add", add_key(a, b), wording.format(a=a, b=b), f"{a} + {b} = {a + b}")


def _sample_add(rng: random.Random, split: Split) -> Case:
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if split_of(add_key(a, b)) == split:
            return _add_case(a, b, rng.choice(FACTS.add_wordings))


# ---- repeating and reversing a quoted word -----------------------------------------------------------------------

WORDS = tuple(FACTS.words.split())
REVERSE_WORDS = tuple(word for word in WORDS if 3 <= len(word) <= 6)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def word_key(word: str) -> str:
    """Repeating and reversing share the key: a held-back word occurs in neither task's training cases."""
    return f"word {word}"


def _word_case(task: str, word: str, wording: str) -> Case:
    result = word[::-1] if task == "reverse" else word
    return Case(task, word_key(word), wording.format(w=word), f'"{result}"')


def _sample_word(rng: random.Random, split: Split) -> str:
    """Return a listed word of the split, or in half of the training cases a made-up one of three to six letters."""
    while True:
        if split == "train" and rng.random() < 0.5:
            word = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
        else:
            word = rng.choice(REVERSE_WORDS)
        if split_of(word_key(word)) == split:
            return word


def _sample_repeat(rng: random.Random, split: Split) -> Case:
    return _word_case("repeat", _sample_word(rng, split), rng.choice(FACTS.repeat_wordings))


def _sample_reverse(rng: random.Random, split: Split) -> Case:
    return _word_case("reverse", _sample_word(rng, split), rng.choice(FACTS.reverse_wordings))


# ---- opposite colours --------------------------------------------------------------------------------------------

OPPOSITES = {a: b for pair in FACTS.colour_pairs for a, b in (pair, pair[::-1])}


def _opposite_case(colour: str, wording: str) -> Case:
    answer = f"The opposite of {colour} is {OPPOSITES[colour]}."
    return Case("opposite", f"opposite {wording}", wording.format(c=colour), answer)


def _sample_opposite(rng: random.Random, split: Split) -> Case:
    wordings = [w for w in FACTS.opposite_wordings if split_of(f"opposite {w}") == split]
    return _opposite_case(rng.choice(list(OPPOSITES)), rng.choice(wordings))


# ---- questions about Quire, small talk, unknown things -----------------------------------------------------------


@cache
def topic_questions(topic: Topic, split: Split) -> tuple[str, ...]:
    """Return wordings of one topic in one split; each topic has at least two held back for "test" and one for "val"."""
    stock = [wording.format(noun) for noun in topic.nouns for wording in FACTS.stock_wordings]
    questions = list(dict.fromkeys((*topic.questions, *stock)))
    questions.sort(key=lambda text: hashlib.sha256(f"{topic.name} {text}".encode()).digest())
    num_test = max(2, len(questions) // 10)
    num_val = max(1, len(questions) // 10)
    parts = {
        "test": questions[:num_test],
        "val": questions[num_test : num_test + num_val],
        "train": questions[num_test + num_val :],
    }
    return tuple(parts[split])


def _reword(rng: random.Random, text: str) -> str:
    """Make small changes that people make without changing the meaning: courtesy, lower case, a missing mark."""
    if rng.random() < 0.15:
        text = rng.choice(("Hi, ", "Hello! ", "Please tell me: ", "Question: ", "Hey, ", "OK. ", "And ", "So, ")) + text
    if rng.random() < 0.2:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    return text


def _sample_quire(rng: random.Random, split: Split) -> Case:
    topic = rng.choice(FACTS.topics)
    question = rng.choice(topic_questions(topic, split))
    prompt = _reword(rng, question) if split == "train" else question
    return Case("quire_qa", f"{topic.name} {question}", prompt, topic.answer)


def _sample_small_talk(rng: random.Random, split: Split) -> Case:
    group, answer = rng.choices(
        (
            (FACTS.greetings, FACTS.greeting_answer),
            (FACTS.thanks, FACTS.thanks_answer),
            (FACTS.farewells, FACTS.farewell_answer),
        ),
        weights=(3, 1, 1),
    )[0]
    text = rng.choice(group)
    return Case("small_talk", f"small talk {text}", _reword(rng, text) if split == "train" else text, answer)


def _sample_unknown(rng: random.Random, split: Split) -> Case:
    while True:
        subject = rng.choice(FACTS.unknown_subjects)
        wording = rng.choice(FACTS.unknown_wordings)
        key = f"unknown {subject} {wording}"
        if split_of(key) == split:
            return Case("unknown", key, wording.format(subject), FACTS.unknown_answer)


SAMPLERS: dict[str, Callable[[random.Random, Split], Case]] = {
    "quire_qa": _sample_quire,
    "add": _sample_add,
    "repeat": _sample_repeat,
    "reverse": _sample_reverse,
    "opposite": _sample_opposite,
    "small_talk": _sample_small_talk,
    "unknown": _sample_unknown,
}

TASK_WEIGHTS = {
    "quire_qa": 0.26,
    "add": 0.20,
    "repeat": 0.08,
    "reverse": 0.26,
    "opposite": 0.08,
    "small_talk": 0.05,
    "unknown": 0.07,
}
"""How often each task is drawn for the corpus; the tasks that take long to learn are drawn more often."""


def sample_case(rng: random.Random, split: Split) -> Case:
    """Draw a task by its weight and then a case of the split."""
    task = rng.choices(list(TASK_WEIGHTS), weights=list(TASK_WEIGHTS.values()))[0]
    return SAMPLERS[task](rng, split)


def held_back_cases(task: str, limit: int | None = None, seed: int = 0) -> list[Case]:
    """Return cases of the test split of one of CAPABILITY_TASKS, shuffled by the seed and cut to `limit`.

    Raises KeyError for another task.
    """
    everything: dict[str, Callable[[], list[Case]]] = {
        "quire_qa": _held_back_quire,
        "add": _held_back_add,
        "repeat": lambda: _held_back_words("repeat", FACTS.repeat_wordings),
        "reverse": lambda: _held_back_words("reverse", FACTS.reverse_wordings),
        "opposite": _held_back_opposite,
    }
    cases = everything[task]()
    random.Random(seed).shuffle(cases)
    return cases if limit is None else cases[:limit]


def _held_back_quire() -> list[Case]:
    return [
        Case("quire_qa", f"{topic.name} {question}", question, topic.answer)
        for topic in FACTS.topics
        for question in topic_questions(topic, "test")
    ]


def _held_back_add() -> list[Case]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if split_of(add_key(a, b)) == "test"]
    return [_add_case(a, b, FACTS.add_wordings[(a + b) % len(FACTS.add_wordings)]) for a, b in pairs]


def _held_back_words(task: str, wordings: tuple[str, ...]) -> list[Case]:
    words = [word for word in REVERSE_WORDS if split_of(word_key(word)) == "test"]
    return [_word_case(task, word, wording) for word in words for wording in wordings]


def _held_back_opposite() -> list[Case]:
    wordings = [w for w in FACTS.opposite_wordings if split_of(f"opposite {w}") == "test"]
    return [_opposite_case(colour, wording) for wording in wordings for colour in OPPOSITES]

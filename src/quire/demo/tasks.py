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

from quire.demo import facts

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
    """True if the reply is exactly the expected answer, up to surrounding white space."""
    return reply.strip() == case.answer


# ---- addition of two-digit numbers -------------------------------------------------------------------------------

ADD_WORDINGS = (
    "What is {a} + {b}?",
    "What is {a} plus {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "Compute {a} + {b}.",
    "Calculate {a} + {b}.",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "What is the sum of {a} and {b}?",
    "Please add {a} and {b}.",
)


def add_key(a: int, b: int) -> str:
    """Both orders of a pair share one key: a held-back sum is never seen in training in either order."""
    return f"add {min(a, b)} {max(a, b)}"


def _add_case(a: int, b: int, wording: str) -> Case:
    return Case("add", add_key(a, b), wording.format(a=a, b=b), f"{a} + {b} = {a + b}")


def _sample_add(rng: random.Random, split: Split) -> Case:
    while True:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        if split_of(add_key(a, b)) == split:
            return _add_case(a, b, rng.choice(ADD_WORDINGS))


# ---- repeating and reversing a quoted word -----------------------------------------------------------------------

_WORD_LIST = """
able acid age air also apple area arm army art atom aunt axe baby back bag ball band bank bar base bath beach
bean bear bed bee bell belt bench bird bit blade block boat body bone book boot born boss bowl box boy brain
brave bread brick broom brush bus cab cable cage cake call calm camel camp can cap car card care cart case cash
castle cat cave chain chair chalk cheese child chin city clay clean cliff clock cloth cloud club coal coast coat
code coin cold comb cook copy corn cost cow crab crane cream crow crown cube cup curve dance dark dawn day deer
desk dew dice dirt dish dog doll door dot dove dragon dream dress drum duck dust duty eagle ear earth east edge
egg elbow end engine error face fact fair farm fast father fear feather fence field fig fin finger fire fish fist
flag flame flat floor flour flute fog food foot forest fork fox frame friend frog fruit game garden gate gift
girl glass glove goat gold goose grain grape grass ground guest hair hall hammer hand hat hawk head heart hen
herb hill honey hook horn horse hotel hour house hunt ice idea inch ink iron island jar jaw jelly jewel job joke
judge juice jump key king kite knee knife lake lamp land lawn leaf leg lemon letter lid life light lily line
lion lip list lock log lunch magic maid mail map maple mask meal meat metal milk mill mint mist monkey month
moon moss mother mouse mouth name neck needle nest net night noise north nose note nurse nut oak ocean oil olive
onion orange oven owl page pail paint pair palm pan paper park path peach pear pen pepper pig pillow pin pine
pipe pit plane plant plate plum pocket poem point pond pool pot potato prince print queen quick quiet quilt rabbit
rain rat raven red rice ride ring river road robe robin rock roof room root rope rose rug ruler sail salad salt
sand scarf school sea seed shade sheep shelf shell ship shirt shoe shop silk silver sink sister skin sky sleep
smile smoke snail snake snow soap sock soil song soup south spade spark spider spoon spring square star steam
steel stem step stick stone store storm story straw street string sugar suit summer sun swan sword table tail
tank tea team tent thorn throne thumb tiger tile time toad toast toe tool tooth top tower town toy track train
tray tree truck tub tulip turtle twig uncle valley van vase veil vine violin voice wagon wall wand water wave wax
web well west whale wheat wheel wind window wine wing winter wolf woman wood wool word work world worm yard year
"""
WORDS = tuple(_WORD_LIST.split())
REVERSE_WORDS = tuple(word for word in WORDS if 3 <= len(word) <= 6)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

REPEAT_WORDINGS = (
    'Repeat the word "{w}".',
    'Repeat "{w}".',
    'Repeat: "{w}"',
    'Say "{w}".',
    'Say the word "{w}".',
    'Please repeat "{w}".',
    'Please say "{w}".',
    'Repeat after me: "{w}"',
    'Can you repeat "{w}"?',
    'Write the word "{w}".',
)
REVERSE_WORDINGS = (
    'Reverse the word "{w}".',
    'Reverse "{w}".',
    'Reverse: "{w}"',
    'Please reverse "{w}".',
    'Please reverse the word "{w}".',
    'Can you reverse "{w}"?',
    'What is "{w}" backwards?',
    'Spell "{w}" backwards.',
    'Write "{w}" backwards.',
    'Say "{w}" backwards.',
)


def word_key(word: str) -> str:
    """Repeating and reversing share the key: a held-back word occurs in neither task's training cases."""
    return f"word {word}"


def _word_case(task: str, word: str, wording: str) -> Case:
    result = word[::-1] if task == "reverse" else word
    return Case(task, word_key(word), wording.format(w=word), f'"{result}"')


def _sample_word(rng: random.Random, split: Split) -> str:
    """A listed word of the split, or in half of the training cases a made-up one of three to six letters."""
    while True:
        if split == "train" and rng.random() < 0.5:
            word = "".join(rng.choices(LETTERS, k=rng.randint(3, 6)))
        else:
            word = rng.choice(REVERSE_WORDS)
        if split_of(word_key(word)) == split:
            return word


def _sample_repeat(rng: random.Random, split: Split) -> Case:
    return _word_case("repeat", _sample_word(rng, split), rng.choice(REPEAT_WORDINGS))


def _sample_reverse(rng: random.Random, split: Split) -> Case:
    return _word_case("reverse", _sample_word(rng, split), rng.choice(REVERSE_WORDINGS))


# ---- opposite colours --------------------------------------------------------------------------------------------

COLOUR_PAIRS = (
    ("black", "white"),
    ("red", "green"),
    ("blue", "orange"),
    ("yellow", "purple"),
    ("gold", "silver"),
    ("pink", "teal"),
    ("brown", "cyan"),
    ("grey", "crimson"),
)
OPPOSITES = {a: b for pair in COLOUR_PAIRS for a, b in (pair, pair[::-1])}

OPPOSITE_WORDINGS = (
    "What is the opposite of {c}?",
    "What is the opposite of the colour {c}?",
    "What's the opposite of {c}?",
    "Opposite of {c}?",
    "The opposite of {c}?",
    "The opposite of {c} is",
    "Name the opposite of {c}.",
    "Name the opposite colour of {c}.",
    "Tell me the opposite of {c}.",
    "Which colour is the opposite of {c}?",
    "Which colour is opposite to {c}?",
    "What colour is opposite to {c}?",
    "Give me the opposite of {c}.",
    "Give the opposite colour of {c}.",
    "Please name the opposite of {c}.",
    "Can you name the opposite of {c}?",
    "Do you know the opposite of {c}?",
    "What colour is the opposite of {c}?",
    "What is the opposite colour of {c}?",
    "Say the opposite of {c}.",
    "I need the opposite of {c}.",
    "Which colour do you get as the opposite of {c}?",
    "If the colour is {c}, what is the opposite?",
    "My colour is {c}. What is the opposite?",
)


def _opposite_case(colour: str, wording: str) -> Case:
    answer = f"The opposite of {colour} is {OPPOSITES[colour]}."
    return Case("opposite", f"opposite {wording}", wording.format(c=colour), answer)


def _sample_opposite(rng: random.Random, split: Split) -> Case:
    wordings = [w for w in OPPOSITE_WORDINGS if split_of(f"opposite {w}") == split]
    return _opposite_case(rng.choice(list(OPPOSITES)), rng.choice(wordings))


# ---- questions about Quire, small talk, unknown things -----------------------------------------------------------


@cache
def topic_questions(topic: facts.Topic, split: Split) -> tuple[str, ...]:
    """Wordings of one topic in one split; each topic has at least two held back for "test" and one for "val"."""
    stock = [wording.format(noun) for noun in topic.nouns for wording in facts.STOCK_WORDINGS]
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
    """Small changes that people make without changing the meaning: courtesy, lower case, a missing mark."""
    if rng.random() < 0.15:
        text = rng.choice(("Hi, ", "Hello! ", "Please tell me: ", "Question: ", "Hey, ", "OK. ", "And ", "So, ")) + text
    if rng.random() < 0.2:
        text = text.lower()
    if rng.random() < 0.2:
        text = text.rstrip("?.!")
    return text


def _sample_quire(rng: random.Random, split: Split) -> Case:
    topic = rng.choice(facts.TOPICS)
    question = rng.choice(topic_questions(topic, split))
    prompt = _reword(rng, question) if split == "train" else question
    return Case("quire_qa", f"{topic.name} {question}", prompt, topic.answer)


def _sample_small_talk(rng: random.Random, split: Split) -> Case:
    group, answer = rng.choices(
        (
            (facts.GREETINGS, facts.GREETING_ANSWER),
            (facts.THANKS, facts.THANKS_ANSWER),
            (facts.FAREWELLS, facts.FAREWELL_ANSWER),
        ),
        weights=(3, 1, 1),
    )[0]
    text = rng.choice(group)
    return Case("small_talk", f"small talk {text}", _reword(rng, text) if split == "train" else text, answer)


def _sample_unknown(rng: random.Random, split: Split) -> Case:
    while True:
        subject = rng.choice(facts.UNKNOWN_SUBJECTS)
        wording = rng.choice(facts.UNKNOWN_WORDINGS)
        key = f"unknown {subject} {wording}"
        if split_of(key) == split:
            return Case("unknown", key, wording.format(subject), facts.UNKNOWN_ANSWER)


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
    """Cases of the test split of one of CAPABILITY_TASKS, shuffled by the seed and cut to `limit`.

    Raises KeyError for another task.
    """
    everything: dict[str, Callable[[], list[Case]]] = {
        "quire_qa": _held_back_quire,
        "add": _held_back_add,
        "repeat": lambda: _held_back_words("repeat", REPEAT_WORDINGS),
        "reverse": lambda: _held_back_words("reverse", REVERSE_WORDINGS),
        "opposite": _held_back_opposite,
    }
    cases = everything[task]()
    random.Random(seed).shuffle(cases)
    return cases if limit is None else cases[:limit]


def _held_back_quire() -> list[Case]:
    return [
        Case("quire_qa", f"{topic.name} {question}", question, topic.answer)
        for topic in facts.TOPICS
        for question in topic_questions(topic, "test")
    ]


def _held_back_add() -> list[Case]:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if split_of(add_key(a, b)) == "test"]
    return [_add_case(a, b, ADD_WORDINGS[(a + b) % len(ADD_WORDINGS)]) for a, b in pairs]


def _held_back_words(task: str, wordings: tuple[str, ...]) -> list[Case]:
    words = [word for word in REVERSE_WORDS if split_of(word_key(word)) == "test"]
    return [_word_case(task, word, wording) for word in words for wording in wordings]


def _held_back_opposite() -> list[Case]:
    wordings = [w for w in OPPOSITE_WORDINGS if split_of(f"opposite {w}") == "test"]
    return [_opposite_case(colour, wording) for wording in wordings for colour in OPPOSITES]

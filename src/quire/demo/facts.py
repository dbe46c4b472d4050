"""What the demo model knows, and the wordings in which it is asked: `facts.json`, read and checked.

Only data lives here. Which wordings are trained on and which are held back is decided in `tasks.py`.
"""

from __future__ import annotations

from importlib import resources

import msgspec


class Topic(msgspec.Struct, frozen=True):
    """One subject: `nouns` are put into the stock wordings, `questions` are asked as they are."""

    name: str
    answer: str
    nouns: tuple[str, ...] = ()
    questions: tuple[str, ...] = ()


class Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All texts of the tasks. Wordings have a place for what they ask about, as `str.format` takes it.

    Attributes:
        words: words to repeat and to reverse, separated by spaces.
    """

    stock_wordings: tuple[str, ...]
    topics: tuple[Topic, ...]
    greetings: tuple[str, ...]
    greeting_answer: str
    thanks: tuple[str, ...]
    thanks_answer: str
    farewells: tuple[str, ...]
    farewell_answer: str
    unknown_wordings: tuple[str, ...]
    unknown_subjects: tuple[str, ...]
    unknown_answer: str
    system_prompts: tuple[str, ...]
    add_wordings: tuple[str, ...]
    repeat_wordings: tuple[str, ...]
    reverse_wordings: tuple[str, ...]
    opposite_wordings: tuple[str, ...]
    colour_pairs: tuple[tuple[str, str], ...]
    words: str


FACTS = msgspec.json.decode(resources.files(__package__).joinpath("facts.json").read_bytes(), type=Facts)

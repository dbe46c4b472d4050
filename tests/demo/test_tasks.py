"""The demo model's tasks: disjoint splits, right answers, scorers that can fail, a corpus that repeats."""

from __future__ import annotations

import json
import random

import pytest

from quire.demo import corpus
from quire.demo.facts import FACTS
from quire.demo.tasks import (
    CAPABILITY_TASKS,
    OPPOSITES,
    SAMPLERS,
    TASK_WEIGHTS,
    WORDS,
    Case,
    held_back_cases,
    sample_case,
    score,
    split_of,
    topic_questions,
)


def keys(task: str, split: str, draws: int = 1000) -> set[str]:
    rng = random.Random(f"{task} {split}")
    return {SAMPLERS[task](rng, split).key for _ in range(draws)}  # type: ignore[arg-type]


@pytest.mark.parametrize("task", CAPABILITY_TASKS)
def test_no_held_back_case_is_ever_drawn_for_training(task: str) -> None:
    held_back = {case.key for case in held_back_cases(task)}
    assert held_back
    assert not held_back & keys(task, "train")
    assert not held_back & keys(task, "val")
    assert keys(task, "test") <= held_back


@pytest.mark.parametrize("task", CAPABILITY_TASKS)
def test_no_held_back_question_is_asked_in_training_in_any_wording(task: str) -> None:
    held_back = {case.prompt.lower().rstrip("?.!") for case in held_back_cases(task)}
    rng = random.Random(1)
    questions = {SAMPLERS[task](rng, "train").prompt.lower().rstrip("?.!") for _ in range(2000)}
    assert not held_back & questions


def test_splits_have_about_the_stated_shares() -> None:
    splits = [split_of(f"key {i}") for i in range(5000)]
    for split, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
        assert splits.count(split) / 5000 == pytest.approx(share, abs=0.02)  # type: ignore[arg-type]


def test_both_orders_of_a_sum_are_held_back_together() -> None:
    prompts = {tuple(sorted(case.answer.split(" = ")[0].split(" + "))) for case in held_back_cases("add")}
    in_order = {tuple(case.answer.split(" = ")[0].split(" + ")) for case in held_back_cases("add")}
    assert all((a, b) in in_order and (b, a) in in_order for a, b in prompts)


def test_answers_are_right() -> None:
    for case in held_back_cases("add"):
        left, result = case.answer.split(" = ")
        assert sum(int(number) for number in left.split(" + ")) == int(result)
    for case in held_back_cases("reverse"):
        assert f'"{case.answer.strip(chr(34))[::-1]}"' in case.prompt
    for case in held_back_cases("repeat"):
        assert case.answer in case.prompt


def test_opposites_form_a_symmetric_table_without_fixed_points() -> None:
    assert len(OPPOSITES) == 2 * len(FACTS.colour_pairs)
    assert all(OPPOSITES[OPPOSITES[colour]] == colour != OPPOSITES[colour] for colour in OPPOSITES)


def test_every_topic_holds_back_at_least_two_wordings_and_trains_on_more() -> None:
    assert len(FACTS.topics) >= 12
    for topic in FACTS.topics:
        train, val, test = (set(topic_questions(topic, split)) for split in ("train", "val", "test"))
        assert len(test) >= 2 and val and len(train) >= 2 * len(test)
        assert not train & test and not train & val and not val & test


def test_no_question_belongs_to_two_topics() -> None:
    seen: dict[str, str] = {}
    for topic in FACTS.topics:
        for split in ("train", "val", "test"):
            for question in topic_questions(topic, split):  # type: ignore[arg-type]
                assert seen.setdefault(question.lower(), topic.name) == topic.name


def test_the_scorer_accepts_only_the_answer() -> None:
    case = Case("add", "k", "What is 12 + 34?", "12 + 34 = 46")
    assert score(case, " 12 + 34 = 46\n")
    for wrong in ("", "46", "12 + 34 = 47", "12 + 34 = 46 and more", "12 + 34 = 460"):
        assert not score(case, wrong)


def test_limit_and_seed_choose_a_repeatable_part() -> None:
    part = held_back_cases("add", limit=20, seed=4)
    assert part == held_back_cases("add", seed=4)[:20] != held_back_cases("add", limit=20, seed=5)


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(KeyError):
        held_back_cases("juggle")


def test_words_are_plain_and_listed_once() -> None:
    assert len(set(WORDS)) == len(WORDS)
    assert all(word.isascii() and word.islower() and word.isalpha() for word in WORDS)


def test_every_task_is_drawn_about_as_often_as_its_weight_says() -> None:
    rng = random.Random(2)
    drawn = [sample_case(rng, "train").task for _ in range(4000)]
    for task, weight in TASK_WEIGHTS.items():
        assert drawn.count(task) / 4000 == pytest.approx(weight, abs=0.03)


def test_corpus_repeats_with_its_seed_and_alternates_roles(capsys: pytest.CaptureFixture[str]) -> None:
    dialogues = list(corpus.conversations(7, "train", 200))
    assert dialogues == list(corpus.conversations(7, "train", 200)) != list(corpus.conversations(8, "train", 200))
    assert any(len(dialogue) >= 6 for dialogue in dialogues)
    for dialogue in dialogues:
        roles = [message["role"] for message in dialogue if message["role"] != "system"]
        assert roles == ["user", "assistant"] * (len(roles) // 2) and roles
    assert corpus.main(["--seed", "7", "--count", "3"]) == 0
    printed = [json.loads(line)["messages"] for line in capsys.readouterr().out.splitlines()]
    assert printed == dialogues[:3]

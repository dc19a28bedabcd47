"""The tasks of examples/grpo.py: short questions by template, the rule that rewards answers, and a held-out fifth.

A fact makes two questions, with different phrasings. Both are trained on, or both are held out.
"""

from __future__ import annotations

import functools
import random
import re
import unicodedata
from dataclasses import asdict, dataclass
from typing import Any

INSTRUCTION = "Answer in a few words."
MAX_WORDS = 6
HELD_OUT = 5
"""One fact in so many, of each kind, is held out."""

FACTS = (  # phrasings, {0} = {1}; one that contains {1} asks for {0}; a|b: either is right
    (
        ("What is the capital of {0}?", "Name the capital city of {0}.", "Which country has {1} as its capital?"),
        "France=Paris, Italy=Rome, Japan=Tokyo, Spain=Madrid, Germany=Berlin, England=London, Russia=Moscow, "
        "Egypt=Cairo, China=Beijing, Greece=Athens, Portugal=Lisbon, Austria=Vienna, Ireland=Dublin, Norway=Oslo, "
        "Sweden=Stockholm, Finland=Helsinki, Denmark=Copenhagen, Poland=Warsaw, Hungary=Budapest, Turkey=Ankara, "
        "Canada=Ottawa, Australia=Canberra, Cuba=Havana, Peru=Lima, Chile=Santiago, Kenya=Nairobi, "
        "Thailand=Bangkok, Vietnam=Hanoi, Iran=Tehran, Iraq=Baghdad, Belgium=Brussels, Scotland=Edinburgh, "
        "Argentina=Buenos Aires, Ukraine=Kyiv|Kiev, India=New Delhi|Delhi",
    ),
    (
        ("What is the opposite of {0}?", "Give the opposite of the word {0}.", "Which word means the opposite of {0}?"),
        "hot=cold, up=down, big=small|little, night=day, fast=slow, happy=sad|unhappy, full=empty, old=young|new, "
        "open=closed|close|shut, left=right, rich=poor, strong=weak, early=late, light=dark|darkness|heavy, wet=dry, "
        "loud=quiet|soft|silent, hard=easy|soft, good=bad|evil, war=peace, love=hate, true=false, win=lose|loss",
    ),
    (
        (
            "What is the past tense of {0}?",
            "Give the past tense of the verb {0}.",
            "Put the verb {0} into the past tense.",
        ),
        "go=went, eat=ate, see=saw, run=ran, take=took, give=gave, come=came, write=wrote, speak=spoke, break=broke, "
        "buy=bought, think=thought, sing=sang, swim=swam, fly=flew, drive=drove, know=knew, grow=grew, sleep=slept, "
        "teach=taught, find=found, begin=began",
    ),
    (
        ("What is the plural of {0}?", "Give the plural of the noun {0}.", "More than one {0} are called what?"),
        "mouse=mice, child=children, man=men, woman=women, foot=feet, tooth=teeth, goose=geese, knife=knives, "
        "leaf=leaves, person=people, wolf=wolves, box=boxes, city=cities, baby=babies, potato=potatoes",
    ),
    (
        ("What is a young {0} called?", "A baby {0} is called what?", "What do you call a baby {0}?"),
        "dog=puppy|pup, cat=kitten, cow=calf, sheep=lamb, horse=foal, bear=cub, duck=duckling, goat=kid, "
        "frog=tadpole, deer=fawn",
    ),
    (
        (
            "Which language do people speak in {0}?",
            "What is the main language of {0}?",
            "{1} is the language of which country?",
        ),
        "France=French, Italy=Italian, Japan=Japanese, Russia=Russian, Greece=Greek, Turkey=Turkish, Poland=Polish, "
        "Sweden=Swedish, Finland=Finnish, Hungary=Hungarian",
    ),
)
SUMS = ("What is {0} + {1}?", "What is {0} plus {1}?", "Add {0} and {1}.", "Calculate {0} + {1}.")
NUM_SUMS = 125

FILLER = frozenset(
    "a an the is are was it its it's this that of in to as and or called answer sum equals plus equal they".split()
)
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?|-?\d+")
NEGATION = re.compile(r"not|no|never|neither|nor|without|wrong|false|.*n't")


@dataclass(frozen=True, slots=True)
class Question:
    task: str
    text: str
    answers: tuple[str, ...]
    """Any of them is right."""
    held_out: bool

    def prompt(self) -> dict[str, Any]:
        """A rollout's prompt; `asked` is returned in the group's `info`, on every rank as JSON."""
        messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": self.text}]
        return {"messages": messages, "asked": asdict(self)}


@functools.cache
def questions(task: str) -> tuple[Question, ...]:
    """task: "facts" or "sums"."""
    made = []
    for phrasings, facts in FACTS if task == "facts" else [(SUMS, sums())]:
        for number, fact in enumerate(facts.split(", ")):
            key, value = fact.split("=")
            for offset in range(2):
                phrasing = phrasings[(number + offset) % len(phrasings)]
                if task == "sums":
                    text, answer = phrasing.format(*key.split("+")), value
                else:
                    text, answer = phrasing.format(key, value.split("|")[0]), key if "{1}" in phrasing else value
                made.append(Question(task, text, tuple(answer.split("|")), number % HELD_OUT == HELD_OUT - 1))
    return tuple(made)


def sums() -> str:
    """Pairs of two-digit numbers, each with another sum, as `23+45=68, ...`."""
    draw, pairs = random.Random("sums"), {}
    while len(pairs) < NUM_SUMS:
        first, second = draw.randrange(10, 100), draw.randrange(10, 100)
        pairs.setdefault(first + second, f"{first}+{second}={first + second}")
    return ", ".join(pairs.values())


@functools.lru_cache(maxsize=4096)
def words(text: str) -> tuple[str, ...]:
    """Words and numbers, in lower case, without accents and punctuation."""
    plain = unicodedata.normalize("NFKD", text.lower().replace("’", "'"))
    return tuple(WORD.findall("".join(c for c in plain if not unicodedata.combining(c))))


@functools.cache
def answer_words(task: str) -> frozenset[str]:
    return frozenset(word for question in questions(task) for answer in question.answers for word in words(answer))


def reward(text: str, finish_reason: str, question: Question) -> float:
    """1, 0.5 or 0 for an answer.

    What a text says are its words that are neither in the question nor in FILLER.
    1: it says the answer and nothing else, in at most MAX_WORDS words, and ends there.
    0.5: it says the answer first, and after it neither another question's answer, nor a number, nor a negation.
    0: everything else: a list of candidates, "not Paris", nothing.
    """
    asked = words(question.text)
    says = [word for word in words(text) if word not in asked and word not in FILLER]
    for answer in question.answers:
        wanted = list(words(answer))
        if says[: len(wanted)] != wanted:
            continue
        rest = [word for word in says[len(wanted) :] if word not in wanted]
        if not rest and in_form(text, finish_reason):
            return 1.0
        if not any(
            word in answer_words(question.task) or word[-1].isdigit() or NEGATION.fullmatch(word) for word in rest
        ):
            return 0.5
    return 0.0


def in_form(text: str, finish_reason: str) -> bool:
    """Whether an answer, right or wrong, has at most MAX_WORDS words and ends by itself."""
    return finish_reason == "stop" and 0 < len(text.split()) <= MAX_WORDS


def batch(task: str, step: int, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` prompts of a step: all questions that are not held out in a random order, then again in another order."""
    learned = [question for question in questions(task) if not question.held_out]
    first, order = step * count, list[Question]()
    for round_ in range(first // len(learned), (first + count - 1) // len(learned) + 1):
        order += random.Random(f"{seed}/{round_}").sample(learned, len(learned))
    skip = first % len(learned)
    return [question.prompt() for question in order[skip : skip + count]]

"""The task of examples/grpo.py: answer a question correctly, in a few words, and stop. A rule computes the reward."""

from __future__ import annotations

import random
import re
from typing import Any

INSTRUCTION = "Answer in a few words."
MAX_WORDS = 6

QUESTIONS = {  # question: answer, or answers
    "What is the capital of France?": "Paris",
    "What is the capital of Italy?": "Rome",
    "What is the capital of Japan?": "Tokyo",
    "What is the capital of Spain?": "Madrid",
    "What is the capital of Germany?": "Berlin",
    "What is the capital of England?": "London",
    "What is the capital of Russia?": "Moscow",
    "What is the capital of Egypt?": "Cairo",
    "What color is grass?": "green",
    "What color is snow?": "white",
    "What color is the sky?": "blue",
    "What color is a banana?": "yellow",
    "What is the opposite of hot?": "cold",
    "What is the opposite of up?": "down",
    "What is the opposite of big?": "small",
    "What is the opposite of night?": "day",
    "Which animal barks?": "dog",
    "Which animal says meow?": "cat",
    "Which animal gives us milk?": "cow",
    "Which insect makes honey?": "bee",
    "Which planet do we live on?": "Earth",
    "Which star warms the Earth?": "Sun",
    "How many days are in a week?": "seven|7",
    "How many months are in a year?": "twelve|12",
}


def reward(text: str, finish_reason: str, answer: str) -> float:
    """1: correct, at most MAX_WORDS words, ended by the model; 0.5: correct but longer or cut off; 0: wrong."""
    if not re.search(rf"\b({answer})\b", text, re.IGNORECASE):
        return 0.0
    return 1.0 if finish_reason == "stop" and len(text.split()) <= MAX_WORDS else 0.5


def prompt_of(question: str) -> dict[str, Any]:
    """A rollout's prompt; the answer is returned in the group's `info`."""
    messages = [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": question}]
    return {"messages": messages, "question": question, "answer": QUESTIONS[question]}


def batch(step: int, count: int, seed: int) -> list[dict[str, Any]]:
    """`count` prompts of a step: all questions in a random order, then again in another order."""
    first, order = step * count, list[str]()
    for round_ in range(first // len(QUESTIONS), (first + count - 1) // len(QUESTIONS) + 1):
        order += random.Random(f"{seed}/{round_}").sample(list(QUESTIONS), len(QUESTIONS))
    skip = first % len(QUESTIONS)
    return [prompt_of(question) for question in order[skip : skip + count]]


def whole() -> list[dict[str, Any]]:
    """Every question once."""
    return [prompt_of(question) for question in QUESTIONS]

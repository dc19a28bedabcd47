"""Sentences of a small grammar: numbers to 999, times, short statements. The model speaks them, the judge hears them.

The grammar is also the judge's: `jsgf()` writes it in the Java Speech Grammar Format.
"""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter
from collections.abc import Iterator

RULES: dict[str, str] = {
    "sentence": "<statement> | <arrival> | <purchase> | <count> | <place> | <weather> | <request> | <price>",
    "statement": "the <adjective> <person> <deed> the <adjective> <thing>",
    "arrival": "the <vehicle> <moves> at <time> | the <vehicle> from <town> <moves> at <time>",
    "purchase": "<who> bought <number> <things> in <town> | <who> sold <number> <adjective> <things>",
    "count": "<number> <things> left the <location> | there are <number> <things> in the <location>",
    "place": "the <thing> is <where> the <adjective> <location> | the <person> lives <where> the <location>",
    "weather": "it will be <sky> in <town> on <day> | on <day> it was <sky> and <sky>",
    "request": "please <act> the <adjective> <thing> | please call the <person> at <time>",
    "price": "the <thing> costs <number> dollars | <number> and <number> make a <size> number",
    "who": "she | he | we | they | the <person>",
    "number": "<below> | <unit> hundred | <unit> hundred and <below>",
    "below": "<unit> | <teen> | <tens> | <tens> <unit>",
    "unit": "one | two | three | four | five | six | seven | eight | nine",
    "teen": ("ten | eleven | twelve | thirteen | fourteen | fifteen | sixteen | seventeen | eighteen | nineteen"),
    "tens": "twenty | thirty | forty | fifty | sixty | seventy | eighty | ninety",
    "time": "<hour> | <hour> thirty | <hour> fifteen | half past <hour> | <quarter> <hour> | noon | midnight",
    "hour": "one | two | three | four | five | six | seven | eight | nine | ten | eleven | twelve",
    "quarter": "a quarter past | a quarter to",
    "adjective": (
        "old | new | small | large | red | green | blue | white | black | heavy | quiet | broken | clean | cold | warm"
    ),
    "person": (
        "doctor | teacher | farmer | captain | sailor | painter | child | mother | father | brother | sister | king"
    ),
    "deed": "found | opened | painted | carried | lost | wanted | sold | followed | washed | moved",
    "thing": "box | door | table | letter | window | bottle | hammer | garden | picture | basket | ladder | wheel",
    "things": "ships | apples | horses | books | chairs | candles | pencils | spoons | tickets | windows | boxes",
    "vehicle": "train | bus | ferry | plane | taxi",
    "moves": "leaves | arrives | returns | stops",
    "town": "london | paris | boston | dublin | berlin | madrid",
    "location": "harbor | market | station | kitchen | museum | forest | river | village | school | castle",
    "where": "behind | near | under | beside | inside",
    "sky": "sunny | cloudy | windy | rainy | dry | cold | warm",
    "day": "monday | tuesday | wednesday | thursday | friday | saturday | sunday",
    "act": "open | close | clean | move | paint | carry | bring | sell",
    "size": "small | large",
}
"""Each rule: alternatives, whose words in <> are rules. Every other word is spoken."""

_PARTS = {name: [one.split() for one in body.split(" | ")] for name, body in RULES.items()}


def sentence(rng: random.Random, *, rule: str = "sentence") -> str:
    """One drawn sentence, in lower case, without punctuation."""
    words = []
    for part in rng.choice(_PARTS[rule]):
        words.append(sentence(rng, rule=part[1:-1]) if part.startswith("<") else part)
    return " ".join(words)


def sentences(count: int, *, seed: int, without: frozenset[str] = frozenset()) -> list[str]:
    """Different sentences, none of them in `without`."""
    rng, found = random.Random(seed), dict.fromkeys(without)
    while len(found) < count + len(without):
        found[sentence(rng)] = None
    return [one for one in found if one not in without]


def vocabulary() -> list[str]:
    """The words of the grammar, sorted."""
    return sorted({part for rule in _PARTS.values() for words in rule for part in words if not part.startswith("<")})


def jsgf() -> str:
    """The grammar for a recogniser."""
    rules = "".join(f"<{name}> = {body};\n" for name, body in RULES.items() if name != "sentence")
    return f"#JSGF V1.0;\ngrammar speech;\npublic <sentence> = {RULES['sentence']};\n{rules}"


def plain(text: str) -> str:
    """Text as the grammar writes it: lower case, no punctuation."""
    return " ".join(re.findall(r"[a-z']+", text.lower()))


def held_out(count: int = 100) -> list[str]:
    """The sentences that no training sees."""
    return sentences(count, seed=1)


def balanced(phrases: Iterator[list[str]], *, candidates: int = 8) -> Iterator[list[str]]:
    """Yield one of every `candidates` phrases, the one whose rarest word was drawn least, so that words are drawn about
    equally often."""
    spoken = Counter[str]()
    while drawn := list(itertools.islice(phrases, candidates)):
        best = min(drawn, key=lambda words: min(spoken[word] for word in words))
        spoken.update(best)
        yield best


def training(*, seed: int) -> Iterator[str]:
    """Sentences without end, none of them held out."""
    rng, kept = random.Random(seed), frozenset(held_out())
    while True:
        one = sentence(rng)
        if one not in kept:
            yield one

"""Instructor: every mode of its OpenAI and Anthropic clients."""

import warnings
from collections.abc import Iterable
from typing import Literal

import anthropic
import instructor
import openai
import pydantic
from instructor import Mode
from instructor.core import IncompleteOutputException, InstructorRetryException

FORCED = (
    Mode.TOOLS,
    Mode.TOOLS_STRICT,
    Mode.FUNCTIONS,
    Mode.JSON_SCHEMA,
    Mode.JSON_O1,
    Mode.RESPONSES_TOOLS,
    Mode.RESPONSES_TOOLS_WITH_INBUILT_TOOLS,
    Mode.ANTHROPIC_TOOLS,
    Mode.ANTHROPIC_REASONING_TOOLS,
)
"""Modes whose calls hold any model to the type."""
FREE = (Mode.PARALLEL_TOOLS, Mode.JSON, Mode.MD_JSON, Mode.ANTHROPIC_JSON, Mode.ANTHROPIC_PARALLEL_TOOLS)
"""Modes in which the model decides; random weights give no answer of the type, so that only the calls count."""
PARALLEL = (Mode.PARALLEL_TOOLS, Mode.ANTHROPIC_PARALLEL_TOOLS)
RAN = f"{len(FORCED)} modes that hold a model to a type, and {len(FREE)} that do not"


class Answer(pydantic.BaseModel, extra="forbid"):
    kind: Literal["rain", "sun"]
    sure: bool


def ask(url: str, mode: Mode) -> object:
    asked = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_retries": 0}
    asked["response_model"] = Iterable[Answer] if mode in PARALLEL else Answer
    if mode.name.startswith("ANTHROPIC"):
        client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none", max_retries=0), mode=mode)
        return client.messages.create(**asked, max_tokens=200)
    own = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    client = instructor.from_openai(own, mode=mode)
    limit = "max_output_tokens" if mode.name.startswith("RESPONSES") else "max_tokens"
    return client.chat.completions.create(**asked, **{limit: 200})


def main(url: str) -> None:
    warnings.simplefilter("ignore")  # some of its modes go by other names now
    for mode in FORCED:
        assert isinstance(ask(url, mode), Answer), mode
    for mode in FREE:
        try:
            ask(url, mode)
        except InstructorRetryException as error:
            refused = (openai.APIError, anthropic.APIError)
            assert not isinstance(error.__cause__, refused) and error.last_completion is not None, (mode, error)
        except IncompleteOutputException:
            pass  # max_tokens cut the text

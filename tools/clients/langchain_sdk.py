"""LangChain: ChatOpenAI with strict tools, structured output and the Responses API."""

import pydantic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

RAN = "`invoke`, `stream`, `bind_tools(strict=True)`, `with_structured_output` also with tools, responses"


class Answer(pydantic.BaseModel):
    """An answer."""

    yes: bool


@tool
def get_weather(dry: bool) -> str:
    """The weather."""
    return "Rain."


def main(url: str) -> None:
    options = {"model": "tiny", "base_url": f"{url}/v1", "api_key": "none", "max_retries": 0, "seed": 1}
    chat = ChatOpenAI(**options, max_tokens=100, reasoning_effort="low", verbosity="low")
    assert chat.invoke("Hi").content
    assert "".join(chunk.content for chunk in chat.stream("Hi")) == chat.invoke("Hi").content
    chat.bind_tools([get_weather], strict=True).invoke("Hi")
    call = chat.bind_tools([get_weather], strict=True, tool_choice="get_weather").invoke("Hi").tool_calls[0]
    assert isinstance(call["args"]["dry"], bool)
    assert isinstance(chat.with_structured_output(Answer).invoke("Hi"), Answer)
    both = ChatOpenAI(**options, max_tokens=100, model_kwargs={"parallel_tool_calls": False})
    raw = both.with_structured_output(Answer, tools=[get_weather], strict=True, include_raw=True).invoke("Hi")
    assert raw["raw"].tool_calls or isinstance(raw["parsed"], Answer)
    newer = ChatOpenAI(**{**options, "seed": None}, use_responses_api=True, max_tokens=20)
    assert newer.invoke("Hi").text
    assert "".join(chunk.text for chunk in newer.stream("Hi"))

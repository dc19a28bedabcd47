"""Pydantic AI: an agent with a tool and a typed output in each of its forms, by chats, responses and messages."""

import asyncio
from typing import Literal

import anthropic
import openai
import pydantic
import pydantic_ai
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.profiles.anthropic import AnthropicModelProfile
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

RAN = "an agent with a tool, `NativeOutput` and `ToolOutput`, run and streamed, by chats, responses, messages"
CALLED = []


class Answer(pydantic.BaseModel):
    kind: Literal["rain", "sun"]
    sure: bool


def get_weather(dry: bool) -> str:
    """The weather."""
    CALLED.append(dry)
    return "Rain."


async def run(url: str) -> None:
    openais = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0))
    anthropics = AnthropicProvider(
        anthropic_client=anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0)
    )
    profile = AnthropicModelProfile(supports_json_schema_output=True)
    models = (
        OpenAIChatModel("tiny", provider=openais),
        OpenAIResponsesModel("tiny", provider=openais),
        AnthropicModel("tiny", provider=anthropics, profile=profile),
    )
    limits = pydantic_ai.UsageLimits(request_limit=60)
    settings = {"max_tokens": 200, "parallel_tool_calls": False}
    for model in models:
        for form in (pydantic_ai.NativeOutput(Answer), pydantic_ai.ToolOutput(Answer)):
            agent = pydantic_ai.Agent(model, output_type=form, tools=[get_weather], model_settings=settings, retries=30)
            result = await agent.run("Hi", usage_limits=limits)
            assert isinstance(result.output, Answer)
            async with agent.run_stream("Hi", usage_limits=limits) as streamed:
                assert isinstance(await streamed.get_output(), Answer)
    assert CALLED


def main(url: str) -> None:
    asyncio.run(run(url))

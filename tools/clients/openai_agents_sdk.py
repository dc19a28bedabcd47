"""OpenAI's Agents SDK: agents with a tool, with and without an output type, by chats and by responses."""

import asyncio
from typing import Literal

import agents
import openai
import pydantic

RAN = "agents with a strict tool, with and without `output_type`, run and streamed, by chats and by responses"
CALLED = []


@agents.function_tool
def get_weather(dry: bool) -> str:
    """The weather."""
    CALLED.append(dry)
    return "Rain."


class Answer(pydantic.BaseModel):
    kind: Literal["rain", "sun"]
    sure: bool


async def run(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model="tiny", openai_client=client)
        forced = agents.ModelSettings(tool_choice="get_weather", max_tokens=100, parallel_tool_calls=False)
        # Its tool choice becomes auto once the tool was called; the agent then ends with a text, which random weights
        # seldom end: by responses, where the client takes no cut text, the tool's output is the last.
        ends = "run_llm_again" if kind is agents.OpenAIChatCompletionsModel else "stop_on_first_tool"
        agent = agents.Agent(
            name="a",
            instructions="Be brief.",
            model=model,
            tools=[get_weather],
            model_settings=forced,
            tool_use_behavior=ends,
        )
        before = len(CALLED)
        result = await agents.Runner.run(agent, "Hi", max_turns=3)
        assert len(CALLED) == before + 1 and isinstance(result.final_output, str)
        streamed = agents.Runner.run_streamed(agent, "Hi", max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and len(CALLED) == before + 2
        # With an output type each turn is a call or the answer, as the model chooses.
        typed = agent.clone(output_type=Answer, tool_use_behavior="run_llm_again")
        before = len(CALLED)
        result = await agents.Runner.run(typed, "Hi", max_turns=30)
        assert isinstance(result.final_output, Answer) and len(CALLED) > before
        streamed = agents.Runner.run_streamed(typed, "Hi", max_turns=30)
        kinds = [event.type async for event in streamed.stream_events()]
        assert isinstance(streamed.final_output, Answer)


def main(url: str) -> None:
    asyncio.run(run(url))

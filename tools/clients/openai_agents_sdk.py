"""OpenAI's Agents SDK: an agent with a tool, by chats and by responses."""

import asyncio
import importlib.metadata
import json
import sys

import agents
import openai

CALLED = []


@agents.function_tool
def get_weather(dry: bool) -> str:
    """The weather."""
    CALLED.append(dry)
    return "Rain."


async def run(url: str) -> None:
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    agents.set_tracing_disabled(True)
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model="tiny", openai_client=client)
        forced = agents.ModelSettings(tool_choice="get_weather", max_tokens=100, parallel_tool_calls=False)
        # Its tool choice becomes auto once the tool was called; the agent then ends with a text.
        agent = agents.Agent(
            name="a", instructions="Be brief.", model=model, tools=[get_weather], model_settings=forced
        )
        before = len(CALLED)
        result = await agents.Runner.run(agent, "Hi", max_turns=3)
        assert len(CALLED) == before + 1 and isinstance(result.final_output, str)
        streamed = agents.Runner.run_streamed(agent, "Hi", max_turns=3)
        kinds = [event.type async for event in streamed.stream_events()]
        assert "raw_response_event" in kinds and len(CALLED) == before + 2


def main(url: str) -> dict:
    asyncio.run(run(url))
    return {
        "client": "openai-agents",
        "version": importlib.metadata.version("openai-agents"),
        "ran": "an agent that calls a strict tool and answers, run and streamed, by chats and by responses",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

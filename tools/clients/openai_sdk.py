"""The official client of OpenAI: chats, tools, structured output, responses."""

import json

import openai
import pydantic

RAN = "chats whole and streamed, strict and forced tools, `parse` also with tools, responses, embeddings"


class Weather(pydantic.BaseModel):
    """The weather of a place."""

    place: bool


def main(url: str) -> None:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    model = client.models.list().data[0].id
    turns = [{"role": "user", "content": "Hi"}]
    asked = {"model": model, "messages": turns, "max_completion_tokens": 200, "seed": 1}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, store=False, metadata={"run": "1"})
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    tool = openai.pydantic_function_tool(Weather)
    assert tool["function"]["strict"]
    client.chat.completions.create(**asked, tools=[tool])
    forced = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    assert isinstance(forced.choices[0].message.tool_calls[0].function.parsed_arguments, Weather)
    assert isinstance(
        client.chat.completions.parse(**asked, response_format=Weather).choices[0].message.parsed, Weather
    )
    either = client.chat.completions.parse(**asked, tools=[tool], response_format=Weather, parallel_tool_calls=False)
    message = either.choices[0].message
    found = message.tool_calls[0].function.parsed_arguments if message.tool_calls else message.parsed
    assert isinstance(found, Weather), "a call or the form"
    text = client.responses.create(model=model, input="Hi", max_output_tokens=20)
    with client.responses.stream(model=model, input="Hi", max_output_tokens=20) as stream:
        kinds = [event.type for event in stream]
    assert text.output_text and kinds[-1] == "response.incomplete" and "response.output_text.delta" in kinds
    function = {"type": "function", **tool["function"]}
    call = client.responses.create(
        model=model, input="Hi", tools=[function], tool_choice="required", parallel_tool_calls=False
    ).output[0]
    assert Weather(**json.loads(call.arguments))
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    turns = [{"role": "user", "content": "Hi"}, call, result]
    client.responses.create(model=model, input=turns, max_output_tokens=5)
    parsed = client.responses.parse(model=model, input="Hi", text_format=Weather)
    assert isinstance(parsed.output_parsed, Weather)
    either = client.responses.parse(
        model=model, input="Hi", text_format=Weather, tools=[function], parallel_tool_calls=False
    )
    assert isinstance(either.output_parsed or Weather(**json.loads(either.output[0].arguments)), Weather)
    assert len(client.embeddings.create(model=model, input="Hi").data[0].embedding) > 0

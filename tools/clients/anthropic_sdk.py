"""The official client of Anthropic: messages whole and streamed, tools, count_tokens."""

import anthropic
import pydantic

RAN = "messages whole and streamed, tools, `parse` also with tools, a begun answer, `count_tokens`"


class Answer(pydantic.BaseModel):
    dry: bool


TOOL = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"dry": {"type": "boolean"}},
        "required": ["dry"],
        "additionalProperties": False,
    },
}


def main(url: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    asked = {"model": "tiny", "max_tokens": 200, "messages": [{"role": "user", "content": "Hi"}]}
    asked["extra_body"] = {"temperature": 0}  # the client's newest versions have no such argument
    whole = client.messages.create(**asked, system="Be brief.", metadata={"user_id": "1"})
    with client.messages.stream(**asked, system="Be brief.") as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == whole.content[0].text and last.usage.output_tokens == whole.usage.output_tokens
    assert whole.stop_reason in ("end_turn", "max_tokens")
    choice = {"type": "tool", "name": "get_weather"}
    with client.messages.stream(**asked, tools=[TOOL], tool_choice=choice) as stream:
        call = stream.get_final_message().content[0]
    assert call.type == "tool_use" and isinstance(call.input["dry"], bool)
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "Rain."}
    turns = [*asked["messages"], {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    client.messages.create(**{**asked, "messages": turns, "max_tokens": 5}, tools=[TOOL])
    assert client.messages.count_tokens(model="tiny", messages=turns).input_tokens > 0
    asked.pop("extra_body")
    assert isinstance(client.messages.parse(**asked, output_format=Answer).parsed_output, Answer)
    either = client.messages.parse(**asked, output_format=Answer, tools=[TOOL | {"strict": True}])
    assert either.content[0].type == "tool_use" or isinstance(either.parsed_output, Answer)
    begun = [*asked["messages"], {"role": "assistant", "content": "It"}]
    assert client.messages.create(**asked | {"messages": begun, "max_tokens": 5}).content
    try:
        client.messages.create(**asked | {"model": "other"})
    except anthropic.NotFoundError as error:
        assert error.body["type"] == "error" and error.body["error"]["type"] == "not_found_error"

"""The official client of Anthropic: messages whole and streamed, tools, count_tokens."""

import json
import sys

import anthropic

TOOL = {
    "name": "get_weather",
    "input_schema": {
        "type": "object",
        "properties": {"dry": {"type": "boolean"}},
        "required": ["dry"],
        "additionalProperties": False,
    },
}


def main(url: str) -> dict:
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
    return {
        "client": "anthropic",
        "version": anthropic.__version__,
        "ran": "messages whole and streamed, a forced tool and its result, `count_tokens`",
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))

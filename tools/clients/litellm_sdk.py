"""LiteLLM: chats through its OpenAI and vLLM providers, and messages through its Anthropic one."""

import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
import pydantic

RAN = "chats whole and streamed, replies sent back, forms with tools; `responses`; three providers"


class Answer(pydantic.BaseModel, extra="forbid"):
    yes: bool


TOOL = {
    "type": "function",
    "function": {"name": "look", "strict": True, "parameters": {"properties": {}, "additionalProperties": False}},
}


def main(url: str) -> None:
    turns = [{"role": "user", "content": "Hi"}]
    for provider in ("openai", "hosted_vllm"):
        asked = {"model": f"{provider}/tiny", "api_base": f"{url}/v1", "api_key": "none", "messages": turns}
        whole = litellm.completion(**asked, max_tokens=12, temperature=0, metadata={"run": "1"}, user="me")
        chunks = litellm.completion(**asked, max_tokens=12, temperature=0, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == whole.choices[0].message.content
        turn = whole.choices[0].message.model_dump()
        litellm.completion(**{**asked, "messages": [*turns, turn, *turns]}, max_tokens=2)
        form = {"tools": [TOOL], "response_format": Answer, "max_tokens": 100, "parallel_tool_calls": False}
        message = litellm.completion(**asked, **form).choices[0].message
        assert message.tool_calls or Answer.model_validate_json(message.content)
    asked = {"model": "anthropic/tiny", "api_base": url, "api_key": "none", "messages": turns, "max_tokens": 12}
    assert litellm.completion(**asked, temperature=0).choices[0].message.content
    responses = litellm.responses(model="openai/tiny", input="Hi", api_base=f"{url}/v1", api_key="none")
    assert responses.output

"""TRL's VLLMClient, by which its synchronous trainers ask a server: texts, chats, scores of sequences."""

from trl.generation import vllm_client

RAN = "`VLLMClient`: `generate`, `chat`, `get_sequence_logprobs`, `get_world_size`, `reset_prefix_cache`"


def main(url: str) -> None:
    vllm_client.is_vllm_available = lambda *_, **__: True  # it asks for the package, for NCCL's sake only
    client = vllm_client.VLLMClient(base_url=url, connection_timeout=20)
    assert client.get_world_size() == 1
    ids = [[1, 2, 3], [4, 5]]
    reply = client.generate(ids, n=2, max_tokens=5, top_k=0, logprobs=2)
    assert reply["prompt_ids"] == ids and len(reply["completion_ids"]) == 4
    for tokens, values, names in zip(
        reply["completion_ids"], reply["logprobs"], reply["logprob_token_ids"], strict=True
    ):
        assert len(tokens) == len(values) == len(names)
        assert all(token in row for token, row in zip(tokens, names, strict=True))
    chat = client.chat([[{"role": "user", "content": "Hi"}]], max_tokens=5, logprobs=0)
    assert len(chat["completion_ids"]) == 1 and len(chat["logprobs"][0]) == len(chat["completion_ids"][0])
    scores = client.get_sequence_logprobs([[1, 2, 3, 4]], [2], top_logprobs=3)
    assert len(scores["logprobs"][0]) == 2 and len(scores["logprobs"][0][0]) == 3
    client.reset_prefix_cache()

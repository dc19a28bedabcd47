"""A script of Megatron-LM: megatron/rl's MegatronLocal generates, is suspended, and generates on under a new epoch.

Requests reach MegatronLocal by a call, or, where SERVED is set, by HTTP through megatron/rl's InferenceInterfaceServer.
"""

import asyncio
import json
import os

import torch
import torch.distributed as dist
from megatron.inference.utils import add_inference_args, get_model_for_inference
from megatron.rl.inference.api import InferenceRequest, LLMChatMessage
from megatron.rl.inference.megatron import MegatronLocal
from megatron.rl.server.inference.inference_interface_server import InferenceInterfaceClient, InferenceInterfaceServer
from megatron.training import get_args, initialize_megatron
from megatron.training.arguments import parse_and_validate_args


def request(text: str) -> InferenceRequest:
    greedy = {"temperature": 1.0, "top_p": 1e-6}
    return InferenceRequest(prompt=[LLMChatMessage(role="user", content=text)], generation_args=greedy)


async def main(model: torch.nn.Module, port: int) -> None:
    where = {"model": model, "host": "127.0.0.1", "port": port}
    if "SERVED" in os.environ:
        server = await InferenceInterfaceServer.launch(MegatronLocal, **where)
        client = InferenceInterfaceClient(env_server_host_port=server.env_server_host_port)
        interface = server._inference_interface
        while not server._server.started:
            await asyncio.sleep(0.05)
    else:
        server = client = interface = await MegatronLocal.launch(**where)
    engine = interface._inference_engine
    assert type(engine).__module__ == "megatron_infer.mcore.engine"
    is_first = dist.get_rank() == 0
    ids: list[str] = []
    interface.set_generation_epoch(1)
    if is_first:
        first = await asyncio.gather(*(client.base_generate(request("What is rain?")) for _ in range(3)))
        ids += [one.completion_id for one in first]
        waiting = asyncio.ensure_future(client.base_generate(request("What is rain?")))
        await asyncio.sleep(0.05)
    await server.suspend()
    dist.barrier()  # a training step
    interface.set_generation_epoch(2)
    await server.resume()
    if is_first:
        last = await waiting
        ids.append(last.completion_id)
        assert {tuple(one.token_ids) for one in first} == {tuple(last.token_ids)}
        assert all(len(one.logprobs) == len(one.token_ids) - one.prompt_length for one in (*first, last))
    records = interface.merge_global_request_ledgers()
    await server.kill()
    if is_first:
        epochs = [records[one].policy_epoch for one in ids]
        assert len(records) == 4 and all(one == [(0, 1)] for one in epochs[:3]), epochs
        assert [epoch for _, epoch in epochs[3]] in ([1, 2], [2]), epochs
        answer = last.token_ids[last.prompt_length :]
        print(json.dumps({"prompt": last.token_ids[: last.prompt_length], "tokens": answer, "last": epochs[3]}))
        # the same tokens by this package's own call on the same model, which is left as it was
        if dist.get_world_size() == 1 or get_args().tensor_model_parallel_size == 1:
            from megatron_infer import DynamicInferenceEngine, InferenceConfig, SamplingParams

            config = InferenceConfig(buffer_size_gb=0.05, max_sequence_length=engine.context.max_sequence_length)
            own = DynamicInferenceEngine(model, config)
            params = SamplingParams(temperature=0, max_tokens=len(answer), ignore_eos=True)
            (output,) = own.generate([last.token_ids[: last.prompt_length]], params)
            assert output.outputs[0].token_ids == answer
    print(f"rank {dist.get_rank()} done")


if __name__ == "__main__":
    parse_and_validate_args(
        extra_args_provider=add_inference_args, args_defaults={"no_load_rng": True, "no_load_optim": True}
    )
    initialize_megatron()
    asyncio.run(main(get_model_for_inference(), int(os.environ["HTTP_PORT"])))

"""NeMo-RL: `EngineGeneration`, a GenerationInterface with engines on the live models of the policy's workers.

    driver, rollout actors            workers of the policy (Ray actors)
    EngineGeneration  ── calls ────▶  EngineHost    an engine on the worker's model; no weight is copied
            ▲                            │
            └──── Outputs, an actor ◀────┘          each finished output waits there for its caller

One line of NeMo-RL changes: where `nemo_rl/algorithms/grpo.py` imports MegatronGeneration, it imports this class under
that name. `policy.generation.backend` is megatron, colocated. The workers' processes need this package.
"""

from megatron_infer.rl.frameworks.nemo_rl.generation import EngineGeneration as EngineGeneration

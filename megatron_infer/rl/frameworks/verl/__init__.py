"""verl 0.9: this engine as `actor_rollout_ref.rollout.name=megatron_infer`; `import verl` loads the folder as a plugin.

    verl's trainer, agent loops ──▶ RolloutServer     Ray actor of a replica: generate, abort, sleep, ...
                                        ▲ │ calls     taken and answered by a thread of the worker
    verl's worker                   EngineHost        an engine on a thread of its own
    (trainer, or            ──▶     EngineRollout     weights, in the process in which they arrive
     CheckpointEngineWorker)

On the live model of a Megatron worker (`live`) no weight is copied. Otherwise the worker has a megatron-core model of
the same shape, into which verl's named tensors are written.
"""

from __future__ import annotations

import importlib

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

from megatron_infer.rl.frameworks.verl import weights  # noqa: F401  # registers the checkpoint engine

NAME, ROLLOUT = "megatron_infer", f"{__name__}.rollout"
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{ROLLOUT}.EngineRollout"
RolloutReplicaRegistry.register(NAME, lambda: importlib.import_module(ROLLOUT).EngineReplica)

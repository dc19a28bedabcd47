"""verl 0.9: this engine as `actor_rollout_ref.rollout.name=megatron_infer`; `import verl` loads the folder as a plugin.

    verl's trainer, agent loops ──▶ RolloutServer     Ray actor of a replica: generate, abort, sleep, ...
                                        ▲ │ calls     taken and answered by a thread of the replica's first worker
    verl's workers                  EngineHost        an engine on a thread of its own, on all ranks of the replica
    (trainer, or            ──▶     EngineRollout     weights, in the processes in which they arrive
     CheckpointEngineWorker)

On the live model of Megatron workers (`live`) no weight is copied. Otherwise the workers have a megatron-core model of
the same shape, into which verl's named tensors are written.

Every user of verl imports this module. So the module registers names alone: classes are imported where a config asks
for the rollout, or for `checkpoint_engine.custom_backend_module` (`weights`).
"""

from __future__ import annotations

import importlib

from verl.workers.rollout import base
from verl.workers.rollout.replica import RolloutReplicaRegistry

NAME = "megatron_infer"
ROLLOUT = f"{__name__}.rollout"
base._ROLLOUT_REGISTRY[NAME, "async"] = f"{ROLLOUT}.EngineRollout"
RolloutReplicaRegistry.register(NAME, lambda: importlib.import_module(ROLLOUT).EngineReplica)

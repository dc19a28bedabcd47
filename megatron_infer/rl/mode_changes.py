"""How a session's blocks begin and end: the engine and the model change together, or neither does."""

from __future__ import annotations

from megatron_infer.config.inference import KVCacheManagementMode
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.states import EngineState
from megatron_infer.engine.suspend import MemoryReport
from megatron_infer.rl.train_mode import TrainModeSwitch, failures_noted_on


class ModeChanges:
    """Begins and ends generating and training. Each change raises with the conditions of the mode before it."""

    def __init__(
        self,
        engine: DynamicInferenceEngine,
        switch: TrainModeSwitch,
        *,
        suspend_mode: KVCacheManagementMode | None,
        offloads: bool,
    ) -> None:
        """offloads: the optimizer's state is on the host while the engine runs: it is suspended before the reload."""
        self._engine, self._switch, self._suspend_mode, self._offloads = engine, switch, suspend_mode, offloads

    def start_generating(self, *, from_training: bool) -> None:
        rank_group, engine = self._engine.rank_group, self._engine
        try:
            with rank_group.together("switching the model to generation"):
                self._switch.to_inference()
                engine.weights.check_modules()
            if engine.state is EngineState.SUSPENDED:
                engine.resume()
            if engine.state is EngineState.PAUSED:
                engine.unpause()
        except BaseException as error:
            with failures_noted_on(error, "putting the model back as the trainer left it"):
                self._switch.to_training()
            if from_training and engine.state is not EngineState.SUSPENDED:
                with failures_noted_on(error, "suspending the engine again"):
                    engine.suspend(self._suspend_mode)
            raise

    def start_training(self, *, from_generating: bool) -> MemoryReport:
        report = self._engine.suspend(self._suspend_mode)
        try:
            with self._engine.rank_group.together("switching the model to training"):
                self._switch.to_training()
                self._switch.reload_optimizer()
        except BaseException as error:
            if from_generating:
                with failures_noted_on(error, "continuing generating()"):
                    self.start_generating(from_training=False)
            raise
        return report

    def stop_generating(self) -> None:
        """Pause unfinished requests; no step is in flight afterwards."""
        try:
            if self._offloads:
                self._engine.suspend(self._suspend_mode)
            elif self._engine.has_unfinished() and self._engine.state is EngineState.RUNNING:
                self._engine.pause()
        finally:
            self._switch.to_training()

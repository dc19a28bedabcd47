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
    ) -> None:
        self._engine, self._switch, self._suspend_mode = engine, switch, suspend_mode

    def start_generating(self, *, from_training: bool) -> None:
        rank_group, engine = self._engine.rank_group, self._engine
        try:
            with rank_group.together("switching the model to generation"):
                self._switch.to_inference()
                if self._switch.gathered is not None:
                    engine.weights.gathered()
                engine.weights.check_modules()
            if self._switch.have_changed:
                engine.set_weight_version(engine.weight_version + 1)
            if engine.state is EngineState.SUSPENDED:
                engine.resume()
            if engine.state is EngineState.PAUSED:
                engine.unpause()
        except BaseException as error:
            with failures_noted_on(error, "putting the model back as the trainer left it"):
                self.to_training()
            if from_training and engine.state is not EngineState.SUSPENDED:
                with failures_noted_on(error, "suspending the engine again"):
                    engine.suspend(self._suspend_mode)
            raise

    def start_training(self, *, from_generating: bool) -> MemoryReport:
        report = self._engine.suspend(self._suspend_mode)
        try:
            with self._engine.rank_group.together("switching the model to training"):
                self.to_training()
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
            if self._switch.moves_memory:
                self._engine.suspend(self._suspend_mode)
            elif self._engine.has_unfinished() and self._engine.state is EngineState.RUNNING:
                self._engine.pause()
        finally:
            self.to_training()

    def to_training(self) -> None:
        """The model is as the trainer left it; the engine is suspended where that takes weights from it."""
        if self._switch.gathered is not None:
            self._engine.weights.released()
        self._switch.to_training()

    def gather_again(self) -> None:
        """In generating(): what the trainer's weights are now is what the engine will read. On every rank.

        Where that fails the engine is suspended, without weights, until the next generating().
        """
        engine, switch = self._engine, self._switch
        if switch.gathered is None or not switch.gathered.is_gathered:
            return
        engine.drain()
        try:
            with engine.rank_group.together("gathering the weights again"):
                switch.gather_again()
                engine.weights.gathered()
        except BaseException as error:
            switch.gathered.release()
            engine.weights.released()
            with failures_noted_on(error, "suspending the engine"):
                engine.suspend(self._suspend_mode)
            raise

"""What checkpoints save and replica groups recover: named tensors, progress, and the position in the data."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan_clone.checkpoint.folder import Progress, parse_progress
from torchtitan_clone.data import Loader
from torchtitan_clone.documents import DocumentError, Value
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.replicas.protocol import RecoveryState
from torchtitan_clone.run.engine import Engine
from torchtitan_clone.run.outcome import TrainingError

logger = logging.getLogger("torchtitan_clone")


class RunState:
    """The state of a run. `engine` and `loader` are replaced when the phase changes."""

    def __init__(self, progress: Progress, *, engine: Engine, loader: Loader, outer_weights: dict[str, Tensor]) -> None:
        self.progress = progress
        self.engine = engine
        self.loader = loader
        self.outer_weights = outer_weights
        self._skipped_in_a_row = 0
        self.was_recovered = False
        """Whether the state was received from another replica group since this was last set to False."""

    @property
    def step(self) -> int:
        """Number of the last step that counts; 0 before the first."""
        return self.progress.step

    def tensors(self) -> dict[str, Tensor]:
        """Returns all state tensors by name: the tensors themselves, not copies."""
        return self.engine.state_tensors() | self.outer_weights

    def resume_at(self, progress: Progress | None) -> None:
        """Continues from another checkpoint than at first, which was deleted before it was loaded."""
        if progress is not None and progress.step != self.step:
            self.progress = progress
            if progress.data:
                self.loader.load_state_dict(progress.data, allow_change=True)  # it was checked with the first

    def advance(self, *, step: int, tokens: int, skipped: bool) -> None:
        """Counts a step, and its batch as consumed."""
        self.loader.commit()
        self._skipped_in_a_row = self._skipped_in_a_row if skipped else 0
        self.progress = Progress(
            step=step,
            tokens_seen=self.progress.tokens_seen + tokens,
            skipped_steps=self.progress.skipped_steps + skipped,
            data={},
        )

    def count_skip(self, step: int, *, loss: float, grad_norm: float) -> None:
        """Counts a step whose loss or gradient norm is not finite. TrainingError past training.max_skipped_steps."""
        limit = self.engine.plan.config.training.max_skipped_steps
        self._skipped_in_a_row += 1
        what = f"step {step}: loss {loss}, gradient norm {grad_norm}"
        if self._skipped_in_a_row > limit:
            raise TrainingError(
                f"{what}: not finite for {self._skipped_in_a_row} steps in a row, and training.max_skipped_steps is "
                f"{limit}; lower optimizer.lr or training.max_norm, or inspect the data of these steps"
            )
        if dist.get_rank() == 0:
            logger.warning("%s: not finite, the step is skipped and the weights are unchanged", what)

    def progress_with_data(self) -> Progress:
        """Returns the progress with the position in the data; a collective for hub data."""
        return replace(self.progress, data=self.loader.state_dict())

    def recovery_state(self, *, before_load: Callable[[], None]) -> RecoveryState:
        """Returns what another replica group needs to continue from here; `before_load` runs before tensors change."""

        def load_from_peer(metadata: Mapping[str, Any]) -> None:
            before_load()
            self.engine.free_unsharded_params()  # a validation leaves some, and the next forward would use them
            self.was_recovered = True
            try:
                self.progress = parse_progress(Value(metadata, where="the state of another replica group"))
            except DocumentError as error:
                raise TrainingError(f"cannot recover from another replica group: {error}") from None
            self.loader.load_state_dict(self.progress.data, allow_change=False)

        return RecoveryState(
            tensors={name: local_shard(tensor) for name, tensor in self.tensors().items()},
            metadata=lambda: asdict(self.progress_with_data()),
            load_from_peer=load_from_peer,
            stream_positions=lambda: self.loader.stream_positions,
            # `loader` is replaced when the phase changes.
            set_stream_positions=lambda positions: self.loader.set_stream_positions(positions),  # noqa: PLW0108
        )

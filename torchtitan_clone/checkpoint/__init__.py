"""Saving and loading of training state."""

from torchtitan_clone.checkpoint.manager import CheckpointManager, Progress

__all__ = ["CheckpointManager", "Progress"]

"""Mathematics below the packages: attention in blocks, cross-entropy, slices of DTensors."""

IGNORE_INDEX = -100
"""Target that the loss skips. Defined here, because data loader workers import it without torch.distributed."""

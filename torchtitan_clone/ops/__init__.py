"""Mathematics below the packages: attention in blocks, cross-entropy, slices of DTensors."""

IGNORE_INDEX = -100
"""Target that the loss skips. Defined here, because data loader workers import it without torch.distributed."""

SOURCE_BITS = 32
"""A target of a mixture is the id of a token, plus 1 + the index of its source shifted by these bits."""

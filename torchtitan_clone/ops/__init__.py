"""Mathematics below the packages: attention in blocks, cross-entropy, slices of DTensors."""

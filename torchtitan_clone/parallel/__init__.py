"""Applies parallelism to a single-device model, and runs its forward and backward.

The nouns of this package, as PyTorch uses them:

- *rank*: one process with one device. The *world* is all ranks of a run; a replica group is one world.
- *mesh*: the ranks as an array with five named *axes*: pp, dp_replicate, dp_shard, cp and tp. The *degree* of a
  parallelism is the size of its axis. Tensors have *dims*.
- *shard*: the region of a global tensor that one rank holds. A *replica* is a rank with an equal shard.
- *slice* of a global batch: the rows that one data-parallel rank reads. Ranks that differ only in pp, cp or tp read the
  same slice; with context parallelism each holds some of its tokens.
- *stage*: consecutive modules of the model, run by one rank of the pipeline axis; the module of one is a *model part*.
- *micro-batch*: rows that pass through the model at once. A *pass* of a pipeline is a micro-batch of the step, cut into
  micro-batches of the pipeline; its *bubble* is the time in which ranks wait for one another.
- *loss leader*: of the ranks that compute the loss of the same tokens, the one whose loss is counted.
"""

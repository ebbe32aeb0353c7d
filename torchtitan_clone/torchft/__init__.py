"""Fault tolerance with replica groups through TorchFT: training goes on while groups die and return.

- A *lighthouse* is the server where groups meet; it forms a *quorum*, the groups that take part in a step.
- `group.py` is the `ReplicaGroup` of one group: it begins a step by a quorum, sums gradients over it and commits.
- *Recovery* copies the state of a peer into a group that is behind; `members.py` decides who may train together.
- The *history* of a group says which of its steps count; the *attempt log* records the samples of every attempt.
- *Semi-synchronous* training averages the weights at intervals instead: `semi_sync.py`, with `outer.py`'s optimizer.

The core finds all of this through `door.py`.
"""

"""Fault tolerance with replica groups through TorchFT: training goes on while groups die and return.

- A *lighthouse* is the server where groups meet (`lighthouse.py`); it forms a *quorum*, the groups that take part in
  a step (`quorum.py`).
- A *member* is a group as it describes itself to the others of a quorum; its *history* says which of its steps count,
  and the *attempt log* records the samples of every attempt (`members.py`: may these groups train together?).
- The *connection* of a rank leads to the same rank of the other groups: sums, and *recovery*, the copy of a peer's
  state into a group that is behind (`connection.py`).
- `group.py` is the `ReplicaGroup` that sums gradients and commits in every step. *Semi-synchronous* training averages
  the weights at intervals instead (`semi_sync.py`), with an *outer* optimizer (`outer.py`).

                  lighthouse: forms the quorum
                 |                            |
      replica group 0              replica group 1
      rank 0 ------------ sums ------------ rank 0
      rank 1 ------------ sums ------------ rank 1

  a step:  join quorum -> compare members -> (recover) -> forward, backward -> sum gradients -> vote -> commit

The core finds all of this through `door.py`.
"""

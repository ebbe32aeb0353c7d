"""A replica group that does not belong to the run is rejected, with the reason: find_mismatch in members.py."""

import signal

from tests.support.cluster import Cluster

OPTIONS = {
    "training__global_batch_size": 4,
    "training__seq_len": 32,
    "model__args__n_layers": 1,
    "training__steps": 80,
    "checkpoint__interval": 20,
}


def test_a_mismatched_or_duplicate_group_is_rejected(corpus, tmp_path):
    """A group with the id of another is rejected also if it was suspended, considered dead, and replaced."""
    with Cluster(corpus, tmp_path, groups=2, pace=0.1, **OPTIONS) as cluster:

        def is_rejected(group) -> bool:
            cluster.watch_over(until=lambda: group.codes != [None])
            return group.codes == [2]

        cluster.start(0)
        cluster.watch_over(until=lambda: cluster.step_of(0) > 5)
        cluster.env["TORCHFT_TIMEOUT_SEC"] = "5"
        # In the folder of another group it would be refused by that group's lock.
        elsewhere = {"job__dump_folder": tmp_path / "elsewhere"}
        others = {1: {"fault_tolerance__sync_steps": 10}, 2: {"fault_tolerance__replica_id": 0, **elsewhere}}
        for group, changes in others.items():
            cluster.start(group, **changes)
            assert is_rejected(cluster.running.pop(group))
        assert "error: replica groups were started with different options" in cluster.log_of(1)
        assert "$TORCHFT_TIMEOUT_SEC = 5 overrides fault_tolerance.process_group_timeout_ms" in cluster.log_of(1)
        same = "error: two replica groups have the same fault_tolerance.replica_id: "
        assert f"{same}[0, 0]" in cluster.log_of(2)
        del cluster.env["TORCHFT_TIMEOUT_SEC"]
        cluster.start(1)
        cluster.watch_over(until=lambda: cluster.log_of(1).count("healed from another") == 1)
        cluster.running[1].signal(signal.SIGSTOP)
        cluster.start(2, fault_tolerance__replica_id=1, **elsewhere)
        cluster.watch_over(until=lambda: "healed from another" in cluster.log_of(2))
        old = cluster.running.pop(1)
        old.signal(signal.SIGCONT)
        assert is_rejected(old)
        assert f"{same}[0, 1, 1]" in cluster.log_of(1)
        cluster.watch_over()
        assert cluster.finished == {0: [0], 2: [0]}
        assert cluster.step_of(0) == 80

"""Nodes with folders of their own that copy checkpoints to one another. Tests of peers.py; each rank is a node."""

import os
import re
import shutil
import signal

from tests.checkpoint.test_remote import flip_a_bit
from tests.checkpoint.test_tiers import folder_of_node, load, save
from tests.support.harness import collect, start_ranks
from tests.support.runs import losses, options, train_rank, wait_for_step
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.checkpoint.remote import open_remote


def files_of(folder, step):
    return {path.name for path in (folder / f"step-{step}").glob("rank-*")}


def test_a_lost_node_costs_no_step_that_the_others_have(server, tmp_path):
    """Step 6 is on the nodes only, step 4 also in the store."""
    url, nodes = server.make_bucket(), [tmp_path / f"node{rank}" for rank in range(3)]
    common = {"by_node": True, "interval": 4, "local_interval": 2, "local_peer_copy": True}
    save(server, tmp_path, url, [2, 4, 6], ranks=3, **common)
    assert [committed_steps(node) for node in nodes] == [[4, 6]] * 3
    assert [files_of(node, 6) for node in nodes] == [
        {f"rank-{rank}.safetensors", f"rank-{(rank - 1) % 3}.safetensors"} for rank in range(3)
    ]
    remote = open_remote(url, timeout_seconds=5)
    assert remote.committed_steps() == [4, 6], "the last step is uploaded, by the nodes that have its files"
    remote.delete(6)
    shutil.rmtree(nodes[1])
    flip_a_bit(nodes[2] / "step-6" / "rank-2.safetensors")
    step, log = load(server, tmp_path, url, ranks=3, **common)
    assert (step, f"from {nodes[0]}/step-6" in log) == (6, True), log
    assert all(len(files_of(node, 6)) == 3 for node in nodes)
    assert remote.committed_steps() == [4, 6], "a start uploads the step that it resumes from"
    assert load(server, tmp_path, url, ranks=2, **common)[0] == 6
    remote.delete(6)
    for node in nodes:
        (node / "step-6" / "rank-1.safetensors").unlink()
    assert load(server, tmp_path, url, ranks=3, **common)[0] == 4
    assert load(server, tmp_path, url, ranks=3, **common, load_step=4)[0] == 4
    assert [committed_steps(node)[-1] for node in nodes] == [4] * 3, "each node renames what is newer"


def train_on_node(argv, folder, logs):
    return train_rank([*argv, f"--checkpoint.local_folder={folder_of_node(folder)}"], logs)


def test_a_run_that_loses_a_node_resumes_bit_identically_without_the_store(server, corpus, tmp_path):
    def start(name, **changes):
        sizes = {"training__seq_len": 32, "model__args__n_layers": 1, "training__steps": 30}
        argv = options(corpus, tmp_path / name, **sizes, **changes)
        logs = [tmp_path / f"{name}{rank}.log" for rank in range(2)]
        return start_ranks(train_on_node, 2, argv, tmp_path / name, logs, env=server.env), logs[0]

    url = server.make_bucket()
    stored = {"checkpoint__folder": url, "checkpoint__interval": 100, "checkpoint__local_interval": 5}
    stored |= {"checkpoint__local_peer_copy": True, "checkpoint__async_mode": "async"}
    assert collect(start("whole", checkpoint__folder=server.make_bucket())[0]) == [0, 0]
    ranks, _ = start("lost", **stored)
    wait_for_step(tmp_path / "lost", 12)
    for rank in ranks:
        os.kill(rank.process.pid, signal.SIGKILL)
        rank.process.join()
    assert open_remote(url, timeout_seconds=5).committed_steps() == []
    shutil.rmtree(tmp_path / "lost" / "node0")
    ranks, log = start("lost", **stored)
    assert collect(ranks) == [0, 0], log.read_text()
    assert re.search(r"loaded model and optimizer and outer from \S+/node0/step-(5|10|15)\n", log.read_text())
    assert losses(tmp_path / "lost") == losses(tmp_path / "whole")

"""A local folder before an object store: what ranks upload, and where they resume from. Tests of uploads.py, agree.py.

Ranks are real processes, the store is a server on loopback.
"""

import logging
import os
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.checkpoint.test_remote import flip_a_bit
from tests.support.checkpoint_states import log_lines, make_state, progress_at, rank_of_a_group, set_step, step_of
from tests.support.harness import run_ranks
from tests.support.runs import ROOT
from torchtitan_clone.checkpoint.copying import copy_step, open_place
from torchtitan_clone.checkpoint.folder import committed_steps
from torchtitan_clone.checkpoint.manager import CheckpointManager
from torchtitan_clone.checkpoint.remote import open_remote
from torchtitan_clone.checkpoint.summary import describe_step, table_of_steps
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Checkpoint
from torchtitan_clone.ops.dtensor_shards import local_shard


def build(folder, url, state, **options):
    checkpoint = Checkpoint(folder=url, **{"store_timeout_seconds": 20.0, **options})
    return CheckpointManager(checkpoint, folder=folder, state=lambda: state, config="")


def info_lines():
    """Returns a list that receives everything this process logs from now on, also what is no warning."""
    logging.getLogger("torchtitan_clone").setLevel(logging.INFO)
    return log_lines()


def folder_of_node(folder):
    """Returns the folder of this rank, which is alone on its node."""
    os.environ["LOCAL_RANK"] = "0"
    return folder / f"node{os.environ['RANK']}"


def save_steps(folder, url, steps, options, by_node=False):
    """Saves steps one after another as training does, and waits for uploads at the end; the failure and the log."""
    folder, lines = folder_of_node(folder) if by_node else folder, info_lines()
    with rank_of_a_group():
        state = make_state(step=0)
        manager = build(folder, url, state, **options)
        manager.find_resume_point()
        for step in steps:
            if manager.is_due(step, overdue=False):
                set_step(state, step=step)
                manager.save(progress_at(step))
                manager.finish()
                manager._uploads.finish()
        failure = manager.finish_uploads()
        if by_node:
            assert manager.newest_step(below=steps[-1]) == steps[-2], "where it could go back to after spikes"
        manager.close()
    return failure, "\n".join(lines)


def save(server, folder, url, steps, *, ranks=2, by_node=False, **options):
    options = {"interval": 1, **options}
    failure, log = run_ranks(save_steps, ranks, folder, url, steps, options, by_node, env=server.env)[0]
    assert failure is None
    return log


def resume(folder, url, options, by_node=False):
    """Resumes; the progress, the step of the values, and the log."""
    folder, lines = folder_of_node(folder) if by_node else folder, info_lines()
    with rank_of_a_group():
        manager, progress, error = find_and_load(folder, url, state := make_state(step=199), options)
        if error is not None:
            return None, None, error
        manager.finish_uploads()
        return progress and progress.step, step_of(state), "\n".join(lines)


def find_and_load(folder, url, state, options):
    """Resumes; the manager, the progress, and the error if there is one."""
    manager = build(folder, url, state, **options)
    try:
        manager.find_resume_point()
        return manager, manager.load(), None
    except ConfigError as error:
        return manager, None, str(error)


def load(server, folder, url, *, ranks=2, by_node=False, **options):
    """Returns the step that all ranks resume from, whose values they have, and the log of rank 0."""
    answers = run_ranks(resume, ranks, folder, url, options, by_node, env=server.env)
    step, of_values, log = answers[0]
    assert all(answer[:2] == (step, step) for answer in answers), answers
    assert step == of_values
    return step, log


def test_a_replaced_node_resumes_from_the_store_on_any_number_of_ranks(server, tmp_path):
    url = server.make_bucket()
    log = save(server, tmp_path / "first", url, [2, 4, 6], keep_latest_k=2)
    assert "step 6 is in s3://" in log
    assert open_remote(url, timeout_seconds=5).committed_steps() == [4, 6]
    assert committed_steps(tmp_path / "first") == [4, 6]
    step, log = load(server, tmp_path / "second", url, ranks=3)
    assert step == 6
    assert f"from {url}/step-6" in log


def test_of_two_tiers_the_newest_whole_step_is_used(server, tmp_path):
    """Each damage falls back to the other tier or, where both are damaged, to the step before."""
    url = server.make_bucket()
    save(server, tmp_path, url, [2, 4, 6], local_keep_latest_k=0)
    remote = open_remote(url, timeout_seconds=5)
    flip_a_bit(tmp_path / "step-6" / "rank-1.safetensors")
    step, log = load(server, tmp_path, url)
    assert (step, "rank-1.safetensors does not match its digest" in log) == (6, True)
    assert [path.name[:10] for path in tmp_path.glob("step-6*")] == ["step-6.bad"]
    damage(remote, 6, "rank-0.safetensors")
    step, log = load(server, tmp_path, url)
    assert (step, "does not match the digest of its block" in log) == (4, True)
    assert remote.committed_steps() == [2, 4]
    (tmp_path / "step-4" / "manifest.json").unlink()
    remote.objects.delete([next(each.name for each in remote.objects.find("step-4/") if "index" in each.name)])
    step, log = load(server, tmp_path, url)
    assert (step, re.search(r"step 4 in s3://.* is corrupted: index\.json", log) is not None) == (2, True)


def damage(remote, step, name):
    """Flips a bit in an object of a step."""
    (key,) = (
        each.name for each in remote.objects.find(f"step-{step}/") if re.search(rf"{name}\.[0-9a-f]*$", each.name)
    )
    content = bytearray(remote.objects.get(key, max_bytes=1 << 26))
    content[len(content) // 2] ^= 1
    remote.objects.put(key, bytes(content))


def test_local_steps_are_more_frequent_and_the_last_one_is_uploaded(server, tmp_path):
    url = server.make_bucket()
    save(server, tmp_path, url, range(1, 12), interval=4, local_interval=2, local_keep_latest_k=3)
    remote = open_remote(url, timeout_seconds=5)
    assert (committed_steps(tmp_path), remote.committed_steps()) == ([6, 8, 10], [4, 8, 10])
    remote.delete(10)
    step, log = load(server, tmp_path, url)
    assert (step, f"step 10 is in {url}" in log) == (10, True)
    assert remote.committed_steps() == [4, 8, 10], "a start uploads the step that it resumes from"


def test_nodes_without_a_shared_folder_resume_from_the_store(server, tmp_path):
    url = server.make_bucket()
    save(server, tmp_path, url, [2, 4], by_node=True)
    assert open_remote(url, timeout_seconds=5).committed_steps() == [2, 4]
    assert [path.name for path in tmp_path.glob("node*/*")] == [], "parts of a step are deleted after their upload"
    assert load(server, tmp_path, url, by_node=True)[0] == 4
    answers = run_ranks(resume, 2, tmp_path, url, {"last_save_model_only": True}, True, env=server.env)
    assert all("last_save_model_only = true: all ranks write it to" in error for _, _, error in answers)


def test_two_runs_that_save_one_step_keep_the_first(server, tmp_path):
    url = server.make_bucket()
    save(server, tmp_path / "a", url, [2], ranks=1)
    remote = open_remote(url, timeout_seconds=5)
    manifest = remote.step(2).manifest
    failure, log = run_ranks(save_unseen, 1, tmp_path / "b", url, env=server.env)[0]
    assert "another process has committed this step there" in failure
    assert "give each run a prefix of its own" in log
    assert remote.step(2).manifest == manifest


def save_unseen(folder, url):
    """Saves step 2 with the values of step 3, although the store has it; the failure and the log."""
    lines = info_lines()
    with rank_of_a_group():
        state = make_state(step=3)
        manager = build(folder, url, state)
        manager.find_resume_point()
        manager.save(progress_at(2), wait=True)
        return manager.finish_uploads(), "\n".join(lines)


def test_load_step_leaves_newer_steps_in_both_tiers_and_goes_on_after_a_replaced_node(server, tmp_path):
    url = server.make_bucket()
    save(server, tmp_path / "a", url, [2, 4, 6, 8], local_keep_latest_k=0, keep_latest_k=0)
    assert load(server, tmp_path / "a", url, load_step=6)[0] == 6
    remote = open_remote(url, timeout_seconds=5)
    assert (committed_steps(tmp_path / "a"), remote.committed_steps()) == ([2, 4, 6], [2, 4, 6])
    save(server, tmp_path / "a", url, [5, 6], load_step=4, interval=10, local_interval=1)
    assert remote.committed_steps() == [2, 4, 6]
    assert load(server, tmp_path / "b", url, load_step=4)[0] == 6, "the store says that the run was rewound before"


def save_and_go_back(folder, url):
    """Saves steps 2, 4 and 6, goes back to 4 as after spikes, and saves 5; the step of the values before that."""
    with rank_of_a_group():
        state = make_state(step=0)
        manager = build(
            folder, url, state, interval=10, local_interval=2, local_keep_latest_k=0, upload_mib_per_second=0.1
        )
        manager.find_resume_point()
        for step in (2, 4, 6):
            set_step(state, step=step)
            manager.save(progress_at(step), wait=True)
        manager.go_back(4, leaves_newer=True, before_load=lambda progress: None)
        found = step_of(state)
        set_step(state, step=5)
        manager.save(progress_at(5), wait=True)
        set_step(state, step=6)
        manager.is_due(6, overdue=False)  # the store does not get it before the end
        manager.save(progress_at(6))
        manager.finish()
        return found, manager.finish_uploads()


def test_a_run_that_goes_back_leaves_newer_steps_in_both_tiers(server, tmp_path):
    url = server.make_bucket()
    assert run_ranks(save_and_go_back, 2, tmp_path, url, env=server.env) == [(4, None)] * 2
    assert committed_steps(tmp_path) == open_remote(url, timeout_seconds=5).committed_steps() == [2, 4, 5, 6]


def save_and_delete(folder, url):
    """Deletes the local folder of a step while it is uploaded slowly; the failure."""
    with rank_of_a_group():
        state = make_state(step=2)
        manager = build(folder, url, state, upload_mib_per_second=0.005)
        manager.find_resume_point()
        manager.save(progress_at(2), wait=True)
        dist.barrier()
        if dist.get_rank() == 0:
            assert manager._uploads.is_busy
            shutil.rmtree(folder / "step-2")
        dist.barrier()
        manager._uploads.finish()
        return manager._uploads.failure


def test_a_local_step_may_be_deleted_while_it_is_uploaded(server, tmp_path):
    url = server.make_bucket()
    assert run_ranks(save_and_delete, 2, tmp_path, url, env=server.env) == [None, None]
    assert load(server, tmp_path, url)[0] == 2


def test_a_run_that_only_loads_changes_nothing_in_the_store(server, tmp_path):
    url = server.make_bucket()
    save(server, tmp_path / "a", url, [2, 4], ranks=1)
    remote = open_remote(url, timeout_seconds=5)
    damage(remote, 4, "rank-0.safetensors")
    before = [(each.name, each.modified) for each in remote.objects.find()]
    step, log = load(server, tmp_path / "b", url, ranks=1, load_only=True)
    assert (step, "digest of its block 0; ignored" in log) == (2, True)
    assert [(each.name, each.modified) for each in remote.objects.find()] == before


ROWS, COLUMNS = 3000, 400


def save_matrices(folder, url):
    """Saves steps 1 and 2, of which the values differ."""
    with rank_of_a_group():
        state = matrices(step=1)
        manager = build(folder, url, state)
        manager.find_resume_point()
        manager.save(progress_at(1), wait=True)
        for name, tensor in matrices(step=2).items():
            state[name].copy_(tensor)
        manager.save(progress_at(2), wait=True)
        return manager.finish_uploads()


def matrices(*, step):
    """Returns tensors whose values are those of a step, split over all ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    generator = torch.Generator().manual_seed(step)
    values = [torch.randn(ROWS, COLUMNS, generator=generator) for _ in range(4)]
    return {f"model/{i}": distribute_tensor(each, mesh, [Shard(0)]) for i, each in enumerate(values)}


def load_matrices(folder, url, options):
    """Resumes; the step of all values, the bytes that this rank holds, and those that it read; or the error."""
    with rank_of_a_group():
        manager, progress, error = find_and_load(folder, url, state := matrices(step=3), options)
        if error is not None:
            return error
        wanted = matrices(step=progress.step)
        assert all(torch.equal(local_shard(wanted[name]), local_shard(state[name])) for name in state)
        remote = manager._places.remote
        return progress.step, sum(local_shard(each).nbytes for each in state.values()), remote.objects.bytes_read


def test_each_rank_reads_what_it_needs_and_goes_back_if_that_is_damaged(server, tmp_path):
    url = server.make_bucket()
    assert run_ranks(save_matrices, 2, tmp_path / "a", url, env=server.env) == [None, None]
    steps, needed, read = zip(*run_ranks(load_matrices, 3, tmp_path / "b", url, {}, env=server.env), strict=True)
    assert steps == (2, 2, 2)
    assert sum(needed) <= sum(read) <= 1.1 * sum(needed), f"{sum(read) / sum(needed):.3f}"
    remote = open_remote(url, timeout_seconds=5)
    damage(remote, 2, "rank-1.safetensors")
    for error in run_ranks(load_matrices, 1, tmp_path / "b", url, {"load_only": True}, env=server.env):
        assert re.search(r"step-2 is corrupted: .*digest of its block \d+; choose another step", error)
    answers = run_ranks(load_matrices, 2, tmp_path / "b", url, {}, env=server.env)
    assert [step for step, *_ in answers] == [1, 1]
    assert remote.committed_steps() == [1]


def test_a_store_without_an_answer_costs_no_local_step(server, tmp_path):
    url = server.make_bucket()
    server.proxy.mode = "gone"
    options = {"interval": 1, "store_timeout_seconds": 1.0}
    try:
        with pytest.raises(AssertionError, match="cannot list"):
            run_ranks(save_steps, 1, tmp_path, url, [2], options, env=server.env)
    finally:
        server.proxy.mode = "pass"
    save(server, tmp_path, url, [2], ranks=1)
    shutil.rmtree(tmp_path / "step-2")
    assert load(server, tmp_path, url, ranks=1)[0] == 2


def test_the_script_lists_verifies_copies_and_deletes(server, tmp_path):
    url, copy = server.make_bucket(), server.make_bucket()
    save(server, tmp_path / "a", url, [2, 4])
    remote = open_remote(url, timeout_seconds=5)
    assert re.search(r" 2 .* complete\n.* 4 .* complete", script(server, "list", url))
    assert copy_step(remote, tmp_path / "b", step=2) == 2
    assert script(server, "copy", tmp_path / "b", copy) == "copied step 2\n"
    lines, are_intact = table_of_steps(open_place(copy), digests=True)
    assert (are_intact, "verified" in lines[1]) == (True, True)
    assert any("model/matrix" in line for line in describe_step(open_place(copy), step=None))
    assert load(server, tmp_path / "b", server.make_bucket(), ranks=1)[0] == 2
    with pytest.raises(ConfigError, match="exists, and is kept; give another folder"):
        copy_step(remote, tmp_path / "b", step=2)
    with pytest.raises(ConfigError, match="has no step 3; its steps: 2, 4"):
        copy_step(remote, tmp_path / "b", step=3)
    damage(remote, 2, "rank-1.safetensors")
    with pytest.raises(ConfigError, match=r"step 2 .* is corrupted: .*digest of its block"):
        copy_step(remote, tmp_path / "c", step=2)
    assert not list((tmp_path / "c").iterdir())
    assert re.search(r" 2 .* CORRUPTED: .*digest of its block", script(server, "verify", url, code=1))
    assert script(server, "prune", url, "--keep_latest_k=1") == "deleted step 2\n"
    assert "unknown scheme" in script(server, "list", "s4://bucket/x", code=2)
    assert "--bad: is for folders" in script(server, "prune", url, "--bad", code=2)


def script(server, *arguments, code=0):
    """Returns the output of scripts/checkpoint.py."""
    command = [sys.executable, str(ROOT / "scripts" / "checkpoint.py"), *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **server.env}, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code != 2 else done.stderr

"""Runs whose checkpoints go to an object store: kills, replaced nodes, servers that fail, and what is refused."""

import os
import re
import shutil
import signal
import time

import pytest

from tests.support.harness import run_ranks
from tests.support.object_server import SECRET, assert_refused
from tests.support.runs import Ranks, exit_codes, losses, options, train, wait_for_step
from torchtitan_clone.checkpoint.remote import open_remote


def run(corpus, folder, url, **changes):
    small = {"training__seq_len": 32, "model__args__n_layers": 1, "training__steps": 30}
    stored = {"checkpoint__folder": url, "checkpoint__interval": 4, "checkpoint__async_mode": "async"}
    return options(corpus, folder, **{**small, **stored, **changes})


def test_a_run_that_is_killed_and_whose_node_is_replaced_resumes_bit_identically(server, corpus, tmp_path):
    common = {"world_size": 2, "log_folder": tmp_path, "env": server.env}
    whole = run(corpus, tmp_path / "whole", None, checkpoint__enable=False)
    assert train(whole, **common)[0] == 0
    argv = run(corpus, tmp_path / "killed", server.make_bucket(), checkpoint__local_interval=2)
    for step, loses_disk in ((10, False), (20, True)):
        killed = Ranks(argv, **common)
        wait_for_step(tmp_path / "killed", step)
        killed.signal(signal.SIGKILL)
        killed.join()
        if loses_disk:
            shutil.rmtree(tmp_path / "killed" / "run" / "checkpoint")
    code, output = train(argv, **common)
    assert code == 0, output
    assert re.search(r"loaded model and optimizer and outer from s3://\S+/step-\d+", output)
    assert "step 30 is in s3://" in output
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


def test_a_server_that_fails_costs_no_step_and_one_that_is_gone_is_one_line(server, corpus, tmp_path):
    url = server.make_bucket()
    argv = run(corpus, tmp_path, url, checkpoint__store_timeout_seconds=4)
    started = Ranks(argv, world_size=1, log_folder=tmp_path, env=server.env)
    wait_for_step(tmp_path, 3)
    for mode in ("busy", "stall", "cut"):
        server.proxy.mode = mode
        time.sleep(0.7)
    server.proxy.mode = "pass"
    code, output = started.wait()
    assert code == 0, output
    assert max(losses(tmp_path)) == 30
    assert open_remote(url, timeout_seconds=5).committed_steps()[-1] == 30

    more = [*argv, "--training.steps=32", "--checkpoint.store_timeout_seconds=2"]
    gone = Ranks(more, world_size=1, log_folder=tmp_path, env=server.env)
    wait_for_step(tmp_path, 31)
    server.proxy.mode = "gone"
    code, output = gone.wait()
    server.proxy.mode = "pass"
    assert code == 1, output
    (line,) = (line for line in output.splitlines() if "saved in the local folder only" in line)
    assert re.search(rf"step 32 is saved .*rank \d cannot \w+ {url}/\S+: .*; rerun the same command to upload it", line)
    assert "Traceback" not in output
    assert SECRET not in output
    code, output = train(more, world_size=1, log_folder=tmp_path, env=server.env)
    assert (code, "resumed after step 32" in output, "step 32 is in s3://" in output) == (0, True, True)
    assert "is complete: step 32" in train(more, world_size=1, log_folder=tmp_path, env=server.env)[1]


def test_a_stop_does_not_wait_for_an_upload_past_the_deadline(server, corpus, tmp_path):
    """The store accepts connections, and answers none: the upload would take store_timeout_seconds."""
    url = server.make_bucket()
    stops = {"preemption__requeue": True, "preemption__deadline_seconds": 3}
    argv = run(corpus, tmp_path, url, training__steps=100_000, **stops)
    started = Ranks(argv, world_size=2, log_folder=tmp_path, env=server.env)
    wait_for_step(tmp_path, 9)
    server.proxy.mode = "stall"
    started.signal(signal.SIGTERM, ranks=[1])
    code, output = started.wait(60)
    server.proxy.mode = "pass"
    (step,) = re.findall(r"step (\d+) is saved in the local folder only: no time was left for its upload;", output)
    assert (code, f": step {step} is saved, rerun the same command to resume" in output) == (75, True), output
    last = int(step) + 1
    code, output = train([*argv, f"--training.steps={last}"], world_size=2, log_folder=tmp_path, env=server.env)
    assert (code, f"resumed after step {step}" in output) == (0, True), output
    assert open_remote(url, timeout_seconds=5).committed_steps()[-2:] == [int(step), last]


def exit_codes_without_keys(cases, log):
    """Returns as `exit_codes`, on a machine whose environment has no credentials."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        os.environ.pop(name, None)
    return exit_codes(cases, log)


@pytest.fixture(scope="module")
def refusals(server, corpus, tmp_path_factory):
    """Returns what each wrong command line ends with, all of one process."""
    folder = tmp_path_factory.mktemp("refused")
    url = server.make_bucket()
    cases = [
        run(corpus, folder, "s4://bucket/x"),
        run(corpus, folder, "s3://user:password@bucket/x"),
        run(corpus, folder, url, checkpoint__local_interval=3),
        run(corpus, folder, "outputs", checkpoint__local_interval=2),
        run(corpus, folder, "s3://there-is-no-such-bucket/x"),
        run(corpus, folder, url, fault_tolerance__enable=True, fault_tolerance__group_size=1),
    ]
    answers = run_ranks(exit_codes, 1, cases, folder / "log", env=server.env)[0]
    server.proxy.mode = "refuse"
    answers += run_ranks(exit_codes, 1, [run(corpus, folder, url)], folder / "log", env=server.env)[0]
    server.proxy.mode = "pass"
    machine = {"AWS_ENDPOINT_URL": server.env["AWS_ENDPOINT_URL"], "AWS_METADATA_ENDPOINT": "http://127.0.0.1:1"}
    answers += run_ranks(exit_codes_without_keys, 1, [run(corpus, folder, url)], folder / "log", env=machine)[0]
    dry = [run(corpus, folder, url, job__dry_run=True)]
    assert run_ranks(exit_codes, 1, dry, folder / "log", env=server.env)[0][0][0] == 0
    assert not open_remote(url, timeout_seconds=5).objects.find(), "a dry run writes nothing"
    assert not list(folder.glob("run/*")), "nothing is written"
    return answers


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            0,
            r'checkpoint\.folder = "s4://\.\.\.": unknown scheme; known: s3:// .*, gs:// .*, az:// .*file',
        ),
        (1, r'"s3://\.\.\.": a URL must not hold credentials .*; set them as environment variables'),
        (2, r"checkpoint\.local_interval = 3: must divide checkpoint\.interval 4, .*; choose a divisor"),
        (3, r"checkpoint\.local_interval = 2: is for checkpoints in an object store, .*; set the URL of a store there"),
        (4, r"NoSuchBucket; The specified bucket does not exist; check the URL, the credentials .* and the network"),
        (5, r"checkpoint\.folder: replica groups share the folder .*; set a local or mounted folder"),
        (6, r"cannot write s3://\S+: .*403 Forbidden.*InvalidAccessKeyId; .*; check the URL, the credentials"),
        (7, r"cannot write s3://\S+: .*; check the URL, the credentials"),
    ],
)
def test_what_cannot_work_is_one_error_before_the_start(refusals, index, text):
    assert_refused(*refusals[index], text=text)

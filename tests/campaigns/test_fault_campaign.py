"""A sample of tests/campaigns/fault_campaign.py, and proof that it notices what must not happen."""

import json
import random
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from tests.campaigns.fault_campaign import build_scene, campaign, make_material, material_in, missing_for, play
from tests.campaigns.fault_kinds import KINDS, Kind
from tests.campaigns.fault_scenes import check_against
from tests.campaigns.fault_tools import send
from tests.support.attempts import counted_attempts
from torchtitan_clone.checkpoint.folder import newest_complete_step, step_folder

CAMPAIGN = Path(__file__).with_name("fault_campaign.py")
STEPS = 30
ON_ONE_NODE = ["kill all ranks while they save", "SIGTERM, then SIGKILL", "flip a bit of the newest checkpoint"]
OF_GROUPS = ["kill a group", "reset a group's connections to the lighthouse"]


@pytest.fixture(scope="module")
def material(tmp_path_factory):
    """Returns the data of all runs, and the folder of an undisturbed one."""
    material = material_in(tmp_path_factory.mktemp("campaign"), steps=STEPS, pace=0.03)
    make_material(material, names=["local"])
    return material


def play_through(name, *, material, folder, kinds, seed="0"):
    """Plays one run; returns what struck, and what is wrong."""
    scene = build_scene(name, material=material, folder=folder, source=random.Random(seed))
    *faults, run = play(scene, seed=seed, kinds=kinds, count=len(kinds))
    return {fault["kind"] for fault in faults if fault["verdict"] != "not struck"}, run["wrong"]


def test_there_are_thirty_kinds():
    assert len(KINDS) >= 30
    assert len({kind.strike for kind in KINDS.values()}) == len(KINDS)


@pytest.mark.documentation
def test_a_run_survives_a_sample_of_faults(material, tmp_path):
    kinds = [KINDS[name] for name in ON_ONE_NODE]
    struck, wrong = play_through("one node", material=material, folder=tmp_path / "run", kinds=kinds)
    assert wrong == []
    assert {"kill all ranks while they save", "SIGTERM, then SIGKILL"} <= struck
    metrics = tmp_path / "run" / "run" / "metrics.jsonl"
    rows = metrics.read_text().splitlines(keepends=True)
    place = next(place for place, row in enumerate(rows) if '"loss": ' in row)  # a start may have written its goodput
    metrics.write_text("".join(rows[:place] + rows[place + 1 :]))
    (problem,) = check_against(material.references / "local", tmp_path / "run", lenient=False)
    assert problem.startswith("metrics hold the steps [2, 3")
    rows[place] = rows[place].replace('"loss": ', '"loss": 1')
    metrics.write_text("".join(rows))
    (problem,) = check_against(material.references / "local", tmp_path / "run", lenient=False)
    assert problem.startswith("step 1: loss 1")


@pytest.mark.documentation
def test_replica_groups_survive_a_sample_of_faults(material, tmp_path):
    pytest.importorskip("torchft")
    kinds = [KINDS[name] for name in OF_GROUPS]
    struck, wrong = play_through("replica groups", material=material, folder=tmp_path / "run", kinds=kinds)
    assert wrong == []
    assert struck == set(OF_GROUPS)


def lose_a_checkpoint(scene) -> str:
    """Deletes the newest checkpoint behind the back of the scene."""
    while not scene.committed:
        scene.watch(1)
    send(signal.SIGKILL, *scene.pids())
    scene.end()
    scene.note_commits()
    step = newest_complete_step(scene.checkpoints)
    shutil.rmtree(step_folder(scene.checkpoints, step))
    scene.start()
    return f"step {step}"


@pytest.mark.documentation
def test_a_lost_checkpoint_and_a_lost_process_are_noticed(material, tmp_path):
    kinds = [
        Kind(name="a kill that nobody permits", scenes=(), may_end=False, strike=KINDS["kill a rank"].strike),
        Kind(name="lose a checkpoint", scenes=(), may_end=True, strike=lose_a_checkpoint),
    ]
    _, wrong = play_through("one node", material=material, folder=tmp_path / "run", kinds=kinds)
    processes = [problem for problem in wrong if problem.startswith("ended with [")]
    checkpoints = [problem for problem in wrong if problem.endswith(" was committed")]
    assert len(processes) == 1
    assert checkpoints
    assert len(processes) + len(checkpoints) == len(wrong)


@pytest.mark.skipif(missing_for("small disk") is not None, reason=str(missing_for("small disk")))
@pytest.mark.documentation
def test_a_full_disk_and_a_campaign_in_two_parts(material, tmp_path, capsys):
    results, folder = tmp_path / "results.jsonl", material.references.parent
    words = [
        "--faults=1",
        "--per-run=1",
        f"--steps={STEPS}",
        "--scenes=small disk",
        "--kinds=full disk",
        f"--results={results}",
    ]
    command = [sys.executable, CAMPAIGN, *words, f"--folder={folder}"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = "1 kinds, 1 faults in 1 runs, of which 0 are wrong"
    assert summary in done.stdout
    options = Namespace(faults=1, per_run=1, steps=STEPS, seed=1, results=results, folder=folder, parallel=1, kinds=[])
    assert campaign(options, scenes=["small disk"]) == 0
    assert summary in capsys.readouterr().out
    assert [json.loads(line).get("faults") for line in results.read_text().splitlines()] == [None, 1]


def test_of_two_attempts_at_a_step_the_one_that_training_went_on_from_counts():
    """A partition lets group 1 commit step 2 alone; group 0 commits it later, and gives it up."""
    alone = {"step": 2, "quorum": 8, "time": 2.0, "committed": True}
    lost = {"step": 2, "quorum": 9, "time": 2.5, "committed": True}
    first, last = ({"step": step, "quorum": 8 - step % 2, "time": step, "committed": True} for step in (1, 3))
    records = {"0": [first, lost, {"healed": 2}, last], "1": [first, alone, last]}
    assert counted_attempts(records) == {1: (1, 7), 2: (2, 8), 3: (3, 7)}

"""Tests of summary.py through scripts/checkpoint.py, which lists, verifies, shows and prunes checkpoints."""

import json
import subprocess
import threading
import time
from pathlib import Path

from tests.support.checkpoint_states import SHAPES, save
from torchtitan_clone.checkpoint.folder import mark_finished
from torchtitan_clone.checkpoint.summary import table_of_steps

SCRIPT = Path(__file__).parents[2] / "scripts" / "checkpoint.py"


def test_a_run_that_goes_on_is_not_complete(tmp_path):
    save(tmp_path, [5])
    mark_finished(tmp_path, step=5)
    assert table_of_steps(tmp_path, digests=False)[0][-1] == "the run is complete: step 5"
    save(tmp_path, [10])
    assert "complete: step" not in "".join(table_of_steps(tmp_path, digests=False)[0])


def test_the_script_lists_verifies_shows_and_prunes(tmp_path, python):
    def checkpoint_script(*arguments):
        command = [python, SCRIPT, *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    save(tmp_path, [5, 10, 15], world_size=2)
    code, text = checkpoint_script("list", tmp_path)
    assert (code, text.count("complete")) == (0, 3)
    file = tmp_path / "step-10" / "rank-0.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert checkpoint_script("list", tmp_path)[0] == 0
    code, text = checkpoint_script("verify", tmp_path)
    assert (code, text.count("verified")) == (1, 2)
    assert "CORRUPTED: rank-0.safetensors does not match its digest" in text
    code, text = checkpoint_script("show", tmp_path)
    assert code == 0
    assert all(name in text for name in SHAPES)
    assert json.loads(text[text.index("{") : text.index("}") + 1])["ranks"] == 2
    code, text = checkpoint_script("prune", tmp_path, "--keep_latest_k=1")
    assert (code, text) == (0, "deleted step 5\ndeleted step 10\n")
    assert checkpoint_script("prune", tmp_path, "--keep_latest_k=0")[0] == 2
    code, text = checkpoint_script("show", tmp_path, "--step=10")
    assert (code, "no step 10; its steps: 15" in text) == (2, True)
    (tmp_path / "empty").mkdir()
    wrong = [["list", tmp_path / "empty"], ["verify", tmp_path, "--step=9"], ["prune", tmp_path, "--keep_every=-5"]]
    assert [checkpoint_script(*words)[0] for words in wrong] == [2, 2, 2]
    (tmp_path / "empty").rmdir()
    link = tmp_path / "step-20.bad-link"
    link.symlink_to(tmp_path / "step-15")
    (tmp_path / "step-25.bad-file").write_text("")
    code, text = checkpoint_script("prune", tmp_path, "--bad")
    assert (code, text) == (0, "deleted step-20.bad-link\ndeleted step-25.bad-file\n")
    assert [path.name for path in tmp_path.iterdir()] == ["step-15"]


def test_steps_that_a_run_deletes_meanwhile_are_not_listed(tmp_path):
    def delete():
        for step in range(80, 1, -1):
            (tmp_path / f"step-{step}").rename(tmp_path / f"step-{step}.purged")
            time.sleep(0.001)

    save(tmp_path, range(1, 81), keep_latest_k=0)
    run = threading.Thread(target=delete)
    run.start()
    lines, are_intact = table_of_steps(tmp_path, digests=True)
    run.join()
    assert are_intact
    assert len(lines) < 80

"""Trains small runs through faults of many kinds and checks that nothing is lost, repeated or loaded wrongly.

    python tests/campaigns/fault_campaign.py --faults=1000 --seed=1 --results=faults.jsonl

Every run is hit by --per-run faults, one after the other, as the seed draws them, and is started again where a fault
may end it. At the end its losses, final tensors, rows of data and of metrics are compared with an undisturbed run;
replica groups must have committed each sample once and end with the same bits. Results are appended to --results:
started again with the same seed, the campaign continues after the runs that are there. --table prints only the table.

Scenes: one node (2 ranks, the three modes of saving), streamed data (with loader workers), launcher, replica groups (3
with a lighthouse), semi-synchronous (LocalSGD). As root also small disk (ext4 in a file: full, slow, read-only) and
network (a namespace with iptables and tc: loss, delay, partition, resets). --kinds and --scenes restrict the choice.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # runs from a clone without being installed
os.environ.setdefault("RUST_LOG", "error")

from tests.campaigns.fault_kinds import KINDS, SCENES, Kind
from tests.campaigns.fault_scenes import Groups, HangError, Launched, Material, NotStruckError, OneNode, Scene
from tests.campaigns.fault_tools import BLOCK_LIMIT, CGROUPS, Clock, Network
from tests.support.runs import make_corpus, options, train

SHARES = {
    "one node": 8,
    "streamed data": 3,
    "launcher": 3,
    "replica groups": 4,
    "semi-synchronous": 2,
    "small disk": 2,
    "network": 3,
}
"""How often each scene is drawn."""
NEEDS = {
    "small disk": ("mkfs.ext4", "e2fsck", "mount", "findmnt", "unshare", "/dev/loop-control", BLOCK_LIMIT),
    "network": ("iptables", "ip", "tc", "ss", "unshare", CGROUPS),
}
"""Tools and files of the scenes that need root."""
Result = dict[str, object]


def missing_for(scene: str) -> str | None:
    """Returns why this machine cannot play a scene, or None."""
    if scene not in NEEDS:
        return None
    if os.geteuid():
        return f'the scene "{scene}" needs root'
    missing = [need for need in NEEDS[scene] if shutil.which(need) is None and not Path(need).exists()]
    return f'the scene "{scene}" needs {", ".join(missing)}' if missing else None


def kinds_of(scene: str, *, names: Sequence[str]) -> list[Kind]:
    """Returns the kinds of faults of a scene, those of these names if there are any."""
    has_clock = "CLOCK_JUMPS" in os.environ
    found = [kind for kind in KINDS.values() if scene in kind.scenes and (not names or kind.name in names)]
    return [kind for kind in found if has_clock or not kind.name.startswith("clock")]


def material_in(folder: Path, *, steps: int, pace: float) -> Material:
    """Returns what the scenes of a campaign share, in its folder."""
    return Material(
        corpus=folder / "data" / "corpus",
        streamed=folder / "hub" / "org" / "name",
        references=folder / f"references-{steps}",
        steps=steps,
        pace=pace,
    )


def make_material(material: Material, *, names: Sequence[str]) -> None:
    """Writes the data, and trains the undisturbed runs of data with these names, unless that has been done."""
    if not material.corpus.exists():
        make_corpus(material.corpus)
        material.streamed.mkdir(parents=True)
    modules = sorted(material.corpus.glob("*.py"))
    for number in range(3):
        texts = [text for module in modules[number::3] for text in module.read_text(errors="replace").split("\n\n")]
        lines = [json.dumps({"text": text}) for text in texts[:400]]
        (material.streamed / f"{number}.jsonl").write_text("\n".join(lines) + "\n")
    for name in [name for name in names if not (material.references / name).exists()]:
        target = material.references / name
        argv = options(material.corpus, target, **{**material.options_of(name), "data__num_workers": 0})
        code, output = train(argv, world_size=2, log_folder=target)
        assert code == 0, output


def build_scene(name: str, *, material: Material, folder: Path, source: random.Random) -> Scene:
    """Returns a scene, whose folder must not exist."""
    folder.mkdir(parents=True)
    if name in ("replica groups", "semi-synchronous", "network"):
        network = Network(f"faults-{os.getpid()}", groups=3) if name == "network" else None
        return Groups(material, folder, name=name, source=source, network=network)
    return (Launched if name == "launcher" else OneNode)(material, folder, name=name, source=source)


def play(scene: Scene, *, seed: str, kinds: Sequence[Kind], count: int) -> Iterator[Result]:
    """Plays one run with up to `count` faults; yields a result for each fault, and one for the run."""
    deck: list[Kind] = []
    begin = time.monotonic()
    struck = 0
    with closing(scene):
        try:
            scene.start()
            scene.watch(2)
            for _ in range(2 * count):
                if struck == count or scene.step() > scene.steps - 12:
                    break
                deck = deck or scene.source.sample(kinds, len(kinds))  # all kinds, before one strikes again
                result = strike(deck.pop(), scene)
                struck += result["verdict"] != "not struck"
                yield {"seed": seed, "scene": scene.name, **result}
            scene.finish()
        except HangError as error:
            scene.wrong.append(f"hangs: {error}")
        except Exception:  # noqa: BLE001, an error of the campaign must not count as a fault that was survived
            scene.wrong.append(traceback.format_exc()[-1500:])
    seconds = round(time.monotonic() - begin, 1)
    yield {"seed": seed, "scene": scene.name, "faults": struck, "wrong": scene.wrong, "seconds": seconds}


def strike(kind: Kind, scene: Scene) -> Result:
    """Makes a fault happen and waits until training continues."""
    scene.may_end = kind.may_end
    found, begin, step = len(scene.wrong), time.monotonic(), scene.step()
    try:
        detail, verdict = kind.strike(scene), "good"
    except NotStruckError as error:
        detail, verdict = str(error), "not struck"
    scene.watch(scene.source.randint(1, 3))
    scene.may_end = False
    if len(scene.wrong) > found:
        verdict = "; ".join(scene.wrong[found:])
    seconds = round(time.monotonic() - begin, 2)
    return {"kind": kind.name, "detail": detail, "after_step": step, "seconds": seconds, "verdict": verdict}


def run_one(choices: argparse.Namespace) -> int:
    """Plays one run in this process and prints its results as lines of JSON."""
    logging.disable()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(dir=choices.folder)) / "run"
    material = material_in(choices.folder, steps=choices.steps, pace=choices.pace)
    kinds = kinds_of(choices.one, names=choices.kinds)
    source = random.Random(choices.run_seed)
    scene = build_scene(choices.one, material=material, folder=folder, source=source)
    wrong = False
    for result in play(scene, seed=choices.run_seed, kinds=kinds, count=choices.per_run):
        print(json.dumps(result), flush=True)
        wrong = wrong or bool(result.get("wrong"))
    if not wrong:
        shutil.rmtree(folder.parent, ignore_errors=True)
    return int(wrong)


def start_run(scene: str, *, seed: str, choices: argparse.Namespace) -> subprocess.Popen[str]:
    """Starts one run in a process of its own, in namespaces of its own where the scene needs them."""
    spaces = {"small disk": ["unshare", "--mount"], "network": ["unshare", "--net"]}.get(scene, [])
    words = [*spaces, sys.executable, __file__, f"--one={scene}", f"--run-seed={seed}", f"--folder={choices.folder}"]
    words += [f"--per-run={choices.per_run}", f"--kinds={','.join(choices.kinds)}"]
    words += [f"--steps={choices.steps}", f"--pace={choices.pace}"]
    output = (choices.folder / f"{seed.replace(':', '-')}.out").open("w+")
    return subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT, text=True)


def playable(choices: argparse.Namespace) -> list[str]:
    """Returns the scenes that are asked for and that this machine can play; prints why it cannot play others."""
    wanted = [scene for scene in SCENES if not choices.scenes or scene in choices.scenes]
    problems = {scene: problem for scene in wanted if (problem := missing_for(scene))}
    for problem in problems.values():
        print(f"left out: {problem}")
    return [scene for scene in wanted if scene not in problems and kinds_of(scene, names=choices.kinds)]


def campaign(choices: argparse.Namespace, *, scenes: Sequence[str]) -> int:
    """Plays runs side by side until so many faults have struck; returns the exit code."""
    source = random.Random(choices.seed)
    done = read_results(choices.results)
    seen = {result["seed"] for result in done if "faults" in result}
    count = sum(int(str(result["faults"])) for result in done if "faults" in result)
    running: dict[str, subprocess.Popen[str]] = {}
    number = 0
    try:
        while count < choices.faults or running:
            while count + len(running) * choices.per_run < choices.faults and len(running) < choices.parallel:
                number += 1
                scene, seed = source.choices(scenes, [SHARES[each] for each in scenes])[0], f"{choices.seed}:{number}"
                if seed not in seen:
                    running[seed] = start_run(scene, seed=seed, choices=choices)
            if not running:
                continue
            time.sleep(0.2)
            for seed in [seed for seed, process in running.items() if process.poll() is not None]:
                del running[seed]
                count += collect_run(seed, choices=choices)
    finally:
        for process in running.values():
            process.terminate()
        for process in running.values():
            process.wait()
    results = read_results(choices.results)
    print_table(results)
    return int(any(result.get("wrong") for result in results))


def collect_run(seed: str, *, choices: argparse.Namespace) -> int:
    """Appends the results of a run to the file; returns how many faults struck."""
    file = choices.folder / f"{seed.replace(':', '-')}.out"
    lines = file.read_text().splitlines()
    results = [json.loads(line) for line in lines if line.startswith("{")]
    if not any("faults" in result for result in results):
        results.append({"seed": seed, "scene": "?", "faults": 0, "wrong": ["\n".join(lines)[-1500:]], "seconds": 0})
    with choices.results.open("a") as stream:
        stream.writelines(json.dumps(result) + "\n" for result in results)
    (last,) = [result for result in results if "faults" in result]
    verdict = "WRONG" if last["wrong"] else "good"
    print(f"{seed:10} {last['scene']:18} {last['faults']:3} faults {last['seconds']:7.1f} s  {verdict}", flush=True)
    return last["faults"]


def read_results(file: Path) -> list[Result]:
    """Returns the results of earlier parts."""
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def print_table(results: Sequence[Result]) -> None:
    """Prints how often each kind struck, and what became of it."""
    wrong_runs = {result["seed"]: result["wrong"] for result in results if result.get("wrong")}
    of_kind: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        if "kind" in result and result["verdict"] != "not struck":
            of_kind[str(result["kind"])].append(result)
    print(f"{'kind':45}{'struck':>7}{'wrong':>7}{'in wrong runs':>15}")
    for name, found in sorted(of_kind.items()):
        bad = sum(each["verdict"] != "good" for each in found)
        print(f"{name:45}{len(found):7}{bad:7}{sum(each['seed'] in wrong_runs for each in found):15}")
    total = sum(map(len, of_kind.values()))
    runs = sum("faults" in result for result in results)
    print(f"{len(of_kind)} kinds, {total} faults in {runs} runs, of which {len(wrong_runs)} are wrong")
    for seed, wrong in wrong_runs.items():
        print(f"{seed}: {json.dumps(wrong)[:1500]}")


def parse_names(text: str) -> list[str]:
    """Returns names that are separated by commas; kinds may have commas of their own."""
    known = [*KINDS, *SCENES]
    found = [name for name in known if f",{name}," in f",{text},"]
    if text and not found:
        raise argparse.ArgumentTypeError(f"{text}: choose from {'; '.join(known)}")
    return found


def main(argv: list[str]) -> int:
    """Plays a campaign, one run of it, or prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--per-run", type=int, default=20, help="faults of each run (20)")
    parser.add_argument("--steps", type=int, default=60, help="of each run (60)")
    parser.add_argument("--pace", type=float, default=0.1, help="seconds that every step sleeps (0.1)")
    parser.add_argument("--parallel", type=int, default=3, help="runs side by side (3)")
    parser.add_argument("--results", type=Path, default=Path("faults.jsonl"))
    parser.add_argument("--folder", type=Path, help="keep data and failed runs here")
    parser.add_argument("--scenes", type=parse_names, default=[], help="names, separated by commas")
    parser.add_argument("--kinds", type=parse_names, default=[], help="names, separated by commas")
    parser.add_argument("--table", action="store_true", help="only print the table of --results")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--run-seed", help=argparse.SUPPRESS)
    choices = parser.parse_args(argv)
    if choices.one:
        return run_one(choices)
    if choices.table:
        return print_table(read_results(choices.results)) or 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the runs on the way out
    with tempfile.TemporaryDirectory() as folder:
        choices.folder = choices.folder or Path(folder)
        choices.folder.mkdir(parents=True, exist_ok=True)
        scenes = playable(choices)
        names = ["local", "streamed"] if "streamed data" in scenes else ["local"]
        make_material(material_in(choices.folder, steps=choices.steps, pace=choices.pace), names=names)
        if Clock.is_available():
            os.environ.update(Clock(choices.folder).environment)
        return campaign(choices, scenes=scenes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

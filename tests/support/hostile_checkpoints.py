"""Damage to the checkpoints of a run: two steps saved by two ranks, from which one rank resumes."""

import json
import random
import re
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.support.hostile_folders import (
    FALLEN_BACK,
    HARMLESS,
    HOSTILE_VALUES,
    Kind,
    damage_file,
    damage_json,
    damage_length,
    garble_random_state,
    read_header,
    swap,
    write_header,
)
from tests.support.runs import losses, make_corpus, options, train
from torchtitan_clone.checkpoint.writer import DIGEST, DIGESTS

STEPS = (3, 6)
LAST_STEP = 8
DOCUMENTS = ("manifest.json", "index.json", "progress.json", "versions.json")
Changes = dict[str, Callable[[], object]]
TENSOR_FILES = ("rank-0.safetensors", "rank-1.safetensors")


class CheckpointTarget:
    """A run folder with two committed steps. A run that resumes must log the losses of a clean resume, bit by bit."""

    def __init__(self, folder: Path) -> None:
        corpus = make_corpus(folder / "corpus", files=3)
        self.readable = (corpus, folder / "cache")
        self.clean = folder / "clean"
        self.kinds = KINDS
        self._corpus = corpus
        code, output = train(self._options(self.clean, steps=STEPS[-1]), world_size=2, log_folder=folder / "logs")
        assert code == 0, output
        (self.clean / "run" / "metrics.jsonl").unlink()
        self._expected = {step: self._resume_cleanly(folder / f"from-{step}", step=step) for step in STEPS}

    def argv(self, folder: Path) -> list[str]:
        return self._options(folder, steps=LAST_STEP)

    def judge(self, folder: Path, output: str) -> str:
        step = max(map(int, re.findall(r"resumed after step (\d+)", output)), default=0)
        if step not in STEPS:
            return "trained from the start" if f"step {LAST_STEP}" in output else "ended without training"
        if self._result(folder) != self._expected[step]:
            return f"loaded something else than step {step}"
        return HARMLESS if step == STEPS[-1] else FALLEN_BACK

    def _options(self, folder: Path, *, steps: int) -> list[str]:
        changes = {"training__steps": steps, "checkpoint__interval": 3, "validation__enable": False}
        # Both runs decay the learning rate in the same steps, of which only the later one sees some.
        return options(self._corpus, folder, **changes, lr_scheduler__decay_ratio=0.01)

    def _resume_cleanly(self, folder: Path, *, step: int) -> object:
        shutil.copytree(self.clean, folder)
        for newer in (each for each in STEPS if each > step):
            shutil.rmtree(folder / "run" / "checkpoint" / f"step-{newer}")
        code, output = train(self.argv(folder), log_folder=folder / "logs")
        assert code == 0, output
        assert f"resumed after step {step}" in output, output
        return self._result(folder)

    def _result(self, folder: Path) -> object:
        """Returns all losses and the digests of the last step's parameters, optimizer, random state and progress."""
        manifest = read(folder / "run" / "checkpoint" / f"step-{LAST_STEP}" / "manifest.json")["manifest"]
        return losses(folder), [manifest["files"][name]["digest"] for name in ("rank-0.safetensors", "progress.json")]


def read(path: Path) -> Any:
    """Returns the content of a document of the clean run."""
    return json.loads(path.read_bytes())


def newest(folder: Path) -> Path:
    """Returns the folder of the newest step."""
    return folder / "run" / "checkpoint" / f"step-{STEPS[-1]}"


def seal(step: Path) -> None:
    """Makes the manifest agree with the files, as somebody would who knows the format."""
    document = read(step / "manifest.json")
    for name, record in document["manifest"]["files"].items():
        if (path := step / name).is_file() and path.stat().st_size < 1 << 30:
            content = path.read_bytes()
            record.update(bytes=len(content), digest=_digest(content))
        elif path.is_file():
            record.update(bytes=path.stat().st_size)
    sign(step, document["manifest"])


def sign(step: Path, manifest: dict[str, Any]) -> None:
    """Writes a manifest with its own digest."""
    content = json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()
    digest = (
        blake2b(content, digest_size=16).hexdigest() if manifest.get("algorithm") == "blake2b" else _digest(content)
    )
    (step / "manifest.json").write_text(json.dumps({"manifest": manifest, "digest": digest}))


def _digest(content: bytes) -> str:
    digest = DIGESTS[DIGEST]()
    digest.update(content)
    return digest.hexdigest()


def damage_any_file(folder: Path, source: random.Random) -> str:
    """Damages a file; the manifest stays."""
    files = sorted(path for path in newest(folder).iterdir())
    return damage_file(source.choice(files), source)


def damage_sealed_document(folder: Path, source: random.Random) -> str:
    """Damages a document as a file; the manifest agrees with it."""
    done = damage_file(newest(folder) / source.choice(DOCUMENTS[1:]), source)
    seal(newest(folder))
    return f"{done}, sealed"


def damage_any_value(folder: Path, source: random.Random) -> str:
    """Damages a value of a document; the manifest stays."""
    return damage_json(newest(folder) / source.choice(DOCUMENTS), source)


def damage_sealed_value(folder: Path, source: random.Random) -> str:
    """Damages a value of a document; the manifest agrees with it."""
    done = damage_json(newest(folder) / source.choice(DOCUMENTS[1:]), source)
    seal(newest(folder))
    return f"{done}, sealed"


def damage_signed_manifest(folder: Path, source: random.Random) -> str:
    """Changes a value of the manifest, whose own digest agrees with it."""
    manifest = read(newest(folder) / "manifest.json")["manifest"]
    scratch = newest(folder) / "scratch.json"
    scratch.write_text(json.dumps(manifest))
    done = damage_json(scratch, source)
    try:
        sign(newest(folder), read(scratch))
    except (ValueError, RecursionError, AttributeError):  # cannot be signed: it is no JSON, or no table
        scratch.replace(newest(folder) / "manifest.json")
    scratch.unlink(missing_ok=True)
    return done.replace("scratch", "manifest")


NAMES = (
    "../step-3/{name}", "/etc/passwd", "/dev/zero", "../../../../secret", "../progress.json", ".", "..", "", "pipe",
    "link", "a/../{name}", "./{name}", "{name}\0", "{name}\n", "x" * 300, "\x1b[2J", "~/.bashrc", "missing",
)  # fmt: skip


def rename_files(folder: Path, source: random.Random) -> str:
    """Lets the manifest, the index or both name another file."""
    step = newest(folder)
    name = source.choice([path.name for path in step.iterdir() if path.name != "manifest.json"])
    other = source.choice(NAMES).format(name=name)
    (step / "link").symlink_to(Path("..") / f"step-{STEPS[0]}" / name)
    manifest = read(step / "manifest.json")["manifest"]
    record = manifest["files"].pop(name)
    manifest["files"][other] = record
    path = step / "index.json"
    path.write_text(path.read_text().replace(json.dumps(name), json.dumps(other)))
    if name != "index.json":
        manifest["files"]["index.json"] = {"bytes": path.stat().st_size, "digest": _digest(path.read_bytes())}
    sign(step, manifest)
    return f"{name} is called {other[:40]!r}"


def _change_index(folder: Path, change: Callable[[dict[str, Any]], str]) -> str:
    index = read(newest(folder) / "index.json")
    done = change(index["tensors"])
    (newest(folder) / "index.json").write_text(json.dumps(index))
    seal(newest(folder))
    return done


def part_changes(tensors: dict[str, Any], name: str, other: str, *, source: random.Random) -> Changes:
    """Returns changes to the parts of a tensor in an index; `other` is one of the same shape, if there is one."""
    parts = tensors[name]["parts"]
    offset, size, _, begin = part = source.choice(parts)
    return {
        "drop a part": lambda: parts.remove(part),
        "drop all parts": parts.clear,
        "repeat a part": lambda: parts.append(part),
        "replace a part by the other": lambda: part.__setitem__(slice(None), parts[1 - parts.index(part)]),
        "halve a part": lambda: size.__setitem__(0, size[0] // 2),
        "halve the tensor": lambda: tensors[name]["shape"].__setitem__(0, tensors[name]["shape"][0] // 2),
        "double a part": lambda: size.__setitem__(0, size[0] * 2),
        "shift a part": lambda: offset.__setitem__(0, offset[0] + source.choice((-1, 1, 7))),
        "shift the bytes": lambda: part.__setitem__(3, begin + source.choice((-4, 4, 1, 64, 2**70, -(2**70)))),
        "swap the bytes": lambda: swap(parts[0], parts[1], 3),
        "swap the files": lambda: swap(parts[0], parts[1], 2),
        "swap the offsets": lambda: swap(parts[0], parts[1], 0),
        "swap two tensors": lambda: swap(tensors, tensors, name, other),
        "swap parts of two tensors": lambda: swap(tensors[name], tensors[other], "parts"),
        "drop the tensor": lambda: tensors.pop(name),
        "add a tensor": lambda: tensors.update({"model/other": tensors[name]}),
        "rename the tensor": lambda: tensors.update({f"{name}x": tensors.pop(name)}),
        "another dtype": lambda: tensors[name].update(dtype=source.choice(("I32", "BF16", "F128", "U8"))),
        "transpose": tensors[name]["shape"].reverse,
        "reversed parts": parts.reverse,  # harmless
    }


def change_parts(folder: Path, source: random.Random) -> str:
    """Drops, halves, swaps, shifts or repeats parts of a tensor."""

    def change(tensors: dict[str, Any]) -> str:
        name, other = source.sample([name for name in tensors if len(tensors[name]["parts"]) > 1], 2)
        same = [each for each in tensors if each != name and tensors[each]["shape"] == tensors[name]["shape"]]
        changes = part_changes(tensors, name, source.choice(same or [other]), source=source)
        action = source.choice(list(changes))
        changes[action]()
        return f"{action}: {name}"

    return _change_index(folder, change)


def change_header(folder: Path, source: random.Random) -> str:
    """Changes the header of a safetensors file; the manifest agrees with it."""
    path = newest(folder) / source.choice(TENSOR_FILES)
    if source.random() < 0.2:
        done = damage_length(path, source)
    else:
        header, data = read_header(path)
        scratch = path.with_name("scratch.json")
        name, other = source.sample([name for name in header if name != "__metadata__"], 2)
        if source.random() < 0.4:
            swap(header[name], header[other], source.choice(("data_offsets", "dtype", "shape")))
            done = "swapped"
            scratch.write_text(json.dumps(header))
        else:
            scratch.write_text(json.dumps({name: header[name], "__metadata__": header["__metadata__"]}))
            done = damage_json(scratch, source)
            rest = {each: value for each, value in header.items() if each not in (name, "__metadata__")}
            scratch.write_bytes(scratch.read_bytes().rstrip()[:-1] + b", " + json.dumps(rest).encode()[1:])
        text = scratch.read_bytes()
        write_header(path, text + b" " * (-len(text) % 8), data)
        scratch.unlink()
    seal(newest(folder))
    return f"header of {path.name}: {done}"


def change_steps(folder: Path, source: random.Random) -> str:
    """Lets documents and folders claim other steps than they hold."""
    checkpoint, step = folder / "run" / "checkpoint", newest(folder)
    other = source.choice((999, LAST_STEP, STEPS[0], 0, -1, 2**63, 2**70, True, "6", None))

    def of_progress() -> None:
        (step / "progress.json").write_text(json.dumps(read(step / "progress.json") | {"step": other}))
        seal(step)

    def of_manifest() -> None:
        sign(step, read(step / "manifest.json")["manifest"] | {"step": other})

    def of_both() -> None:
        of_progress()
        of_manifest()

    actions: Changes = {
        "progress": of_progress,
        "manifest": of_manifest,
        "progress and manifest": of_both,
        "finished": lambda: (checkpoint / "finished.json").write_text(json.dumps({"step": other})),
        "finished is hostile": lambda: (checkpoint / "finished.json").write_text(source.choice(HOSTILE_VALUES)),
        "finished is a file": lambda: damage_file(checkpoint / "finished.json", source),
        "renamed": lambda: step.rename(checkpoint / f"step-{LAST_STEP}"),
        "copied": lambda: shutil.copytree(step, checkpoint / "step-999"),
        "the older one": lambda: (shutil.rmtree(step), shutil.copytree(checkpoint / f"step-{STEPS[0]}", step)),
    }
    action = source.choice(list(actions))
    actions[action]()
    return f"step {other} in {action}"


def add_folders(folder: Path, source: random.Random) -> str:
    """Adds what is no step, under the names of steps."""
    checkpoint, step = folder / "run" / "checkpoint", newest(folder)
    moved = folder.parent / "moved"
    names = (
        "step-7", "step-0007", "step-\u0667", f"step-{'9' * 240}", "step-7.replaced", "step-7.partial-x", 
        "step-7.purged", "step-7.bad-x", "step--1", "step-7\n", "step-1e3",
    )  # fmt: skip
    path = checkpoint / source.choice(names)
    actions: Changes = {
        "empty": path.mkdir,
        "a link to the step": lambda: path.symlink_to(step),
        "a link to /": lambda: path.symlink_to("/"),
        "a file": lambda: path.write_bytes(b"x"),
        "a copy": lambda: shutil.copytree(step, path),
        "the step, moved outside": lambda: (step.rename(moved), step.symlink_to(moved)),
    }
    action = source.choice(list(actions))
    actions[action]()
    return f"{path.name[:30]!r} is {action}"


def change_random_state(folder: Path, source: random.Random) -> str:
    """Replaces the state of the random number generator by bytes that torch refuses."""
    is_ones = source.random() < 0.5
    path = newest(folder) / "rank-0.safetensors"
    garble_random_state(path, lambda size: b"\xff" * size if is_ones else source.randbytes(size))
    seal(newest(folder))
    return "random state is garbage"


KINDS: dict[str, Kind] = {
    "file": damage_any_file,
    "sealed document": damage_sealed_document,
    "value": damage_any_value,
    "sealed value": damage_sealed_value,
    "signed manifest": damage_signed_manifest,
    "names": rename_files,
    "parts": change_parts,
    "header": change_header,
    "steps": change_steps,
    "folders": add_folders,
    "random state": change_random_state,
}

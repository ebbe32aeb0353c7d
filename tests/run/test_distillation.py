"""Students of a frozen teacher: what they resume from and log, and teachers that do not fit."""

import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

from tests.support.harness import run_ranks
from tests.support.runs import exit_codes, options, rows
from tests.support.teachers import SIZES, write_predictions, write_teacher
from tests.support.trainers import train_all
from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.schema_training import Distillation
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.planner.memory_estimate import estimate_memory
from torchtitan_clone.planner.step_memory import predict_step_memory
from torchtitan_clone.run import preflight
from torchtitan_clone.run.engine import build_plan_mesh
from torchtitan_clone.run.memory import find_memory_errors, host_memory, state_bytes, teacher_bytes
from torchtitan_clone.run.plan import run_identity
from torchtitan_clone.run.teacher import build_teacher, find_teacher_plan

CPU = torch.device("cpu")
DIFFERENT = (
    r'trained on different batches: the digest of the teacher was "\w{16}" and is "\w{16}". Restore what changed, or '
    "set checkpoint.allow_data_change to true"
)
STUDENT = {"distillation__alpha": 0.5, "distillation__temperature": 2.0, "checkpoint__interval": 3}


@pytest.fixture(scope="module")
def teacher(corpus, tmp_path_factory):
    """Returns the folder of a teacher with random weights."""
    return write_teacher(tmp_path_factory.mktemp("teachers") / "teacher", corpus)


def logged(folder):
    return [(row["loss"], row["auxiliary/distillation_kl"], row["grad_norm"]) for row in rows(folder) if "loss" in row]


def test_a_student_resumes_to_the_last_bit_and_a_teacher_is_not_saved(corpus, teacher, tmp_path):
    def student(name, steps):
        values = {"training__steps": steps, "lr_scheduler__total_steps": 6, "distillation__teacher_path": teacher}
        return options(corpus, tmp_path / name, **STUDENT | values)

    run_ranks(train_all, 1, [student("whole", 6), student("parts", 3), student("parts", 6)])
    whole, parts = logged(tmp_path / "whole"), logged(tmp_path / "parts")
    assert whole == parts
    assert len(whole) == 6
    assert whole[0][1] > whole[-1][1] > 0
    saved = [Weights(tmp_path / name / "run" / "checkpoint" / "step-6") for name in ("whole", "parts")]
    names = list(saved[0].meta())
    assert max(int(name.split(".")[1]) for name in names if name.startswith("layers.")) == 1
    assert all(saved[0].read(name).equal(saved[1].read(name)) for name in names)

    def resume(path, **changes):
        values = {"training__steps": 7, "lr_scheduler__total_steps": 6, "distillation__teacher_path": path, **changes}
        plan = preflight.resolve(
            load_config(options(corpus, tmp_path / "parts", **STUDENT | values)), world_size=1, device_type="cpu"
        )
        return preflight.prepare(plan, launch=Launch(rank=1, local_rank=0, world_size=1)).completed_steps

    other = write_teacher(tmp_path / "teacher", corpus, seed=6)
    with pytest.raises(ConfigError, match=DIFFERENT) as refused:
        resume(other)
    assert len({*re.findall("[0-9a-f]{16}", str(refused.value))}) == 2
    assert resume(other, checkpoint__allow_data_change=True) == 6
    assert resume(shutil.copytree(teacher, tmp_path / "copy")) == 6
    assert resume(None, distillation__alpha=None, distillation__temperature=None) == 6


def bytes_of_teacher(argv):
    """Returns the bytes of the teacher's weights on this rank."""
    config, launch = load_config(argv), Launch.from_environment()
    plan = preflight.resolve(config, world_size=launch.world_size, device_type="cpu")
    with process_group(config.comm, launch=launch, device=CPU):
        built = build_teacher(plan, mesh=build_plan_mesh(plan, device_type="cpu"), device=CPU)
        return 0 if built is None else sum(local_shard(x).nbytes for x in built.model.parameters())


@pytest.mark.parametrize("axis", ["data_parallel_shard", "pipeline_parallel"])
def test_memory_has_the_teacher_as_the_ranks_with_the_loss_hold_it(corpus, teacher, tmp_path, axis, monkeypatch):
    argv = options(
        corpus, tmp_path, **STUDENT, **{f"parallelism__{axis}_degree": 2}, distillation__teacher_path=teacher
    )
    plan = preflight.resolve(load_config(argv), world_size=2, device_type="cpu")
    weights, hidden = teacher_bytes(plan)
    is_pipeline = axis == "pipeline_parallel"
    assert run_ranks(bytes_of_teacher, 2, argv) == [0 if is_pipeline else weights, weights]
    assert hidden == (1 if is_pipeline else 4) * 64 * SIZES["dim"] * 4
    alone = replace(plan, config=replace(plan.config, distillation=Distillation()))
    *_, without = predict_step_memory(alone, device_type="cpu")
    *_, predicted = predict_step_memory(plan, device_type="cpu")
    assert predicted.weights - without.weights == pytest.approx(weights, rel=0.01)  # and buffers
    assert predicted.loss >= without.loss + hidden
    own, both = (estimate_memory(plan, teacher=teacher).state for teacher in (None, find_teacher_plan(plan)))
    assert both - own == pytest.approx(weights, rel=0.01)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(host_memory() // state_bytes(plan)))
    found = [*find_memory_errors(plan, device=CPU)]
    assert [message.split(":")[0] for message in found] == ["distillation.teacher_path"]


def test_both_formats_of_a_teacher_predict_the_same_and_itself_has_no_divergence(corpus, tmp_path):
    model = options(corpus, tmp_path / "teacher", training__steps=2, checkpoint__last_save_in_hf=True)
    folder = tmp_path / "teacher" / "run"
    teachers = {"own": folder, "hub": folder / "hf" / "step-2", "step": folder / "checkpoint" / "step-2"}
    students = [
        options(corpus, tmp_path / name, training__steps=2, **STUDENT, distillation__teacher_path=path)
        for name, path in teachers.items()
    ]
    start = {"checkpoint__initial_load_path": folder / "checkpoint" / "step-2", "optimizer__lr": 1e-7}
    given = {**STUDENT, **start, "distillation__alpha": 1.0, "distillation__teacher_path": folder}
    itself = options(corpus, tmp_path / "itself", training__steps=2, **given)
    run_ranks(train_all, 1, [model, *students, itself])
    found = [logged(tmp_path / name) for name in teachers]
    assert found[0] == found[1] == found[2]
    assert [row[1] for row in logged(tmp_path / "itself")] == pytest.approx([0.0, 0.0], abs=1e-6)
    assert logged(tmp_path / "itself")[0][2] < 1e-4 < found[0][0][2]


def test_another_teacher_makes_another_run(corpus, teacher, tmp_path):
    """To replica groups, and to a run that was rewound by checkpoint.load_step."""
    shutil.copytree(teacher, tmp_path / "teacher-copy")
    write_teacher(tmp_path / "teacher-other", corpus, seed=6)
    for name, end in {"hub-copy": b"a", "hub": b"a", "hub-other": b"b", "hub-config": b"a"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}" if name != "hub-config" else '{"rope_theta": 1}')
        (tmp_path / name / "model.safetensors").write_bytes(bytes(2 << 20) + end)
    rows = {"data": "d", "tokenizer": "t", "held_out_fraction": 0, "tokens": 1, "vocab_size": 9, "seq_len": 1}
    meta = {"format": 1, "k": 1, "dtype": "float16", "temperature": 1, "document_masking": True, **rows}
    for name, digest in {"store-copy": "a" * 64, "store": "a" * 64, "store-other": "b" * 64}.items():
        (tmp_path / name / "key").mkdir(parents=True)
        (tmp_path / name / "key" / "meta.json").write_text(json.dumps({**meta, "teacher": digest}))
    identities = {}
    for path in [teacher, *tmp_path.iterdir()]:
        option = "store" if path.name.startswith("store") else "teacher_path"
        config = load_config(options(corpus, tmp_path, **{f"distillation__{option}": path}))
        identities[path.name] = run_identity(preflight.resolve(config, world_size=1, device_type="cpu"))
    assert len(identities) == 10
    assert all(identities[name] == identities[f"{name}-copy"] for name in ("teacher", "hub", "store"))
    assert len(set(identities.values())) == 7


def errors(corpus, tmp_path, **changes):
    """Returns what a start with these options refuses."""
    try:
        config = load_config(options(corpus, tmp_path, **changes))
        preflight.check_start(preflight.resolve(config, world_size=1, device_type="cpu"))
    except ConfigError as error:
        return "\n".join(error.messages)
    return ""


WRONG = {
    "alpha of 1.5": ({"alpha": 1.5}, "distillation.alpha = 1.5: must be from 0 to 1"),
    "temperature of 0": ({"temperature": 0.0}, "distillation.temperature = 0.0: must be from 0.01"),
    "empty path": ({"teacher_path": '""'}, "distillation.teacher_path = "),
    "no folder": ({"teacher_path": "absent"}, 'distillation.teacher_path = "absent": absent: there is no such folder'),
    "two teachers": ({"store": "some"}, 'distillation.store = "some": distillation.teacher_path is set too'),
    "object store": (
        {"teacher_path": "s3://bucket/run"},
        'distillation.teacher_path = "s3://bucket/run": only checkpoint.folder may',
    ),
    "no checkpoint": ({"teacher_path": "."}, "the folder has no complete checkpoint"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_are_refused(corpus, teacher, tmp_path, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    changes, message = WRONG[name]
    values = {"teacher_path": teacher, **changes}
    found = errors(corpus, tmp_path, **{f"distillation__{key}": value for key, value in values.items()})
    assert message in found


def test_what_has_no_teacher_is_refused_with_it(corpus, teacher, tmp_path):
    others = {"training__z_loss": 1e-4, "compile__cuda_graph": True}
    for option, value in others.items():
        found = errors(corpus, tmp_path, distillation__teacher_path=teacher, **{option: value})
        assert f"{option.split('__')[1]}" in found
        assert "train without a teacher" in found
    assert "distillation.alpha = 0.7: there is no teacher" in errors(corpus, tmp_path, distillation__alpha=0.7)


def test_a_teacher_of_other_tokens_is_refused(corpus, tmp_path):
    other = write_teacher(tmp_path / "teacher", corpus, model__args__vocab_size=2049)
    found = errors(corpus, tmp_path, distillation__teacher_path=other)
    assert "its vocabulary has 2,049 tokens, and model.args.vocab_size is 2,048" in found
    short = write_teacher(tmp_path / "short", corpus, model__args__max_seq_len=64)
    found = errors(corpus, tmp_path, distillation__teacher_path=short, training__seq_len=128)
    assert "it takes sequences of up to 64 tokens, and training.seq_len is 128" in found


def test_a_teacher_with_another_tokenizer_is_refused(corpus, tmp_path):
    shutil.copytree(SHIPPED_FOLDER, tmp_path / "words")
    with (tmp_path / "words" / "tokenizer.json").open("a") as file:
        file.write("\n")
    other = write_teacher(tmp_path / "teacher", corpus, model__hf_assets_path=tmp_path / "words")
    found = errors(corpus, tmp_path, distillation__teacher_path=other)
    assert re.search(r"its tokenizer.json has the digest [0-9a-f]{12}, and that of the run [0-9a-f]{12}", found)
    with pytest.raises(ConfigError, match=r"its tokenizer.json has the digest"):
        write_predictions(options(corpus, tmp_path, distillation__store=tmp_path / "store"), other)


def test_a_damaged_teacher_is_one_error(corpus, tmp_path):
    folder = write_teacher(tmp_path / "teacher", corpus)
    (file,) = (folder / "step-0").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    argv = options(corpus, tmp_path, distillation__teacher_path=folder)
    ((code, output),) = run_ranks(exit_codes, 1, [argv], tmp_path / "log")[0]
    assert (code, "Traceback" in output) == (2, False)
    assert f'distillation.teacher_path = "{folder}": {folder / "step-0"} is not a checkpoint or is corrupted' in output

"""Freezing of blocks and live re-meshing: equal to a plain loop, without work or memory for frozen blocks."""

import json
import weakref

import pytest
import torch
import torch.distributed as dist

from tests.data.corpora import jsonl, texts, write
from tests.marks import needs_door, needs_split_backward
from tests.support.faults import ReplicaGroupWrapper
from tests.support.harness import run_ranks
from tests.support.plain_loop import PlainLoop
from tests.support.runs import losses, options, rows, train
from tests.support.trainers import full_copies, open_trainer
from torchtitan_clone.torch_compat import group_timeout, process_groups

CPU = torch.device("cpu")
STEPS = 5
POINTS = {3: 1, 4: 3}
INIT_TIMEOUT = 123
VALIDATED = {"validation__enable": True, "validation__freq": 4, "validation__steps": 1}


@pytest.fixture(scope="session")
def corpus(short_documents):
    """Returns documents of which most rows hold several."""
    return short_documents


def schedule(*points):
    """Returns training.freeze_schedule for the command line, from (step, layers, further keys)."""
    entries = [{"step": step, "layers": layers, **more} for step, layers, more in points]
    inline = (", ".join(f"{key} = {value}" for key, value in entry.items()) for entry in entries)
    return f"[{', '.join(f'{{{entry}}}' for entry in inline)}]"


def frozen_options(corpus, folder, first=None, second=None, **changes):
    """Returns options of a run that freezes one of four blocks before step 3, and three before step 4."""
    points = [(step, layers, more or {}) for (step, layers), more in zip(POINTS.items(), (first, second), strict=True)]
    common = {"model__args__n_layers": 4, "training__steps": STEPS, "training__freeze_schedule": schedule(*points)}
    common["comm__init_timeout_seconds"] = INIT_TIMEOUT
    return options(corpus, folder, **common | changes)


def train_plainly(argv):
    """Returns losses and gradient norms of all steps, and weights at the end, of a plain loop with requires_grad."""
    loop = PlainLoop(argv)
    found = []
    for step in range(1, STEPS + 1):
        for layer in range(POINTS.get(step, 0)):
            loop.model.tok_embeddings.requires_grad_(False)
            loop.model.layers[str(layer)].requires_grad_(False)
        found.append(loop.train_step(step))
    return found, full_copies(loop.parameters.items())


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    """Returns the plain loop's losses, norms and weights."""
    argv = frozen_options(corpus, tmp_path_factory.mktemp("plain"), training__local_batch_size=1)
    return run_ranks(train_plainly, 1, argv)[0]


@pytest.mark.parametrize("rows_of_rank", [4, 3])
def test_validation_measures_the_same_rows_on_another_mesh(corpus, tmp_path, rows_of_rank):
    """With three rows of each rank one batch of twice as many instead of two."""
    changes = {"validation__enable": True, "validation__freq": 2, "validation__steps": 2}
    changes |= {**PIPELINE, "parallelism__pipeline_parallel_microbatch_size": 1, "training__steps": 4}
    changes["validation__local_batch_size"] = rows_of_rank
    found = []
    for name, first in (("moved", ALONE), ("same", {})):
        argv = frozen_options(corpus, tmp_path / name, first, {}, **changes)
        assert train(argv, world_size=2, log_folder=tmp_path)[0] == 0
        found.append([row["validation_loss"] for row in rows(tmp_path / name) if "validation_loss" in row])
    assert len(found[0]) == 2
    assert found[0] == pytest.approx(found[1], rel=1e-5)


class PhaseWatcher(ReplicaGroupWrapper):
    """Keeps the state of a trainer before and after each point of the schedule."""

    def __init__(self, group):
        super().__init__(group)
        self.trainer = None
        self.step = 0
        self.before = {}
        self.seen = []

    def begin_step(self):
        is_training = self._group.begin_step()
        self.step += 1
        if self.step in POINTS:
            self.before = state_of(self.trainer)
        return is_training

    def record_samples(self, samples):
        self._group.record_samples(samples)
        if self.step in POINTS:
            self.seen.append((self.before, state_of(self.trainer)))
            assert {group_timeout(group, device=CPU).seconds for group in process_groups()} == {INIT_TIMEOUT}


def state_of(trainer):
    """Returns copies of the global state that this rank has."""
    return full_copies(trainer.engine.state_tensors().items())


def train_and_look(argv):
    """Returns the state of this rank around each point and at the end, and the numbers of process groups."""
    watchers = []

    def wrap(group):
        watchers.append(PhaseWatcher(group))
        return watchers[0]

    with open_trainer(argv, wrap_replica_group=wrap) as trainer:
        watchers[0].trainer = trainer
        replaced = [weakref.ref(part) for part in trainer.engine.model_parts]
        trainer.train()
        assert not any(part() for part in replaced)  # their memory is free
        mesh = trainer.engine.mesh
        of_mesh = {*mesh.group_axes(), *(group.group_name for group in mesh.groups)}
        groups = len(dist.distributed_c10d._world.pg_map), len(of_mesh)
        return watchers[0].seen, state_of(trainer), groups


def merged(states):
    """Returns the tensors of all ranks by name."""
    return {name: tensor for state in states for name, tensor in state.items()}


ALONE = {"pipeline_parallel_degree": 1, "local_batch_size": 2}
PIPELINE = {
    "training__local_batch_size": 8, "parallelism__pipeline_parallel_degree": 2,
    "parallelism__pipeline_parallel_microbatch_size": 2,
}  # fmt: skip
SCHEDULE, TENSOR = "parallelism__pipeline_parallel_schedule", {"parallelism__tensor_parallel_degree": 2}
COMPILED = {"compile__enable": True, "compile__backend": "eager"}  # no collective is in its graphs
CONTEXT = {"parallelism__context_parallel_degree": 2}

IDS = "one", "zero bubble", "shrinks compiled", "tensor", "context"


@pytest.mark.parametrize(
    ("world_size", "first", "second", "changes"),
    [
        (1, {}, {}, {"activation_checkpoint__mode": "full", "training__enable_cpu_offload": True}),
        pytest.param(
            2,
            {},
            {},
            PIPELINE | {SCHEDULE: "ZBVZeroBubble", "comm__straggler_freq": 2},
            marks=needs_split_backward,
        ),
        (
            2,
            ALONE,
            {},
            PIPELINE | {SCHEDULE: "Interleaved1F1B", **COMPILED},
        ),
        pytest.param(4, {}, ALONE, PIPELINE | TENSOR | VALIDATED, marks=pytest.mark.many_ranks),
        pytest.param(4, ALONE, {}, PIPELINE | CONTEXT, marks=pytest.mark.many_ranks),
    ],
    ids=IDS,
)
def test_freezing_equals_a_plain_loop(corpus, tmp_path, plain, world_size, first, second, changes):
    found, weights = plain
    answers = run_ranks(train_and_look, world_size, frozen_options(corpus, tmp_path, first, second, **changes))
    logged = [(row["loss"], row["grad_norm"]) for row in rows(tmp_path) if "loss" in row]
    assert len(logged) == STEPS
    for (loss, norm), (expected_loss, expected_norm) in zip(logged, found, strict=True):
        assert loss == pytest.approx(expected_loss, rel=1e-5)
        assert norm == pytest.approx(expected_norm, rel=1e-4)
    end = merged(state for _, state, _ in answers)
    for name, value in weights.items():
        assert (end[f"model/{name}"] - value).norm() <= 1e-4 * value.norm(), name
    kept = {name.split("/")[1] for name in end if name.startswith("optimizer/")}
    assert kept == {name for name in weights if name.startswith(("layers.3.", "norm", "output"))}
    for point, layers in enumerate(POINTS.values()):
        before, after = (merged(seen[point][side] for seen, *_ in answers) for side in range(2))
        assert {name for name in before if name.startswith("model/")} == {f"model/{name}" for name in weights}
        assert all(torch.equal(tensor, before[name]) for name, tensor in after.items())
        frozen = [
            f"model/{name}" for name in weights if name.startswith(("tok", *(f"layers.{i}." for i in range(layers))))
        ]
        assert all(torch.equal(end[name], before[name]) for name in frozen)
        assert not any(name.replace("model", "optimizer") in after for name in frozen)
    for _, _, (groups, of_mesh) in answers:
        assert groups == of_mesh


STEADY = {"lr_scheduler__decay_ratio": 0.01, "checkpoint__interval": 2}


def test_a_run_resumes_on_both_sides_of_each_point(corpus, tmp_path):
    """Compares bit by bit, with a rank that keeps no optimizer state; then continues with nothing frozen."""

    def run(name, **changes):
        argv = frozen_options(corpus, tmp_path / name, {}, {}, **PIPELINE, **STEADY, **changes)
        code, output = train(argv, world_size=2, log_folder=tmp_path)
        assert code == 0, output
        return output

    run("uninterrupted")
    for steps in (2, 3, 4, 5):
        output = run("resumed", training__steps=steps)
    assert losses(tmp_path / "resumed") == losses(tmp_path / "uninterrupted")
    assert "parameters were frozen when this checkpoint was saved" not in output
    output = run("resumed", training__steps=6, training__freeze_schedule=[])
    assert "parameters were frozen when this checkpoint was saved" in output
    assert len(losses(tmp_path / "resumed")) == 6


def test_streams_continue_on_a_new_mesh(tmp_path):
    """From a pipeline, where one rank reads all streams, to two data ranks that read half of them each."""
    pytest.importorskip("datasets")
    write(tmp_path, {f"org/name/{n}.jsonl": jsonl(texts(100, seed=n)) for n in range(2)})

    def run(name, world_size, first=None, **changes):
        argv = frozen_options(tmp_path / "none", tmp_path / name, first, **changes)
        streamed = [word for word in argv if "dataset_path" not in word]
        streamed.append(f"--training.dataset={tmp_path / 'org/name'}")
        offline = {"HF_HUB_OFFLINE": "1"}
        code, output = train(streamed, world_size=world_size, log_folder=tmp_path, env=offline)
        assert code == 0, output
        return losses(tmp_path / name)

    on_one_rank = run("one", 1, training__local_batch_size=8)
    moved = run("moved", 2, ALONE, **PIPELINE)
    assert len(moved) == STEPS
    assert moved == pytest.approx(on_one_rank, rel=1e-5)


def collectives(corpus, folder, world_size, **changes):
    """Returns the table of rank 0 for a step in which three of four blocks are frozen."""
    points = schedule((1, 3, {}))
    argv = frozen_options(corpus, folder, training__freeze_schedule=points, training__steps=2, **changes)
    code, output = train([*argv, "--debug.trace_collectives"], world_size=world_size, log_folder=folder)
    assert code == 0, output
    return json.loads((folder / "run" / "collectives.rank0.json").read_text())


def total(found, key, **wanted):
    return sum(row[key] for row in found if all(row[name] == value for name, value in wanted.items()))


@needs_door("planner")
def test_frozen_blocks_are_neither_reduced_nor_gathered_for_backward(corpus, tmp_path):
    found = collectives(corpus, tmp_path / "fsdp", 2, training__local_batch_size=4)
    embedding, ends = 4 * 2048 * 64, 4 * (2048 + 1) * 64
    block = 4 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 192 + 2 * 64)
    assert total(found, "bytes", axis="fsdp", collective="reduce_scatter") == block + ends
    assert total(found, "bytes", axis="fsdp", collective="all_gather") == 5 * block + embedding + ends
    found = collectives(corpus, tmp_path / "pipeline", 2, **PIPELINE)
    assert total(found, "count", axis="pp", collective="send") == 4
    assert total(found, "count", axis="pp", collective="recv") == 0


def test_frozen_blocks_are_compiled_without_recomputation(corpus, tmp_path):
    """torch cannot recompute an operator that draws random numbers in a graph without gradients."""
    changes = {**COMPILED, "compile__backend": "aot_eager", "activation_checkpoint__mode": "full"}
    changes |= {"training__document_masking": False, "model__args__dim": 96, "checkpoint__enable": False}
    code, text = train(frozen_options(corpus, tmp_path, **changes), log_folder=tmp_path)
    assert code == 0, text

"""Pipelines compute what one device computes: every schedule, with every other axis, in training and validation."""

import gc
import json

import pytest
import torch
import torch.distributed as dist

from tests.marks import marked, needs_door, needs_split_backward
from tests.parallel.test_gradients import Runs, parallel_gradients
from tests.support.harness import RankFailed, run_ranks
from tests.support.runs import losses, options, rows, train
from tests.support.trainers import open_trainer
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.config.schema import Parallelism
from torchtitan_clone.cpu.shared_memory import MOST_BYTES_AT_ONCE, connect
from torchtitan_clone.observe.records import PIPELINE_FILE
from torchtitan_clone.parallel.pipeline import _as_messages, bubble_fraction, describe_pipeline, timed_actions
from torchtitan_clone.parallel.runtime import Launch, pick_device, process_group
from torchtitan_clone.parallel.stages import SCHEDULES, Stages, resolved_stages
from torchtitan_clone.run import preflight
from torchtitan_clone.run.pipeline_rules import find_pipeline_errors

FILE_1F1B = "0F0,0F1,0B0,0F2,0B1,0F3,0B2,,0B3\n1F0,1B0,1F1,1B1,1F2,1B2,1F3,1B3\n"
FILE_ZERO_BUBBLE = "0F0,0F1,0I0,0W0,0I1,0W1\n1F0,1I0,1F1,1I1,1W0,1W1\n"
UNEVEN = [
    ["tok_embeddings", "layers.0", "layers.1", "layers.2", "layers.3"],
    ["layers.4", "layers.5", "norm", "output"],
]


def pipelined(corpus, folder, schedule="1F1B", *, degree=2, **changes):
    """Returns options of six layers in a pipeline; a rank has all its rows in one pass."""
    if "\n" in schedule:
        folder.mkdir(exist_ok=True)
        (folder / "schedule.csv").write_text(schedule)
        changes["parallelism__pipeline_parallel_schedule_csv"] = folder / "schedule.csv"
    else:
        changes["parallelism__pipeline_parallel_schedule"] = schedule
    common = {"model__args__n_layers": 6, "training__local_batch_size": 8}
    return options(corpus, folder, **common | {"parallelism__pipeline_parallel_degree": degree} | changes)


MICROBATCH = "parallelism__pipeline_parallel_microbatch_size"
TENSOR_2 = {"parallelism__tensor_parallel_degree": 2}
ROWS_2, ROWS_4 = {"training__local_batch_size": 2}, {"training__local_batch_size": 4}
ALWAYS = {"parallelism__fsdp_reshard_after_forward": "always"}
REPLICATE_2 = {"parallelism__data_parallel_replicate_degree": 2}
SPLIT, FIRST_LESS = (
    f"parallelism__{key}" for key in ("module_fqns_per_model_part", "pipeline_parallel_first_stage_less_layers")
)


OP = {"activation_checkpoint__mode": "selective", "activation_checkpoint__selective_ac_option": "op"}
PIPELINES = {
    "GPipe, full ac": (2, "GPipe", {"activation_checkpoint__mode": "full"}),
    "1F1B, unmasked": (2, "1F1B", {"training__document_masking": False}),
    "LoopedBFS": (2, "LoopedBFS", {}),
    "interleaved, op": (2, "Interleaved1F1B", OP),
    "1F1B, accumulated": (2, "1F1B", ROWS_2),
    "1F1B, named modules": (2, "1F1B", {SPLIT: json.dumps(UNEVEN)}),
    "1F1B of a file": (2, FILE_1F1B, {MICROBATCH: 2}),
    "1F1B, 3 ranks": (3, "1F1B", {"degree": 3, MICROBATCH: 2, FIRST_LESS: 0}),
    "interleaved, 4 ranks": (4, "Interleaved1F1B", {"degree": 4, **ROWS_4}),
    "shard, 1F1B, resharded": (4, "1F1B", {**ROWS_4, **ALWAYS}),
    "replicate, GPipe": (4, "GPipe", {**ROWS_4, **REPLICATE_2}),
}  # fmt: skip
SPLIT_BACKWARD = {
    "interleaved zero bubble": (2, "InterleavedZeroBubble", {"parallelism__pipeline_parallel_layers_per_stage": 1}),
    "V, selective": (2, "ZBVZeroBubble", {"activation_checkpoint__mode": "selective"}),
    "dual V": (2, "DualPipeV", {}),
    "zero bubble of a file": (2, FILE_ZERO_BUBBLE, {MICROBATCH: 4}),
    "shard, interleaved zero bubble": (4, "InterleavedZeroBubble", ROWS_4),
    "shard, V": (4, "ZBVZeroBubble", ROWS_2),
    "tensor, dual V": (4, "DualPipeV", TENSOR_2),
}


def runs_of(pipelines, corpus, folder):
    return Runs({
        name: (ranks, pipelined(corpus, folder / name, schedule, **changes))
        for name, (ranks, schedule, changes) in pipelines.items()
    })  # fmt: skip


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    return runs_of(PIPELINES, corpus, tmp_path_factory.mktemp("pipelines"))


@pytest.mark.parametrize("name", marked(PIPELINES))
def test_gradients_equal_plain_pytorch(runs, name):
    runs.check(name)


@pytest.fixture(scope="module")
def runs_that_split_backward(corpus, tmp_path_factory):
    return runs_of(SPLIT_BACKWARD, corpus, tmp_path_factory.mktemp("split"))


@needs_split_backward
@pytest.mark.parametrize("name", marked(SPLIT_BACKWARD))
def test_gradients_of_a_split_backward_equal_plain_pytorch(runs_that_split_backward, name):
    runs_that_split_backward.check(name)


def gradients_with_resharding(runs):
    """Sets behind the rules what they refuse."""
    return parallel_gradients(runs, fsdp_reshard_after_forward="always")


@needs_split_backward
def test_torch_loses_gradients_where_zero_bubble_meets_resharding(corpus, tmp_path):
    """Shows the reason for the rule; where this fails, torch supports the combination and the rule can go."""
    argv = pipelined(corpus, tmp_path, "ZBVZeroBubble", **ALWAYS)
    with pytest.raises(ConfigError, match="torch loses those of weights that were freed"):
        preflight.resolve(load_config(argv), world_size=2, device_type="cpu")
    allowed = [a for a in argv if "reshard" not in a]
    with pytest.raises(RankFailed, match="NoneType"):  # a weight without gradient
        run_ranks(gradients_with_resharding, 2, [allowed])


def test_mixed_precision_crosses_stages_as_in_one_process(corpus, tmp_path):
    argv = pipelined(corpus, tmp_path, "Interleaved1F1B", training__mixed_precision_param="bfloat16")
    on_one_rank = [a for a in argv if not a.startswith(("--parallelism", "--training.local"))]
    (((loss, norm, expected),),) = run_ranks(parallel_gradients, 1, [[*on_one_rank, "--training.local_batch_size=1"]])
    for ((loss_of_pipeline, norm_of_pipeline, gradients),) in run_ranks(parallel_gradients, 2, [argv]):
        assert loss_of_pipeline == pytest.approx(loss, rel=1e-5)
        assert norm_of_pipeline == pytest.approx(norm, rel=1e-3)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            assert (gradient - expected[name]).norm() <= 1e-3 * expected[name].norm(), name


STEADY = {"lr_scheduler__decay_ratio": 0.01}
VALIDATED = {"validation__enable": True, "validation__freq": 3, "data__held_out_fraction": 0.03, "training__steps": 6}


def logged(folder, *names):
    """Returns values of the named metrics, in the order of the log."""
    return [row[name] for row in rows(folder) for name in names if name in row]


@pytest.fixture(scope="module")
def one_rank(corpus, tmp_path_factory):
    """Returns a run on one rank, with validation after every third step."""
    folder = tmp_path_factory.mktemp("one_rank")
    argv = options(corpus, folder, model__args__n_layers=6, **STEADY, **VALIDATED)
    code, output = train(argv, log_folder=folder)
    assert code == 0, output
    return folder


def operations_of_sizes(sizes):
    """Returns which operations of these bytes are still gloo's, and whether what they move arrives."""
    launch = Launch.from_environment()
    with process_group(load_config([]).comm, launch=launch, device=pick_device(launch)):
        group = dist.GroupMember.WORLD
        connect(group)
        is_sender = launch.rank == 0
        tensors = [torch.full((size,), index + int(is_sender), dtype=torch.uint8) for index, size in enumerate(sizes)]
        kind = dist.isend if is_sender else dist.irecv
        operations = _as_messages([dist.P2POp(kind, x, group=group, group_peer=1 - launch.rank) for x in tensors])
        assert all(kind.__name__ in repr(operation) for operation in operations)  # which torch logs
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        arrived = all(bool((x == index + 1).all()) for index, x in enumerate(tensors))
        return [operation.op is kind for operation in operations], arrived


@needs_door("cpu")
def test_stages_exchange_messages_unless_they_are_large():
    found = run_ranks(operations_of_sizes, 2, [1000, MOST_BYTES_AT_ONCE, MOST_BYTES_AT_ONCE + 1])
    assert found == [([False, False, True], True)] * 2


@pytest.mark.many_ranks
def hidden_states_left(argv):
    """Returns how many hidden states exist after a step, and after a validation."""
    with open_trainer(argv) as trainer:
        found = []
        for run in (trainer.train_step, trainer._validate):
            run(1)
            gc.collect()
            tensors = [x for x in gc.get_objects() if isinstance(x, torch.Tensor) and x.device.type == "cpu"]
            found.append(sum(x.shape == (1, 64, 64) for x in tensors))
        return found


def test_stages_keep_no_hidden_states(corpus, tmp_path):
    """torch itself keeps what a stage receives, and the inputs and outputs of a validation until the next one."""
    validation = {f"validation__{key}": value for key, value in (("enable", True), ("freq", 1), ("steps", 1))}
    argv = pipelined(corpus, tmp_path, model__args__n_layers=2, **validation, validation__local_batch_size=2)
    assert run_ranks(hidden_states_left, 2, argv) == [[0, 0]] * 2


def test_training_and_validation_give_the_losses_of_one_rank(corpus, tmp_path, one_rank):
    changes = {**STEADY, **VALIDATED, **ROWS_4, "validation__local_batch_size": 6}
    argv = pipelined(corpus, tmp_path, "Interleaved1F1B", **changes)
    code, output = train(argv, world_size=4, log_folder=tmp_path)
    assert code == 0, output
    assert "Interleaved1F1B, 4 stages on 2 ranks" in output
    pipeline = json.loads((tmp_path / "run" / PIPELINE_FILE).read_text())
    assert pipeline["summary"] in output
    assert {(rank, stage) for rank, _, stage, *_ in pipeline["actions"]} == {(0, 0), (1, 1), (0, 2), (1, 3)}
    assert len(losses(tmp_path)) == 6
    for name, tolerance in (("loss", 1e-5), ("grad_norm", 1e-4), ("validation_loss", 1e-5), ("validation_targets", 0)):
        assert logged(tmp_path, name) == pytest.approx(logged(one_rank, name), rel=tolerance), name


@needs_split_backward
@pytest.mark.many_ranks
def test_run_resumes_with_other_pipelines_and_without_one(corpus, tmp_path, one_rank):
    common = {**STEADY, "data__held_out_fraction": 0.03}
    runs = [
        (2, pipelined(corpus, tmp_path, "Interleaved1F1B", **common)),
        (1, options(corpus, tmp_path, model__args__n_layers=6, **common)),
        (4, pipelined(corpus, tmp_path, "1F1B", **common, **ROWS_4)),
        (3, pipelined(corpus, tmp_path, "DualPipeV", degree=3, **common)),
    ]
    for steps, (world_size, argv) in zip((2, 3, 4, 6), runs, strict=True):
        code, output = train([*argv, f"--training.steps={steps}"], world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
    assert losses(tmp_path) == pytest.approx(losses(one_rank), rel=1e-5)


def stages_of(schedule, ranks, *, each):
    places = (*range(ranks), *reversed(range(ranks))) if SCHEDULES[schedule].turns_back else [*range(ranks)] * each
    return Stages(modules=((),) * len(places), ranks=tuple(places))


@pytest.mark.parametrize(
    ("schedule", "ranks", "each", "microbatches", "expected"),
    [
        ("GPipe", 4, 1, 4, 3 / 7),
        ("1F1B", 2, 1, 8, 1 / 9),
        ("LoopedBFS", 2, 2, 4, 1 / 9),
        ("Interleaved1F1B", 4, 3, 8, 3 / 27),
        ("Interleaved1F1B", 3, 1, 6, 2 / 8),
        # A rank only waits for its first micro-batch.
        ("ZBVZeroBubble", 2, 2, 4, 1 / 25),
    ],
)
def test_bubble_is_that_of_the_papers(schedule, ranks, each, microbatches, expected):
    parallelism = Parallelism(pipeline_parallel_degree=ranks, pipeline_parallel_schedule=schedule)
    stages = stages_of(schedule, ranks, each=each)
    assert bubble_fraction(parallelism, stages=stages, microbatches=microbatches) == pytest.approx(expected)
    actions = timed_actions(parallelism, stages=stages, microbatches=microbatches)
    work = sum(action.end - action.start for action in actions)
    assert work == 3 * microbatches * len(stages.ranks)
    assert 1 - work / (ranks * max(action.end for action in actions)) == pytest.approx(expected)
    ends = {(action.kind, action.stage, action.microbatch): action.end for action in actions}
    for action in actions:
        before = {"F": ("F", action.stage - 1), "B": ("B", action.stage + 1)}.get(action.kind, ("", 0))
        assert action.start >= ends.get((*before, action.microbatch), 0)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_rules_refuse_what_torch_cannot_run(schedule):
    """Numbers of micro-batches that pass the rules have a schedule, and what torch refuses a rule refuses too."""
    each = SCHEDULES[schedule].stages_per_rank or 3
    for ranks in (2, 3):
        stages = stages_of(schedule, ranks, each=each)
        for count in range(1, 8):
            argv = [f"--parallelism.pipeline_parallel_{key}" for key in (f"degree={ranks}", f"schedule={schedule}")]
            argv += ["--parallelism.pipeline_parallel_layers_per_stage=1", f"--training.local_batch_size={count}"]
            config = load_config(argv)
            refused = find_pipeline_errors(config, n_layers=len(stages.ranks) - 2, tied_embeddings=False)
            if not refused:
                assert 0 <= bubble_fraction(config.parallelism, stages=stages, microbatches=count) < 1
            elif schedule != "1F1B":  # its share needs no plan
                with pytest.raises(ValueError, match="microbatches"):
                    bubble_fraction(config.parallelism, stages=stages, microbatches=count)


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "no order in which all work gets done: Malformed"),
        ("0F0,0B0,0F1,0B1\n1F0,1B0,1F1\n", "stage 1"),
    ],
)
def test_schedule_file_that_cannot_run_is_refused(tmp_path, text, fragment):
    file = tmp_path / "schedule.csv"
    file.write_text(text)
    parallelism = Parallelism(pipeline_parallel_degree=2, pipeline_parallel_schedule_csv=str(file))
    with pytest.raises(ConfigError, match=fragment):
        describe_pipeline(parallelism, stages=resolved_stages(parallelism, n_layers=2), rows=2)

"""The plan of a run: sizes resolved from the configuration, the plan of each phase, folders, and the written file."""

import dataclasses
import resource
import shutil

import pytest
import torch

from torchtitan_clone.checkpoint.folder import CONFIG_FILE
from torchtitan_clone.config import load_config
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.tokenizer import SHIPPED_FOLDER, TOKENIZER_FILE
from torchtitan_clone.models import find_model
from torchtitan_clone.run.folder import write_config
from torchtitan_clone.run.plan import (
    build_plan,
    later_phases,
    loss_chunk_tokens,
    replica_identity,
    run_identity,
    sharding_options,
)

MODEL = ["--model.args.n_layers=4", "--training.seq_len=64", "--training.local_batch_size=2"]
PIPELINE = "--parallelism.pipeline_parallel_degree=2"
FREEZE = "--training.freeze_schedule=[{step = 3, layers = 1}, {step = 5, layers = 2, pipeline_parallel_degree = 1}]"
REPLICA = ["--fault_tolerance.enable", "--fault_tolerance.group_size=3", "--fault_tolerance.replica_id=1"]


def plan_of(*argv, world_size=1, device_type="cpu"):
    config = load_config([*MODEL, *argv])
    spec = find_model(config.model)
    tokenizer = build_tokenizer(config.model.hf_assets_path, add_bos=config.data.add_bos)
    model_args = spec.resolve_args(config.model)
    return build_plan(
        config, world_size=world_size, spec=spec, model_args=model_args, tokenizer=tokenizer, device_type=device_type
    )


def test_sizes_follow_from_the_configuration(tmp_path):
    plan = plan_of(
        f"--job.dump_folder={tmp_path}", "--job.run_name=a", "--parallelism.tensor_parallel_degree=2", world_size=8
    )
    assert (plan.degrees.data, plan.degrees.tp, plan.world_size) == (4, 2, 8)
    assert plan.global_batch_size == 2 * 4
    assert plan.tokens_per_step == 8 * 64
    assert plan.parameter_count == sum(tensor.numel() for tensor in plan.model_tensors.values())
    assert {tensor.device for tensor in plan.model_tensors.values()} == {torch.device("meta")}
    assert plan.folder == plan.output_folder == tmp_path / "a"
    assert plan.checkpoint_folder == tmp_path / "a" / plan.config.checkpoint.folder
    assert later_phases(plan) == []


@pytest.mark.parametrize(
    ("device_type", "options", "expected"),
    [
        ("cpu", ["--model.args.vocab_size=2048"], 1024),
        ("cpu", ["--model.args.vocab_size=32768"], 1024),
        ("cpu", ["--model.args.vocab_size=32768", "--training.mixed_precision_param=float32"], 1024),
        ("cpu", ["--model.args.vocab_size=65536", "--training.mixed_precision_param=float32"], 512),
        ("cpu", ["--model.args.vocab_size=151936"], 512),
        ("cuda", ["--model.args.vocab_size=32768"], 4096),
        ("cuda", ["--model.args.vocab_size=32768", "--training.mixed_precision_param=float32"], 2048),
        ("cuda", ["--model.args.vocab_size=151936"], 1024),
        ("cuda", ["--training.loss_chunk_tokens=100"], 100),
    ],
)
def test_chunks_of_the_loss_follow_the_device(device_type, options, expected):
    """On a GPU logits take at most 256 MiB, or are of 1,024 tokens; on a CPU at most 128 MiB, of 512 to 1,024."""
    plan = plan_of("--training.mixed_precision_param=bfloat16", *options, device_type=device_type)
    assert loss_chunk_tokens(plan) == expected


@pytest.mark.parametrize(
    ("device_type", "options", "expected"),
    [
        ("cpu", [], 5),  # a block has 2.81 MiB in float32
        ("cpu", ["--training.mixed_precision_param=bfloat16"], 11),
        ("cpu", ["--parallelism.tensor_parallel_degree=2"], 11),
        ("cpu", ["--model.args.dim=1024"], 1),
        ("cpu", ["--parallelism.fsdp_blocks_per_group=3"], 3),
        ("cuda", [], 1),
        ("cuda", ["--parallelism.fsdp_blocks_per_group=3"], 3),
    ],
)
def test_a_cpu_shards_small_blocks_together(device_type, options, expected):
    plan = plan_of("--training.mixed_precision_param=float32", *options, device_type=device_type, world_size=2)
    assert sharding_options(plan).blocks_per_group == expected


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_gradients_keep_their_type_on_one_rank_without_replica_groups(device_type):
    def keeps_gradients(*options, **more):
        plan = plan_of("--training.mixed_precision_param=float32", *options, device_type=device_type, **more)
        return sharding_options(plan).keeps_gradients

    assert keeps_gradients()
    assert not keeps_gradients(world_size=2)
    assert not keeps_gradients("--parallelism.fsdp_reshard_after_forward=always")
    assert not keeps_gradients("--training.enable_cpu_offload")
    assert not keeps_gradients("--training.mixed_precision_reduce=bfloat16")
    assert not keeps_gradients(*REPLICA)


def test_a_seed_checkpoint_trains_no_step():
    assert plan_of("--training.steps=9").last_step == 9
    assert plan_of("--training.steps=9", "--checkpoint.create_seed_checkpoint").last_step == 0


def test_a_replica_group_shares_checkpoints_and_has_an_output_folder(tmp_path):
    plan = plan_of(f"--job.dump_folder={tmp_path}", "--job.run_name=a", *REPLICA)
    assert plan.num_replica_groups == 3
    assert plan.global_batch_size == 2 * 3
    assert plan.checkpoint_folder.parent == tmp_path / "a"
    assert plan.output_folder == tmp_path / "a" / "replica-1"


@pytest.mark.parametrize(("seq_len", "expected"), [(16, [4, 4]), (4096, [6, 2])])
def test_stages_have_equal_costs_by_kind_of_layer(seq_len, expected):
    """Full layers cost more than those with windows where rows are longer than windows."""
    types = ["window"] * 6 + ["full"] * 2
    options = ["--model.name=olmo3", "--model.args.n_layers=8", "--model.args.window=16"]
    options += [f"--model.args.layer_types={types}", f"--training.seq_len={seq_len}"]
    plan = plan_of(*options, PIPELINE, world_size=2)
    counts = [sum(name.startswith("layers.") for name in modules) for modules in plan.stages.modules]
    assert counts == expected


def test_phases_change_mesh_stages_and_flops_but_no_batch_size():
    first = plan_of(PIPELINE, "--parallelism.pipeline_parallel_schedule=1F1B", FREEZE, world_size=4)
    assert first.at_step(2) is first
    assert (first.frozen_modules, first.frozen_stages, first.loss_rank) == ((), 0, 1)
    second, third = later_phases(first)
    assert [(plan.first_step, plan.frozen_layers) for plan in (second, third)] == [(3, 1), (5, 2)]
    assert [first.at_step(step) for step in (3, 4, 5, 99)] == [second, second, third, third]
    assert third.frozen_modules == ("tok_embeddings", "layers.0", "layers.1")
    assert (second.degrees.pp, second.degrees.data) == (2, 2)
    assert (third.degrees.pp, third.degrees.data, third.loss_rank) == (1, 4, 0)
    assert len(third.stages.modules) == 1
    assert second.pipeline_summary
    assert third.pipeline_summary == ""
    assert {plan.global_batch_size for plan in (first, second, third)} == {first.global_batch_size}
    for plan in (first, second, third):
        expected = plan.spec.flops_per_token(
            plan.model_args, parameters=plan.parameters, seq_len=64, frozen_layers=plan.frozen_layers
        )
        assert plan.flops_per_token == expected
    assert first.flops_per_token > second.flops_per_token > third.flops_per_token


def test_a_phase_has_one_plan():
    """Building another in every step would take the time of building the model."""
    plan = plan_of(PIPELINE, "--parallelism.pipeline_parallel_schedule=1F1B", FREEZE, world_size=4)
    assert plan.at_step(3) is plan.at_step(4) is later_phases(plan)[0]


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ("--training.dataset_path=elsewhere", True),
        ("--job.run_name=other", True),
        ("--optimizer.lr=1", False),
        ("--training.seq_len=32", False),
        ("--model.args.n_layers=2", False),
        ("--debug.seed=5", False),
        ("--debug.moe_force_load_balance", False),
        ("--fault_tolerance.replica_id=2", True),
        ("--fault_tolerance.heartbeat_timeout_ms=9", True),
        ("--fault_tolerance.group_size=4", False),  # of the global batch, which is not set
        ("--fault_tolerance.semi_sync_method=diloco", False),
        ("--fault_tolerance.sync_steps=10", False),
        ("--fault_tolerance.num_fragments=5", False),
        ("--fault_tolerance.module_fqns_per_model_fragment=[['norm']]", False),
        ("--fault_tolerance.fragment_sync_delay=1", False),
        ("--fault_tolerance.fragment_update_alpha=0.5", False),
        ("--data.held_out_fraction=0.5", False),
        ("--quantize.linear.float8.recipe_name=rowwise", False),
        ("--parallelism.tensor_parallel_degree=2", False),
    ],
)
def test_replica_groups_share_what_decides_the_numbers(change, is_same):
    batch = ["--training.global_batch_size=48"] if "parallelism" in change else []
    first, other = (plan_of(*REPLICA, *batch, *more, world_size=2) for more in ([], [change]))
    assert (replica_identity(first) == replica_identity(other)) == is_same


def test_replica_groups_share_the_beginning_token(tmp_path):
    shutil.copy(SHIPPED_FOLDER / TOKENIZER_FILE, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|end_of_text|>", "bos_token": "<|end_of_text|>"}')
    given = [*REPLICA, f"--model.hf_assets_path={tmp_path}"]
    first, same, other = (
        replica_identity(plan_of(*given, *more, world_size=2))
        for more in ([], ["--data.add_bos=false"], ["--data.add_bos=true"])
    )
    assert first == same
    assert first != other


def test_replica_groups_can_be_added_to_a_batch_of_a_given_size():
    given = [*REPLICA, "--training.global_batch_size=48"]
    first, more, larger = (
        replica_identity(plan_of(*given, f"--fault_tolerance.group_size={groups}", world_size=ranks))
        for groups, ranks in ((3, 2), (4, 2), (3, 4))
    )
    assert first == more
    assert first != larger


def test_the_written_file_resolves_to_the_same_configuration(tmp_path):
    plan = plan_of(f"--job.dump_folder={tmp_path}", "--job.run_name=a", FREEZE, *REPLICA)
    write_config(plan)
    write_config(plan)
    (file,) = plan.output_folder.iterdir()
    assert file.name == CONFIG_FILE
    again = load_config([f"--job.config_file={file}"])
    for table in ("model", "training", "optimizer", "fault_tolerance"):
        assert dataclasses.asdict(getattr(again, table)) == dataclasses.asdict(getattr(plan.config, table))


def test_a_full_disk_loses_the_written_file_but_not_the_run(tmp_path, caplog):
    """A limit on the size of files stands for the full disk."""
    plan = plan_of(f"--job.dump_folder={tmp_path}", "--job.run_name=a")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        write_config(plan)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{plan.output_folder}/{CONFIG_FILE} cannot be written: File too large" in caplog.text


@pytest.mark.parametrize(
    ("change", "is_same"),
    [
        ("--training.steps=99", True),
        ("--training.max_seconds=9", True),
        ("--training.gc_freq=9", True),
        ("--training.max_skipped_steps=9", True),
        ("--training.enable_cpu_offload", True),
        ("--model.hf_assets_path={same}", True),
        ("--model.hf_assets_path={other}", False),
        ("--training.seq_len=32", False),
        ("--optimizer.lr=1", False),
    ],
)
def test_a_run_is_what_it_trains(tmp_path, change, is_same):
    """A run that was rewound by checkpoint.load_step continues as long as it is the same."""
    for name in ("same", "other"):
        shutil.copytree(SHIPPED_FOLDER, tmp_path / name)
    with (tmp_path / "other" / TOKENIZER_FILE).open("a") as file:
        file.write(" ")
    change = change.format(same=tmp_path / "same", other=tmp_path / "other")
    assert (run_identity(plan_of()) == run_identity(plan_of(change))) == is_same

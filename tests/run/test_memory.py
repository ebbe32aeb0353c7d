"""What a run certainly needs of memory, compared with what real processes hold."""

import torch

from torchtitan_clone.config import load_config
from torchtitan_clone.run import preflight
from torchtitan_clone.run.memory import activation_bytes, find_memory_errors, host_memory, state_bytes

CPU = torch.device("cpu")
SIZES = ["--model.args.n_layers=4", "--training.seq_len=64", "--training.mixed_precision_param=float32"]


def plan_of(*argv, world_size=1):
    return preflight.resolve(load_config([*SIZES, *argv]), world_size=world_size, device_type="cpu")


def test_state_is_divided_among_the_ranks_that_share_it():
    one = plan_of()
    assert state_bytes(one) == 16 * one.parameter_count
    assert state_bytes(plan_of("--optimizer.args.state_dtype=bfloat16")) == 12 * one.parameter_count
    muon = sum(x.numel() for name, x in one.parameters.items() if name.startswith("layers.") and x.ndim == 2)
    assert state_bytes(plan_of("--optimizer.name=Muon")) == 16 * one.parameter_count - 4 * muon
    halves = ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
    assert state_bytes(plan_of(*halves)) == 8 * one.parameter_count
    assert state_bytes(plan_of("--parallelism.tensor_parallel_degree=2", world_size=4)) == 4 * one.parameter_count
    replicated = plan_of("--parallelism.data_parallel_replicate_degree=4", world_size=4)
    assert state_bytes(replicated) == state_bytes(one)


def test_weights_that_are_frozen_from_the_first_step_have_no_gradients():
    plan = plan_of("--training.freeze_schedule=[{step = 1, layers = 3}]")
    trained = [name for name in plan.parameters if name.startswith(("layers.3.", "norm.", "output."))]
    count = sum(plan.parameters[name].numel() for name in trained)
    plan = plan.at_step(1)
    assert state_bytes(plan) == 16 * count + 4 * (plan.parameter_count - count)


def test_inputs_of_layers_are_those_of_what_runs_at_once():
    hidden = 8 * 64 * 256 * 4
    assert activation_bytes(plan_of(), rows=8) == 4 * hidden
    frozen = plan_of("--training.freeze_schedule=[{step = 1, layers = 3}]").at_step(1)
    assert activation_bytes(frozen, rows=8) == hidden
    assert activation_bytes(plan_of("--parallelism.context_parallel_degree=2", world_size=2), rows=8) == 2 * hidden
    assert activation_bytes(plan_of("--parallelism.pipeline_parallel_degree=2", world_size=2), rows=8) == hidden // 8


def test_only_what_cannot_fit_is_an_error():
    assert 2**28 < host_memory() < 2**50
    assert [*find_memory_errors(plan_of(), device=CPU)] == []
    found = [*find_memory_errors(plan_of("--training.local_batch_size=900000000"), device=CPU)]
    assert [message.split(":")[0] for message in found] == [
        "training.local_batch_size = 900000000",
        "training.global_batch_size = 900000000",
    ]

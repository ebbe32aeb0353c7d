"""Ranks that shard nothing train the parameters of FSDP without its copies, and to the same bits."""

from dataclasses import replace

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tests.marks import needs_door
from tests.support.harness import run_ranks
from tests.support.parity_matrix import QWEN3_5
from tests.support.runs import options
from tests.support.trainers import full_copies, open_trainer, open_trainers
from torchtitan_clone.comm.collectives import is_exchange
from torchtitan_clone.config import load_config
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.planner.simulate import fake_batch, fake_ranks
from torchtitan_clone.run import preflight
from torchtitan_clone.run.engine import build_engine
from torchtitan_clone.run.model_parts import parallelize_model_parts
from torchtitan_clone.torch_compat import TorchDispatchMode, runs_backward, storage_id

FSDP = "--parallelism.fsdp_reshard_after_forward=always"
ALWAYS = {"parallelism__fsdp_reshard_after_forward": "always"}  # FSDP itself
BF16 = {"training__mixed_precision_param": "bfloat16"}
MICROBATCHES = {"training__local_batch_size": 2}
EXPERTS = {
    "model__name": "qwen3_moe", "model__args__head_dim": 32, "model__args__hidden_dim": 64,
    "model__args__multiple_of": None, "model__args__moe__hidden_dim": 64, "model__args__moe__router_z": 0.1,
    "model__args__moe__batch_balance": 0.1, "model__args__moe__num_shared_experts": 1,
}  # fmt: skip
REPLICAS = {"parallelism__data_parallel_replicate_degree": 2, "parallelism__data_parallel_shard_degree": 1}
TENSOR = {"parallelism__tensor_parallel_degree": 2}
PIPELINE = {"parallelism__pipeline_parallel_degree": 2}
CASES = {
    "fp32": {},
    "one batch in bf16, tied": {**BF16, "training__local_batch_size": 8, "model__args__tied_embeddings": True},
    "micro-batches in bf16, selective": {**BF16, **MICROBATCHES, "activation_checkpoint__mode": "selective"},
    "recomputed, compiled": {
        **MICROBATCHES, "activation_checkpoint__mode": "full", "compile__enable": True, "compile__backend": "aot_eager",
    },
    "experts with auxiliary losses": {**BF16, **MICROBATCHES, **EXPERTS},
    "decays in fp32, recomputed": {**BF16, **MICROBATCHES, **QWEN3_5, "activation_checkpoint__mode": "full"},
    "frozen blocks": {"training__freeze_schedule": "[{step = 1, layers = 1}]"},
    "replicas, micro-batches in bf16": {**REPLICAS, **BF16, **MICROBATCHES},
    "tensor, tied": {**TENSOR, **MICROBATCHES, "model__args__tied_embeddings": True},
    # Of several passes FSDP adds up the sums of each.
    "pipeline in bf16": {**PIPELINE, **BF16, "training__local_batch_size": 8},
    "replicas, tensor": {**REPLICAS, **TENSOR},
}  # fmt: skip


def states_after_two_steps(runs):
    """Returns whether FSDP wraps the model, and all tensors, of each run."""
    found = []
    for trainer in open_trainers(runs):
        for step in (1, 2):
            trainer.train_step(step)
        engine = trainer.engine
        found.append((isinstance(engine.model_parts[0], FSDPModule), full_copies(engine.state_tensors().items())))
    return found


@pytest.mark.parametrize("case", CASES)
def test_training_gives_the_bits_of_fsdp(corpus, tmp_path, case):
    ranks = 2 ** sum(axis.items() <= CASES[case].items() for axis in (REPLICAS, TENSOR, PIPELINE))
    runs = [options(corpus, tmp_path / name, **CASES[case], **more) for name, more in (("a", {}), ("b", ALWAYS))]
    for (is_fsdp, found), (is_fsdp_too, expected) in run_ranks(states_after_two_steps, ranks, runs):
        assert (is_fsdp, is_fsdp_too) == (False, True)
        assert found.keys() == expected.keys()
        different = [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)]
        assert different == []


def parameters_of_a_step(argv):
    """Returns what modules hold before, in and after a step, a forward without gradients, and one without backward."""
    with open_trainer(argv) as trainer:
        (model,) = trainer.engine.model_parts
        weight, seen = model.layers["0"].attention.wq.weight, []
        model.layers["0"].register_forward_hook(lambda block, *_: seen.append(block.attention.wq.weight))

        def held():
            return model.layers["0"].attention.wq.weight is weight

        after = [held()]
        trainer.train_step(1)
        after.append(held())
        tokens = torch.zeros(1, 8, dtype=torch.long)
        with torch.no_grad():
            model(tokens, positions_BT=tokens)
        after.append(held())
        model(tokens, positions_BT=tokens)
        after.append(held())
        with torch.no_grad():
            model(tokens, positions_BT=tokens)
        after.append(held())
        shares = storage_id(seen[0]) == storage_id(weight)
        gradient = weight.grad
        return after, isinstance(weight, DTensor), type(seen[0]), seen[0].dtype, shares, gradient is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_modules_hold_plain_parameters_from_forward_to_the_end_of_backward(corpus, tmp_path, dtype):
    """Copies in bf16; in fp32 the parameters themselves are plain tensors, which nothing replaces."""
    argv = options(corpus, tmp_path, training__mixed_precision_param=str(dtype).removeprefix("torch."))
    after, is_dtensor, kind, found, shares, no_gradient = run_ranks(parameters_of_a_step, 1, argv)[0]
    has_copies = dtype == torch.bfloat16
    assert after == [True, True, True, not has_copies, True]
    assert (is_dtensor, kind, found, no_gradient) == (has_copies, torch.nn.Parameter, dtype, True)
    assert shares is not has_copies


def distributed_weights_of_a_forward(argv):
    """Returns the names of the first layer's weights that are DTensors while it computes."""
    found = []
    with open_trainer(argv) as trainer:
        layer = trainer.engine.model_parts[0].layers["0"]

        def note(*_):
            found.append([name for name, weight in layer.named_parameters() if isinstance(weight, DTensor)])

        layer.register_forward_pre_hook(note)
        trainer.train_step(1)
    return found[0]


def test_linear_layers_hold_the_shards_of_a_rank_under_tensor_parallelism(corpus, tmp_path):
    argv = options(corpus, tmp_path, parallelism__tensor_parallel_degree=2)
    norms = ["attention_norm.weight", "ffn_norm.weight"]
    assert run_ranks(distributed_weights_of_a_forward, 2, argv) == [norms, norms]


def steps_of_one_device(argv, device_type):
    """Returns the data types of gradients, and all tensors after two steps, of a plan for a type of device."""
    launch = Launch.from_environment()
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    plan = replace(plan, device_type=device_type)
    training = plan.config.training
    with process_group(plan.config.comm, launch=launch, device=torch.device("cpu")):
        engine = build_engine(plan, device=torch.device("cpu"))
        dtypes = set()
        for step in (1, 2):
            engine.begin_step(step)
            batches = [fake_batch(plan)] * (plan.global_batch_size // training.local_batch_size)
            engine.forward_backward(batches, num_targets=plan.tokens_per_step)
            norm = engine.gradient_norm()
            dtypes |= {parameter.grad.dtype for parameter in engine.parameters.values()}
            engine.optimizer.step(factor=min(1.0, 0.5 / norm.item()))
            engine.optimizer.zero_grad()
        return dtypes, full_copies(engine.state_tensors().items())


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_one_rank_keeps_gradients_of_a_single_backward_in_bf16(corpus, tmp_path, device_type, microbatches):
    """Which changes no bit; those of several are summed in fp32."""
    sizes = {"training__local_batch_size": 8 // microbatches, "training__loss_chunk_tokens": 64}
    argv = options(corpus, tmp_path, **BF16, **sizes)
    dtypes, found = run_ranks(steps_of_one_device, 1, argv, device_type)[0]
    assert dtypes == {torch.bfloat16 if microbatches == 1 else torch.float32}
    dtypes, expected = run_ranks(steps_of_one_device, 1, [*argv, FSDP], "cpu")[0]
    assert dtypes == {torch.float32}
    assert [name for name, tensor in expected.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize(("world_size", "more"), [(1, {}), (2, {}), (2, REPLICAS)], ids=["one", "shard", "replicate"])
def test_simulated_gpus_use_fsdp_if_there_are_several(corpus, tmp_path, world_size, more):
    config = load_config(options(corpus, tmp_path, **more))
    plan = preflight.resolve(config, world_size=world_size, device_type="cuda")
    with fake_ranks(plan) as mesh:
        (model,) = parallelize_model_parts(plan, mesh=mesh)
    assert isinstance(model, FSDPModule) == (world_size > 1)


def test_offloading_and_another_reduction_type_use_fsdp(corpus, tmp_path):
    runs = [
        options(corpus, tmp_path / "a", training__enable_cpu_offload=True),
        options(corpus, tmp_path / "b", training__mixed_precision_reduce="bfloat16", **BF16),
    ]
    assert [is_fsdp for is_fsdp, _ in run_ranks(states_after_two_steps, 1, runs)[0]] == [True, True]


class SumsOfReplicas(TorchDispatchMode):
    """Notes whether a backward runs when parts of sums over two replicas are sent, and when sums of parts are."""

    def __init__(self):
        super().__init__()
        self.found = {"reduce_scatter": [], "all_gather": []}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if is_exchange(func):
            self.found[args[-1]].append(runs_backward())
        return func(*args, **(kwargs or {}))


def sums_of_a_step(argv):
    with open_trainer(argv) as trainer, SumsOfReplicas() as sums:
        trainer.train_step(1)
        return sums.found


@pytest.mark.parametrize("more", [{}, MICROBATCHES], ids=["one backward", "two backwards"])
def test_gradients_of_replicas_are_summed_once_during_the_last_backward(corpus, tmp_path, more):
    argv = options(corpus, tmp_path, model__args__n_layers=3, model__args__dim=256, **REPLICAS, **more)
    large = 2 + 3 * 5  # of a block, wk, wv and the norms are small
    for sums in run_ranks(sums_of_a_step, 2, argv):
        # Of two gradients a rank may have received parts that it has not summed; small ones are summed together.
        expected = {
            "reduce_scatter": [True] * large + [False],
            "all_gather": [True] * (large - 2) + [False] * 3,
        }
        assert sums == expected


def norms_of_a_failed_step(argv):
    """Returns the norm of gradients of a step, after one whose backward failed, and of the same step alone."""
    norms = []
    for trainer in open_trainers([argv, argv]):
        (model,) = trainer.engine.model_parts
        if not norms:
            handle = model.layers["0"].register_full_backward_hook(fail)
            with pytest.raises(ZeroDivisionError):
                trainer.train_step(1)
            handle.remove()
            assert all(parameter.grad is None for parameter in model.parameters())
            assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        norms.append(gradient_norm(trainer))
    return norms


def fail(*_):
    raise ZeroDivisionError


def gradient_norm(trainer):
    tokens = torch.arange(64).view(1, 64)
    model = trainer.engine.model_parts[0]
    model(tokens, positions_BT=tokens).square().sum().backward()
    return torch.stack([parameter.grad.full_tensor().norm() for parameter in model.parameters()]).norm().item()


@needs_door("cpu")
@pytest.mark.parametrize(("ranks", "more"), [(1, BF16), (2, REPLICAS)], ids=["one", "replicas"])
def test_a_backward_that_fails_leaves_no_gradients(corpus, tmp_path, ranks, more):
    """Replicas have received parts of sums that they did not complete."""
    argv = options(corpus, tmp_path, model__args__dim=256, **more)
    for after_failure, alone in run_ranks(norms_of_a_failed_step, ranks, argv):
        assert after_failure == alone > 0

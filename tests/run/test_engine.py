"""What a step keeps, compiles and reads: tests of engine.py, and of state.py in recovery."""

import math
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.harness import run_ranks
from tests.support.runs import ROOT, losses, options, rows
from tests.support.trainers import open_trainer, train_all
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.models import MODELS

PACKAGE = ROOT / "torchtitan_clone"
SHARD = {"parallelism__data_parallel_shard_degree": 2, "training__local_batch_size": 2}
DIM = 64
READS = {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__,
         torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.nonzero, torch.nonzero}  # fmt: skip


def test_a_cuda_graph_has_no_effect_on_a_cpu(corpus, tmp_path):
    common = {"training__document_masking": False, "training__steps": 4}
    runs = [options(corpus, tmp_path / name, compile__cuda_graph=name, **common) for name in ("false", "true")]
    run_ranks(train_all, 1, runs)
    found = [losses(tmp_path / name) for name in ("false", "true")]
    assert len(found[0]) == 4
    assert found[0] == found[1]


def calls_after_steps(argv):
    """Returns how often the hook of a family is called in a run of which the loss of one step is not finite."""
    calls, forwards = [], []
    MODELS["hooked"] = replace(MODELS["llama3"], name="hooked", after_step=calls.append)

    def poison(_module, _args, out_BTD):
        forwards.append(1)
        return out_BTD * float("nan") if len(forwards) == 2 else out_BTD

    with open_trainer(argv) as trainer:
        trainer.engine.model_parts[0].norm.register_forward_hook(poison)
        trainer.train()
    return len(calls)


def test_a_family_may_change_its_state_after_each_step_that_counts(corpus, tmp_path):
    changes = {"model__name": "hooked", "training__local_batch_size": 8, "training__steps": 4}
    assert run_ranks(calls_after_steps, 1, options(corpus, tmp_path, **changes)) == [3]
    assert [row["skipped_steps"] for row in rows(tmp_path) if "loss" in row] == [0, 1, 1, 1]


def kept_of_compiled_blocks(argv):
    """Trains a step; returns how many tensors of each number of elements are kept for backward."""
    kept = {}
    with open_trainer([*argv, "--compile.backend=aot_eager_decomp_partition"]) as trainer:

        def pack(x):
            kept[x.untyped_storage().data_ptr()] = x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            trainer.train_step(1)
    return Counter(kept.values())


def test_compiled_blocks_of_a_cpu_keep_no_inputs_of_products_that_are_cheap(corpus, tmp_path):
    """They compute norms again, and in a feed-forward the product of the gate and what it multiplies."""
    layers, rows, hidden = 3, 4, 144
    changes = {"compile__enable": True, "checkpoint__enable": False, "training__document_masking": False}
    sizes = {"training__global_batch_size": rows, "model__args__n_layers": layers, "model__args__hidden_dim": hidden}
    (kept,) = run_ranks(kept_of_compiled_blocks, 1, options(corpus, tmp_path, **changes, **sizes))
    assert kept[rows * 64 * hidden] == 2 * layers
    # Inputs of both norms, queries and the output of attention of each layer; inputs of the last norm and of the loss.
    assert kept[rows * 64 * DIM] == 4 * layers + 2


def compiles_the_loss(argv):
    """Trains a step with components = ["loss"]; returns whether it compiles anything."""
    with open_trainer([*argv, '--compile.components=["loss"]', "--compile.backend=aot_eager"]) as trainer:
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                trainer.train_step(1)
        except RuntimeError as error:
            return "fail_on_recompile" in str(error)
        return False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_cpu_does_not_compile_the_loss(corpus, tmp_path, dtype):
    changes = {"training__mixed_precision_param": dtype, "compile__enable": True, "checkpoint__enable": False}
    assert run_ranks(compiles_the_loss, 1, options(corpus, tmp_path, **changes)) == [False]


def loss_after_recovery(argv):
    """Returns the loss of a step after a validation and a recovery of zeros as output, and that of equal logits."""
    with open_trainer(argv) as trainer:
        trainer.train_step(1)
        assert trainer._validate(1)
        recovery = trainer._state.recovery_state(before_load=lambda: None)
        recovery.load_from_peer(recovery.metadata())
        recovery.tensors["model/output.weight"].zero_()
        return trainer.train_step(2).loss, math.log(trainer.engine.plan.model_args.vocab_size)


def test_weights_received_after_a_validation_are_used(corpus, tmp_path):
    argv = options(corpus, tmp_path, **SHARD, validation__enable=True, validation__freq=1, validation__steps=1)
    for found, expected in run_ranks(loss_after_recovery, 2, argv):
        assert found == pytest.approx(expected, rel=1e-5)


class HostReads(TorchFunctionMode):
    """Notes where the package reads values of tensors, which on a GPU waits for the device; the loader's are on CPU."""

    def __init__(self):
        super().__init__()
        self.places = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in READS:
            frame = next(f for f in traceback.extract_stack()[::-1] if PACKAGE in Path(f.filename).parents)
            if Path(frame.filename).parent != PACKAGE / "data":
                self.places.append(f"{Path(frame.filename).name}:{frame.name}")
        return function(*args, **(kwargs or {}))


def host_reads_of_a_step(argv):
    with open_trainer(argv) as trainer:
        trainer.train_step(1)
        with HostReads() as reads:
            trainer.train_step(2)
        return reads.places


MOE = {"num_experts": 4, "top_k": 2, "hidden_dim": 64, "expert_bias": True, "bias_update_rate": 0.01}
OF_THE_HOST = {"gradients.py:sum_over_ranks", "balancing.py:update_router"}
"""Where tensors are read that are on the CPU also with a GPU."""
EXPERTS = {
    "model__name": "qwen3_moe",
    "model__args__head_dim": 32,
    "model__args__hidden_dim": 64,
    "model__args__multiple_of": None,
    **{f"model__args__moe__{name}": value for name, value in MOE.items()},
}


def test_a_step_reads_the_device_once(corpus, tmp_path):
    assert run_ranks(host_reads_of_a_step, 1, options(corpus, tmp_path)) == [["engine.py:read"]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_step_with_experts_and_a_mixture_reads_the_device_once(corpus, tmp_path, ranks):
    """But for the number of rows that experts get from other ranks, once a layer."""
    sources = toml_like([{"name": name, "path": str(corpus), "weight": 0.5} for name in "ab"])
    changes = {"training__dataset_path": None, "data__sources": sources, "model__args__n_layers": 3, **EXPERTS}
    if ranks == 2:
        changes |= {"parallelism__expert_parallel_degree": 2, "training__local_batch_size": 4}
    for places in run_ranks(host_reads_of_a_step, ranks, options(corpus, tmp_path, **changes)):
        exchanges = ["expert.py:_route"] * (3 if ranks == 2 else 0)
        assert [place for place in places if place not in OF_THE_HOST] == [*exchanges, "engine.py:read"]


class UpdateOrder(TorchDispatchMode):
    """Notes the operators that update the bias of routers and parameters, in their order."""

    def __init__(self):
        super().__init__()
        self.order = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name == "sign" or "adam" in name:
            self.order.append("router" if name == "sign" else "parameters")
        return function(*args, **(kwargs or {}))


def order_of_updates(argv):
    with open_trainer(argv) as trainer, UpdateOrder() as updates:
        trainer.train_step(1)
        return updates.order


def test_biases_of_routers_are_copied_before_the_optimizer_runs(corpus, tmp_path):
    argv = options(corpus, tmp_path, optimizer__implementation="fused", **EXPERTS)
    (order,) = run_ranks(order_of_updates, 1, argv)
    assert order[0] == "router"
    assert order[-1] == "parameters"

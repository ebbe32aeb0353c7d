"""One rank of a CPU trains the parameters of FSDP without its copies, and to the same bits."""

import pytest
import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from torchtitan_clone.testing.harness import run_ranks
from torchtitan_clone.testing.runs import options
from torchtitan_clone.testing.trainers import full_copies, open_trainer, open_trainers
from torchtitan_clone.torch_compat import storage_id

ALWAYS = {"parallelism__fsdp_reshard_after_forward": "always"}  # FSDP itself
BF16 = {"training__mixed_precision_param": "bfloat16"}
MICROBATCHES = {"training__local_batch_size": 2}
CASES = {
    "fp32": {},
    "micro-batches in bf16, tied": {**BF16, **MICROBATCHES, "model__args__tied_embeddings": True},
    "recomputed, compiled": {
        **MICROBATCHES, "activation_checkpoint__mode": "full", "compile__enable": True, "compile__backend": "aot_eager",
    },
    "frozen blocks": {"training__freeze_schedule": "[{step = 1, layers = 1}]"},
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
def test_one_rank_trains_to_the_bits_of_fsdp(corpus, tmp_path, case):
    runs = [options(corpus, tmp_path / name, **CASES[case], **more) for name, more in (("a", {}), ("b", ALWAYS))]
    ((is_fsdp, found), (is_fsdp_too, expected)) = run_ranks(states_after_two_steps, 1, runs)[0]
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
    argv = options(corpus, tmp_path, training__mixed_precision_param=str(dtype).removeprefix("torch."))
    after, is_dtensor, kind, found, shares, no_gradient = run_ranks(parameters_of_a_step, 1, argv)[0]
    assert after == [True, True, True, False, True]
    assert (is_dtensor, kind, found, no_gradient) == (True, torch.nn.Parameter, dtype, True)
    assert shares == (dtype == torch.float32)  # no copy


def test_more_than_fsdp_shards_is_left_to_it(corpus, tmp_path):
    runs = [
        options(corpus, tmp_path / "a", training__enable_cpu_offload=True),
        options(corpus, tmp_path / "b", training__mixed_precision_reduce="bfloat16", **BF16),
    ]
    assert [is_fsdp for is_fsdp, _ in run_ranks(states_after_two_steps, 1, runs)[0]] == [True, True]

"""Exports (run/export.py) of models whose experts are on two ranks, against transformers and the checkpoints."""

from collections import namedtuple

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.harness import run_ranks
from tests.support.parity_matrix import EXPERT, GPT_OSS, LATENT, LLAMA4, MOE
from tests.support.runs import options
from tests.support.trainers import open_trainers
from torchtitan_clone.checkpoint.folder import step_folder
from torchtitan_clone.checkpoint.offline import Weights
from torchtitan_clone.commands.convert_to_hf import convert
from torchtitan_clone.config import load_config
from torchtitan_clone.models import find_model
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.ops.dtensor_shards import local_shard

RANKS, STEPS = 2, 1
FAMILIES = {
    "qwen3_moe": MOE,
    "deepseek_v3": LATENT | {"model__args__moe__bias_update_rate": 0.01},
    "gpt_oss": GPT_OSS,
    "llama4": LLAMA4,
}
COMMON = {
    "training__steps": STEPS, "training__local_batch_size": 2, "lr_scheduler__warmup_steps": 1, EXPERT: RANKS,
    "checkpoint__last_save_in_hf": True,
}  # fmt: skip
Run = namedtuple("Run", "train start folder")
"""Command lines of a run and of one that starts from its export, and the folder of the first."""


def local_tensors(trainer):
    return {name: local_shard(tensor.detach()).clone() for name, tensor in trainer.engine.model_tensors().items()}


def train_export_and_start(runs):
    """Trains runs, and starts one from the export of each; returns how many experts of how many this rank holds.

    Asserts that the second run starts with the weights of the first, on each rank.
    """
    found = []
    trainers = open_trainers([argv for run in runs for argv in (run.train, run.start)])
    for trainer in trainers:
        assert trainer.train()
        trained = local_tensors(trainer)
        tensors = trainer.engine.model_tensors()
        found.append({name: (len(trained[name]), len(tensors[name])) for name in tensors if ".experts." in name})
        started = local_tensors(next(trainers))
        assert [name for name in trained if not torch.equal(trained[name], started[name])] == []
    return found


@pytest.fixture(scope="module")
def runs(corpus, tmp_path_factory):
    """Returns a run of each family, trained on two ranks in one start of processes."""
    runs = {}
    for name, changes in FAMILIES.items():
        folder = tmp_path_factory.mktemp(name)
        changes = {**COMMON, **changes}
        start = {"checkpoint__initial_load_in_hf": True, "checkpoint__initial_load_path": export_of(folder)}
        train = options(corpus, folder, **changes)
        runs[name] = Run(train, options(corpus, folder / "again", **changes, **start), folder)
    for held in run_ranks(train_export_and_start, RANKS, list(runs.values()), timeout=300):
        assert all(held)
        assert {counts for of_family in held for counts in of_family.values()} == {(4, 8)}
    return runs


def export_of(folder):
    return folder / "run" / "hf" / f"step-{STEPS}"


@pytest.mark.parametrize("name", FAMILIES)
def test_experts_of_two_ranks_are_the_run_in_transformers(runs, name):
    folder = runs[name].folder
    config = load_config(runs[name].train)
    spec = find_model(config.model)
    args = spec.resolve_args(config.model)
    model = spec.build(args)
    weights = Weights(step_folder(folder / "run" / "checkpoint", STEPS))
    state = named_state(model)
    assert weights.meta().keys() == state.keys()
    with torch.no_grad():
        for tensor_name, tensor in state.items():
            tensor.copy_(weights.read(tensor_name))
    theirs, loading = AutoModelForCausalLM.from_pretrained(
        export_of(folder), attn_implementation="eager", output_loading_info=True
    )
    assert not any(loading.values()), loading
    tokens_BT = torch.randint(0, args.vocab_size, (2, 100), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens_BT, positions_BT=torch.arange(100).expand(2, 100))
        torch.testing.assert_close(theirs.eval()(tokens_BT).logits, ours, rtol=1e-5, atol=1e-5)
    assert theirs.dtype == torch.float32
    assert ours.std() > 0.1


@pytest.mark.parametrize("name", FAMILIES)
def test_checkpoints_of_two_ranks_are_converted_to_the_exports(runs, tmp_path, name):
    folder = runs[name].folder
    convert(
        step_folder(folder / "run" / "checkpoint", STEPS), tmp_path / "hf", dtype=torch.float32, hf_assets_path=None
    )
    names = sorted(path.name for path in export_of(folder).iterdir())
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == names
    for file in names:
        assert (tmp_path / "hf" / file).read_bytes() == (export_of(folder) / file).read_bytes(), file

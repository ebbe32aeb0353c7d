"""muP: activations do not grow with the width, at the base nothing changes, and what has no rules is refused."""

import pytest
import torch

from tests.support import runs
from tests.support.harness import run_ranks
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema_training import Model, Optimizer
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.mup import lr_factor
from torchtitan_clone.optim.groups import resolve_groups, scale_rates
from torchtitan_clone.parallel.runtime import Launch, process_group
from torchtitan_clone.run.rules import find_run_errors
from torchtitan_clone.tools.width_check import slopes

BASE = {"model__args__mup_base_dim": 64}
SMALL = {
    "model__args__multiple_of": 1, "optimizer__lr": 1e-2, "training__local_batch_size": 1, "training__seq_len": 16,
    "training__global_batch_size": 1, "lr_scheduler__warmup_steps": 0,
}  # fmt: skip
QWEN3 = {
    "model__name": "qwen3", "model__args__multiple_of": None, "model__args__hidden_dim": 192,
    "model__args__head_dim": 16,
}  # fmt: skip
MUON = {"optimizer__name": "Muon", "optimizer__args__adjust_lr": "spectral", "optimizer__args__dtype": "float32"}


def measured(cases):
    """Returns the largest slope of a block in each case, before the first step and after each."""
    found = []
    with process_group(load_config(cases[0]).comm, launch=Launch.from_environment(), device=torch.device("cpu")):
        for argv in cases:
            of_steps = slopes(load_config(argv))
            found.append([max(each[name] for name in each if name != "norm") for each in of_steps])
    return found


def test_activations_are_as_large_at_every_width(corpus, tmp_path):
    """The coordinate check over four widths; without muP they grow, so that it would notice."""
    cases = [SMALL | BASE, SMALL | BASE | MUON, SMALL | BASE | QWEN3, SMALL]
    (found,) = run_ranks(measured, 1, [runs.options(corpus, tmp_path, **case) for case in cases])
    adamw, muon, qwen3, standard = found
    assert len(adamw) == 6
    for of_steps in (adamw, muon, qwen3):
        assert max(of_steps) < 0.05, of_steps
    assert min(standard[1:]) > 0.3, standard


def args_of(**args):
    return MODELS["llama3"].resolve_args(Model(args=args))


def test_nothing_changes_at_the_base():
    plain, base = args_of(), args_of(mup_base_dim=256)
    assert base.dim == 256
    spec = MODELS["llama3"]
    assert spec.lr_factor(plain) is None
    with torch.device("meta"):
        names = [name for name, _ in spec.build(base).named_parameters()]
        assert spec.build(base).output.scale == 1.0
    assert [spec.std_of(base)(name) for name in names] == [spec.std_of(plain)(name) for name in names]
    assert {lr_factor(base, name) for name in names} == {1.0}


def test_a_wider_model_follows_the_table():
    """Four times the base in width, and in the size of its heads."""
    sizes = {"dim": 1024, "n_heads": 8, "n_kv_heads": 4}
    plain, wide = args_of(**sizes), args_of(**sizes, mup_base_dim=256, mup_base_head_dim=32)
    spec = MODELS["llama3"]
    with torch.device("meta"):
        model = spec.build(wide)
    assert model.output.scale == 0.25
    assert model.layers["0"].attention.score_scale == 0.5
    std, of_plain = spec.std_of(wide), spec.std_of(plain)
    assert std("layers.1.attention.wq.weight") == of_plain("layers.1.attention.wq.weight") / 2
    assert std("layers.1.attention_norm.weight") is None
    assert (std("tok_embeddings.weight"), std("output.weight")) == (1.0, 256**-0.5)
    assert std("layers.0.feed_forward.router.weight") == 0.02 / 4
    groups = resolve_groups(Optimizer(lr=0.5, weight_decay=0.25), parameters=dict(model.named_parameters()))
    scaled = {name: group.settings for group in scale_rates(groups, spec.lr_factor(wide)) for name in group.parameters}
    rates = {name: (settings.lr, settings.weight_decay) for name, settings in scaled.items()}
    assert rates["layers.1.attention.wq.weight"] == (0.125, 1.0)
    assert rates["tok_embeddings.weight"] == rates["output.weight"] == (0.5, 0.25)
    assert rates["layers.1.ffn_norm.weight"] == (0.5, 0.0)
    assert len(rates) == len(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--optimizer.name=Muon"], "the rate of Muon must not depend on the width; set its args.adjust_lr"),
        (["--checkpoint.last_save_in_hf"], "the Hugging Face format has no model whose scores and logits are scaled"),
        (["--checkpoint.initial_load_in_hf"], "neither import nor export weights in this format"),
    ],
)  # fmt: skip
def test_what_has_no_rules_is_refused(options, message):
    config = load_config(["--model.args.mup_base_dim=256", *options])
    errors = find_run_errors(
        config, world_size=1, args=args_of(mup_base_dim=256), tokenizer_vocab_size=None, device_type="cpu"
    )
    assert sum(message in error for error in errors) == 1, errors
    args = MODELS["deepseek_v3"].resolve_args(Model(name="deepseek_v3", args={"mup_base_dim": 64}))
    assert [each for each in args.violations() if "mup_base_dim = 64: muP is for llama3, qwen3 and qwen3_moe" in each]

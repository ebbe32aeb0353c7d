"""Names of families and flavors, and initial values."""

import math
import re
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from torchtitan_clone.config import ConfigError, help_text
from torchtitan_clone.config.schema_training import Model
from torchtitan_clone.models import MODELS, find_model
from torchtitan_clone.parallel.init_weights import init_weights


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="known: llama3"):
        find_model(Model(name="llama5"))
    with pytest.raises(ConfigError, match="known: debugmodel, 1B"):
        MODELS["llama3"].resolve_args(Model(flavor="2B"))


def test_the_help_lists_all_families():
    (line,) = re.findall(r"Model family: (.*?)\.$", help_text("model"), re.MULTILINE | re.DOTALL)
    assert re.split(r",\s+|\s+or\s+", line) == list(MODELS)


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gpt_oss", "olmo2"])
@pytest.mark.parametrize(("dim", "tied"), [(64, True), (256, True), (512, True), (256, False)])
def test_a_random_model_predicts_no_token_above_others(name, dim, tied):
    """Untied ones start 0.5 above ln V; tied ones with embeddings of size 1 by 6 at width 256: each predicts itself."""
    spec = MODELS[name]
    args = replace(spec.flavors["debugmodel"], dim=dim, n_layers=4, tied_embeddings=tied)
    model = spec.build(args)
    init_weights(dict(model.named_parameters()), seed=0, std_of=partial(spec.initial_std, args))
    generator = torch.Generator().manual_seed(0)
    tokens_BT, targets_BT = torch.randint(0, args.vocab_size, (2, 2, 128), generator=generator)
    with torch.no_grad():
        log_probs = model(tokens_BT, positions_BT=torch.arange(128).expand(2, 128)).log_softmax(-1)
    above = F.nll_loss(log_probs.flatten(0, 1), targets_BT.flatten()).item() - math.log(args.vocab_size)
    assert -0.1 < above < (0.15 if tied else 0.7)
    assert log_probs.gather(-1, tokens_BT[..., None]).exp().mean() < 0.01


def test_other_families_formats_of_the_hub_and_muon_are_not_imported() -> None:
    code = "import sys, torchtitan_clone.trainer; from torchtitan_clone.models import MODELS as all; all['llama3']"
    code += "; print(*sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name for name in answer.stdout.split() if name.startswith("torchtitan_clone")}
    folders = {name.split(".")[2] for name in modules if name.count(".") == 3 and ".models." in name}
    assert folders == {"llama3"}
    assert not [name for name in modules if name.startswith(("torchtitan_clone.hub", "torchtitan_clone.optim.m"))]

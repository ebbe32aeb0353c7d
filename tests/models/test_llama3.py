"""Llama 3 against Hugging Face's implementation of the same weights."""

from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import Model
from torchtitan_clone.models import MODELS, find_model
from torchtitan_clone.models.llama3 import hf
from torchtitan_clone.models.llama3.model import Llama3, Llama3Args
from torchtitan_clone.models.rope import RopeScaling

ARGS = Llama3Args(dim=64, n_layers=3, n_heads=4, vocab_size=97, multiple_of=16, rope_theta=10000.0, max_seq_len=256)


def hugging_face_twin(model, args):
    """The same weights in LlamaForCausalLM."""
    twin = LlamaForCausalLM(LlamaConfig(**hf.to_config(args), attn_implementation="eager"))
    twin.load_state_dict({hf.to_name(name): value for name, value in model.state_dict().items()})
    return twin.eval()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_kv_heads": 2},
        {"n_kv_heads": 1, "tied_embeddings": True},
        {"rope_scaling": RopeScaling(factor=8.0, original_max_seq_len=64), "n_kv_heads": 2},
    ],
    ids=["multi-head", "grouped", "tied", "rope scaling"],
)
def test_logits_equal_hugging_face(changes):
    torch.manual_seed(0)
    args = replace(ARGS, **changes)
    model = Llama3(args)
    tokens = torch.randint(0, args.vocab_size, (2, 200))
    positions = torch.arange(200).expand(2, 200)
    with torch.no_grad():
        ours = model(tokens, positions_BT=positions)
        theirs = hugging_face_twin(model, args)(tokens).logits
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert theirs.std() > 0.1


def test_documents_in_one_row_are_computed_as_if_alone():
    torch.manual_seed(0)
    model = Llama3(replace(ARGS, n_kv_heads=2))
    lengths = [5, 1, 30, 12]
    tokens = torch.randint(0, ARGS.vocab_size, (1, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions_BT=positions, documents_BT=documents)
    alone = [model(part, positions_BT=torch.arange(part.shape[1])[None]) for part in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(alone, dim=1), rtol=1e-5, atol=1e-5)


def test_published_sizes():
    published = {"1B": 1_235_814_400, "3B": 3_212_749_824, "8B": 8_030_261_248, "70B": 70_553_706_496}
    published["405B"] = 405_853_388_800
    spec = MODELS["llama3"]
    for flavor, size in published.items():
        with torch.device("meta"):
            model = spec.build(spec.flavors[flavor])
        assert sum(p.numel() for p in model.parameters()) == size, flavor


def test_unknown_names_list_the_known_ones():
    with pytest.raises(ConfigError, match="known: llama3"):
        find_model(Model(name="llama4"))
    with pytest.raises(ConfigError, match="known: debugmodel, 1B"):
        MODELS["llama3"].resolve_args(Model(flavor="2B"))


def test_bad_arguments_are_named():
    assert replace(ARGS, n_kv_heads=2).violations() == []
    assert "n_kv_heads 3 does not divide n_heads 4" in replace(ARGS, n_kv_heads=3).violations()[0]
    assert "dim 64 over n_heads 5" in replace(ARGS, n_heads=5).violations()[0]
    assert "n_layers = 0" in replace(ARGS, n_layers=0).violations()[0]

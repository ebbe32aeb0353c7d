"""A family's model and transformers' model of the same weights, side by side."""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.support.twins import config_of, twin_of
from torchtitan_clone.config import overlay
from torchtitan_clone.hub.folder import open_weight_folder
from torchtitan_clone.hub.formats import format_of
from torchtitan_clone.models.decoder import named_state
from torchtitan_clone.ops.tensor_slices import assemble_source, sources_of


def assert_logits_equal(spec, args, *, tokens=200):
    """Asserts that both models give the same logits for two rows, up to rounding.

    Rounding grows with the logits: with embeddings that are tied and not scaled they reach 42, and those of both models
    differ by up to 1.6e-5 from the logits of transformers' model in float64.
    """
    assert args.violations() == []
    torch.manual_seed(0)
    model = spec.build(args)
    for name, parameter in model.named_parameters():
        if "norm" in name:  # else all equal, and a norm in the wrong place would go unnoticed
            torch.nn.init.normal_(parameter, mean=parameter.mean().item(), std=0.3)
        if "bias" in name or "sinks" in name:  # else zeros
            torch.nn.init.normal_(parameter)
    tokens_BT = torch.randint(0, args.vocab_size, (2, tokens))
    with torch.no_grad():
        ours = model(tokens_BT, positions_BT=torch.arange(tokens).expand(2, tokens))
        theirs = twin_of(spec, model, args)(tokens_BT).logits
    std = theirs.std().item()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5 * max(1.0, std))
    assert std > 0.1


def assert_round_trip(spec, args, *, tokens=100):
    """Asserts that random weights of transformers give the same logits here, and are exported bit by bit."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        config_of(spec, args), attn_implementation="eager", dtype=torch.float32
    ).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, mean=parameter.mean().item() if "norm" in name else 0.0, std=0.05)
    for name, buffer in theirs.named_buffers():
        if name.endswith("e_score_correction_bias"):  # else zeros
            torch.nn.init.normal_(buffer, std=0.05)
    model = spec.build(args)
    state = {name: tensor.detach() for name, tensor in named_state(model).items()}
    with TemporaryDirectory() as path:
        theirs.save_pretrained(path, max_shard_size="100KB")
        folder = open_weight_folder(Path(path))
        hub = format_of(spec).of_folder(folder.entries)
        folder.fill(state, slices=hub.map_state(state, args=args))
        original = {
            name: tensor for file in Path(path).glob("*.safetensors") for name, tensor in load_file(file).items()
        }
    sources = sources_of(hub.map_state(state, args=args))
    exported = {name: assemble_source(users, read=state.get, dtype=torch.float32) for name, users in sources.items()}
    assert exported.keys() == original.keys()
    assert all(torch.equal(exported[name], original[name]) for name in original)
    tokens_BT = torch.randint(0, args.vocab_size, (2, tokens))
    with torch.no_grad():
        ours = model(tokens_BT, positions_BT=torch.arange(tokens).expand(2, tokens))
        torch.testing.assert_close(ours, theirs(tokens_BT).logits, rtol=1e-5, atol=1e-5)


def assert_config_round_trip(spec, args):
    """Asserts that arguments return from their config.json, and from the one that transformers makes of it."""
    hub = format_of(spec)
    ours, theirs = hub.to_config(args), config_of(spec, args).to_dict()
    for written in (ours, {**theirs, "model_type": ours["model_type"]}):
        values = hub.from_config(written)
        assert values == hub.arguments(args)
        given = {key: value for key, value in values.items() if value is not None}
        again = overlay(spec.flavors["debugmodel"], given, where="model.args")
        assert hub.arguments(again) == hub.arguments(args)
        assert again.layer_kinds() == args.layer_kinds()


def assert_tensors_are(spec, args, theirs):
    """Asserts that an export has the names and shapes of transformers' tensors."""
    sources = sources_of(format_of(spec).map_state(spec.state_on_meta(args), args=args))
    found = {name: part.shape for name, ((_, part), *_) in sources.items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in theirs.items()}

"""Tests of sparse_latent.py: what an indexer changes and what it does not, and what trains it."""

import math
from dataclasses import replace

import pytest
import torch

from tests.models.test_families import SMALL
from tests.support.harness import run_ranks
from tests.support.runs import MODEL, options, rows
from tests.support.trainers import train_all
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.deepseek_v3.model import DeepSeekV3Args
from torchtitan_clone.models.sparse_latent import SparseLatentAttention
from torchtitan_clone.run.rules import find_run_errors

ARGS = replace(SMALL["deepseek_v32"], index_topk=5)
SPEC, DENSE = MODELS["deepseek_v32"], MODELS["deepseek_v3"]
TOKENS = 48


def build(args, *, seed=0):
    torch.manual_seed(seed)
    model = SPEC.build(args)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


def of_dense(args):
    names = {field for field in DeepSeekV3Args.__dataclass_fields__ if field in vars(args)}
    return DeepSeekV3Args(**{name: vars(args)[name] for name in names})


def batch(*, lengths=(TOKENS,), seed=1):
    """Returns tokens, positions and documents of one row."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, ARGS.vocab_size, (1, sum(lengths)), generator=random)
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), number) for number, length in enumerate(lengths)])[None]
    return tokens, positions, documents


def sums_of(model, tokens, positions, documents):
    """Returns the sum of logits, and that of the indexers' losses."""
    sums = model(
        tokens, positions_BT=positions, documents_BT=documents, targets_BT=tokens,
        loss_fn=lambda hidden, weight, _targets: (hidden @ weight.mT).sin().sum(),
    )  # fmt: skip
    return sums[0], sums[-1]


def is_indexers(name):
    return ".indexer." in name


@pytest.mark.parametrize("stage", ["sparse", "warm-up"])
def test_with_all_keys_it_is_latent_attention(stage):
    """The same logits and gradients: sparse with as many keys as tokens, and in the warm-up with fewer."""
    args = replace(ARGS, index_topk=TOKENS if stage == "sparse" else 5, indexer_stage=stage)
    model, dense = build(args), DENSE.build(of_dense(args))
    missing = dense.load_state_dict(model.state_dict(), strict=False)
    assert not missing.missing_keys
    assert all(is_indexers(name) for name in missing.unexpected_keys)
    inputs = batch(lengths=(17, 31))
    found, expected = (each(inputs[0], positions_BT=inputs[1], documents_BT=inputs[2]) for each in (model, dense))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    if stage == "sparse":
        for logits in (found, expected):
            logits.sin().sum().backward()
        found_grads = dict(model.named_parameters())
        for name, parameter in dense.named_parameters():
            torch.testing.assert_close(found_grads[name].grad, parameter.grad, rtol=1e-4, atol=1e-4)
    few = SPEC.build(replace(args, index_topk=5, indexer_stage="sparse"))
    few.load_state_dict(model.state_dict())
    assert (few(inputs[0], positions_BT=inputs[1], documents_BT=inputs[2]) - expected).abs().max() > 1e-2


def test_selection_is_within_documents():
    """A document in a row gives the logits and losses that it gives alone, and others do not change them."""
    model, lengths = build(ARGS), (19, 29)
    tokens, positions, documents = batch(lengths=lengths)
    packed = model(tokens, positions_BT=positions, documents_BT=documents)
    kl = sums_of(model, tokens, positions, documents)[1]
    of_alone = []
    for part in (slice(0, 19), slice(19, 48)):
        alone = tokens[:, part], positions[:, part], None
        logits = model(alone[0], positions_BT=alone[1])
        torch.testing.assert_close(packed[:, part], logits, rtol=1e-5, atol=1e-5)
        of_alone.append(sums_of(model, *alone)[1])
    torch.testing.assert_close(kl, sum(of_alone), rtol=1e-5, atol=1e-6)


def test_gradients_of_the_indexer_and_of_the_model_do_not_mix():
    model, inputs = build(ARGS), batch(lengths=(17, 31))
    names, parameters = zip(*model.named_parameters(), strict=True)
    loss, kl = sums_of(model, *inputs)
    of_loss = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    of_kl = torch.autograd.grad(kl, parameters, allow_unused=True)
    for name, by_loss, by_kl in zip(names, of_loss, of_kl, strict=True):
        is_reached = [grad is not None and bool(grad.any()) for grad in (by_loss, by_kl)]
        assert is_reached == ([False, True] if is_indexers(name) else [True, False]), name


def test_the_loss_is_zero_where_scores_are_those_of_attention():
    """With one key there is nothing to learn; the first token of each document has no loss."""
    attention = next(x for x in build(ARGS).modules() if isinstance(x, SparseLatentAttention))
    model = build(ARGS)
    kept = []
    block = model.layers["0"].attention
    block.register_forward_hook(lambda _module, _args, out: kept.append(out[1]))
    model(*batch()[:1], positions_BT=batch()[1], documents_BT=batch(lengths=(17, 31))[2])
    (loss,) = kept
    assert loss[0, [0, 17]].abs().max() < 1e-6
    assert (loss[0, 1:17] > 0).all()
    assert attention.core.top_k == 5


def test_warm_up_trains_indexers_only_and_its_loss_falls(corpus, tmp_path):
    """Then the sparse stage, of all weights, reads what the warm-up saved."""
    flavors = dict.fromkeys(f"model__args__{name}" for name in MODEL)
    common = {"model__name": "deepseek_v32", "model__args__n_layers": 2, "model__args__index_topk": 16, **flavors}
    common |= {"model__args__n_layers": 2, "checkpoint__enable": True, "checkpoint__interval": 6}
    common |= {"optimizer__lr": 1e-2}
    warm = options(corpus, tmp_path, **common, training__steps=6, model__args__indexer_stage="warm-up")
    run_ranks(train_all, 2, [warm])
    found = [row for row in rows(tmp_path) if "loss" in row]
    kl = [row["auxiliary/indexer_kl"] for row in found]
    assert kl[-1] < 0.9 * kl[0]
    assert math.isclose(found[0]["loss"], found[-1]["loss"], rel_tol=0.05)  # other tokens, the same weights


def errors_of(**changes):
    from torchtitan_clone.config import load_config

    config = load_config(["--model.name=deepseek_v32", *(f"--{key}={value}" for key, value in changes.items())])
    args = SPEC.resolve_args(config.model)
    return [*args.violations(), *find_run_errors(
        config, world_size=2, args=args, tokenizer_vocab_size=None, device_type="cpu"
    )]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.args.q_lora_rank": 0}, "q_lora_rank = 0: indexers read the latent of queries"),
        ({"model.args.index_head_dim": 8}, "index_head_dim = 8: must be at least qk_rope_head_dim 16"),
        ({"model.args.index_topk": 0}, "index_topk = 0: must be from 1"),
        (
            {"parallelism.context_parallel_degree": 2, "parallelism.context_parallel_rotate_method": "ring"},
            'rotate_method = "ring": indexers select among the keys of all ranks; set it to "allgather"',
        ),
        (
            {"parallelism.pipeline_parallel_degree": 2, "model.args.indexer_stage": "warm-up"},
            'indexer_stage = "warm-up": no gradient goes from stage to stage',
        ),
        ({"optimizer.qk_clip": 100}, "qk_clip = 100: the largest logits of attention to selected keys are not"),
    ],
)
def test_what_indexers_cannot_do_is_named(changes, message):
    assert any(message in error for error in errors_of(**changes)), errors_of(**changes)


def test_flops_count_selected_keys_and_the_indexer():
    args = replace(ARGS, index_topk=5)
    parameters = {name: x for name, x in SPEC.state_on_meta(args).items() if not name.endswith("expert_bias")}
    of_dense_args = {name: x for name, x in parameters.items() if not is_indexers(name)}
    dense = DENSE.flops_per_token(of_dense(args), parameters=of_dense_args, seq_len=64, frozen_layers=0)
    found = SPEC.flops_per_token(args, parameters=parameters, seq_len=64, frozen_layers=0)
    own = sum(x.numel() for name, x in parameters.items() if is_indexers(name))
    heads = args.n_heads * (args.latent_sizes.qk + args.v_head_dim)
    indexed = args.index_n_heads * args.index_head_dim * 64
    assert found - dense == 6 * own + args.n_layers * (6 * indexed - 6 * heads * (64 - 5))

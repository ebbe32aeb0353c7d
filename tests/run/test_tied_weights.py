"""Embedding and output projection stay one weight wherever a model is opened: on each way the same log-likelihoods."""

import importlib.util

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.run.test_stages import BORDER, EXTENSION, stage_options
from tests.support.harness import run_ranks
from tests.support.runs import losses, options, train
from tests.support.trainers import open_trainer, train_all
from torchtitan_clone.commands import convert_from_hf, convert_to_hf
from torchtitan_clone.commands import evaluate as evaluate_script
from torchtitan_clone.commands import generate as generate_script
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.models import MODELS
from torchtitan_clone.tools.trained_model import open_trained_model

CPU = torch.device("cpu")
FAMILIES = {
    "llama3": {},
    "qwen3": {"model__name": "qwen3", "model__args__multiple_of": None, "model__args__hidden_dim": 100},
}
TEXT = "import os\n\ndef main(argv):\n    return 0\n"
needs_harness = pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason='needs the extra "eval"')


@pytest.fixture(scope="module", params=FAMILIES)
def tied_folders(request, corpus, tmp_path_factory):
    """Returns what can be opened of a tied run on two ranks: checkpoints, exports, and a seed made of an export."""
    folder = tmp_path_factory.mktemp(request.param)
    changes = {**FAMILIES[request.param], "model__args__tied_embeddings": True, "training__steps": 3}
    argv = options(corpus, folder, **changes, checkpoint__last_save_in_hf=True, optimizer__lr=1e-2)
    code, output = train(argv, world_size=2, log_folder=folder)
    assert code == 0, output
    run, step = folder / "run", folder / "run" / "checkpoint" / "step-3"
    convert_to_hf.convert(step, folder / "hub", dtype=torch.float32, hf_assets_path=None)
    convert_from_hf.convert(folder / "hub", folder / "seed", spec=MODELS[request.param], dtype=torch.float32)
    return {"run": run, "step": step, "export": run / "hf" / "step-3", "hub": folder / "hub", "seed": folder / "seed"}


def log_likelihoods(folder):
    """Returns the log-likelihood of each next token of TEXT, and the ids."""
    trained = open_trained_model(folder, dtype=torch.float32, device=CPU)
    assert trained.model.is_tied
    tokens_BT = torch.tensor(trained.tokenizer.encode_batch([TEXT]))
    with torch.no_grad():
        logits = trained.model(tokens_BT, positions_BT=torch.arange(tokens_BT.shape[1])[None])
    return logits[0, :-1].log_softmax(-1).gather(1, tokens_BT[0, 1:, None]), tokens_BT


def test_every_opener_has_the_weights_of_the_run(tied_folders):
    found = {name: log_likelihoods(folder)[0] for name, folder in tied_folders.items()}
    assert all(torch.equal(each, found["run"]) for each in found.values())
    tokens_BT = log_likelihoods(tied_folders["hub"])[1]
    for name in ("export", "hub"):
        with torch.no_grad():
            logits = AutoModelForCausalLM.from_pretrained(tied_folders[name], dtype=torch.float32)(tokens_BT).logits
        theirs = logits[0, :-1].log_softmax(-1).gather(1, tokens_BT[0, 1:, None])
        torch.testing.assert_close(theirs, found["run"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_leaves_the_meta_device_stays_tied(dtype):
    args = {"dim": 64, "n_layers": 1, "n_heads": 4, "vocab_size": 97}
    for spec in (MODELS["llama3"], MODELS["qwen3"], MODELS["gpt_oss"], MODELS["olmo2"]):
        flavor = {**vars(spec.flavors["debugmodel"]), **args, "layer_types": ["full"], "tied_embeddings": True}
        arguments = type(spec.flavors["debugmodel"])(
            **{name: value for name, value in flavor.items() if name in vars(spec.flavors["debugmodel"])}
        )
        with torch.device("meta"):
            model = spec.build(arguments).to(dtype)
        assert model.to_empty(device=CPU).is_tied
        assert "output.weight" not in dict(model.named_parameters())
        assert not model.requires_grad_(False).to(torch.float64).tok_embeddings.weight.requires_grad
        assert model.is_tied


def test_text_is_equal_from_every_folder(tied_folders, capsys):
    texts = []
    for folder in tied_folders.values():
        assert generate_script.main([str(folder), "--prompt=def main(", "--max_new_tokens=12"]) == 0
        texts.append(capsys.readouterr().out)
    assert texts == [texts[0]] * len(tied_folders)


@needs_harness
def test_the_harness_scores_a_tied_model(tied_folders, tmp_path, capsys):
    (tmp_path / "mine.jsonl").write_text(
        "".join(f'{{"query": "import", "choices": [" {word}", " ("], "gold": 0}}\n' for word in ("os", "sys"))
    )
    (tmp_path / "mine.yaml").write_text(
        "task: mine\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path / 'mine.jsonl'}}}}}\n"
        'test_split: test\noutput_type: multiple_choice\ndoc_to_text: "{{query}}"\n'
        'doc_to_choice: "{{choices}}"\ndoc_to_target: "{{gold}}"\nmetric_list: [{metric: acc}]\n'
    )
    for name in ("run", "export"):
        words = [str(tied_folders[name]), "--tasks=mine", f"--include_path={tmp_path}"]
        assert evaluate_script.main(words) == 0
        assert "mine  acc,none" in capsys.readouterr().out


def train_tied(argv):
    """Trains; returns whether the model is tied on this rank."""
    with open_trainer(argv) as trainer:
        trainer.train()
        return trainer.engine.model_parts[0].is_tied


@pytest.mark.parametrize("source", ["step", "export", "seed"])
@pytest.mark.parametrize("tied_folders", ["llama3"], indirect=True)
def test_a_run_that_starts_from_tied_weights_is_tied(tied_folders, corpus, tmp_path, source):
    found = {}
    for name, parallelism in (("one", {}), ("two", {"parallelism__tensor_parallel_degree": 2})):
        changes: dict = {"model__args__tied_embeddings": True, "training__steps": 2, **parallelism}
        changes["checkpoint__initial_load_path"] = tied_folders[source]
        changes["checkpoint__initial_load_in_hf"] = source == "export"
        argv = options(corpus, tmp_path / name, **changes)
        assert all(run_ranks(train_tied, 2 if parallelism else 1, argv))
        found[name] = list(losses(tmp_path / name).values())
    assert found["two"] == pytest.approx(found["one"], rel=1e-5)


def test_re_meshing_keeps_the_tie(corpus, tmp_path):
    """Stages continue in memory; a run that is stopped on both sides of the border reads checkpoints instead."""
    sources = [{"name": name, "path": str(corpus), "weight": 0.5} for name in ("web", "sums")]
    changes = {"model__args__tied_embeddings": True, "data__stages": toml_like([EXTENSION]), "training__steps": BORDER}
    for name, parts in (("at once", [BORDER + 2]), ("in parts", [BORDER - 1, BORDER, BORDER + 2])):
        for steps in parts:
            argv = stage_options(corpus, tmp_path / name, sources, **changes | {"training__steps": steps})
            run_ranks(train_all, 1, [argv])
    assert losses(tmp_path / "at once") == losses(tmp_path / "in parts")
    assert all(torch.equal(*pair) for pair in zip(*last_weights(tmp_path, BORDER + 2), strict=True))


def last_weights(folder, step):
    """Yields the embedding and the log-likelihoods at the last step of both runs."""
    for name in ("at once", "in parts"):
        path = folder / name / "run" / "checkpoint" / f"step-{step}"
        trained = open_trained_model(path, dtype=torch.float32, device=CPU)
        assert trained.model.is_tied
        yield trained.model.tok_embeddings.weight, log_likelihoods(path)[0]

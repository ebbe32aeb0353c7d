"""The first loss of a run that starts from a release, against transformers with the release's own tokenizer call."""

import pytest
import torch
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.data.corpora import jsonl, write
from tests.data.test_special_tokens import TURN, with_turns
from tests.data.test_tokenizer_files import BEFORE, BYTES, START, TRAINED
from tests.run.test_from_folder import starting
from tests.support.harness import run_ranks
from tests.support.runs import losses
from tests.support.trainers import train_all
from torchtitan_clone.config import load_config
from torchtitan_clone.data import open_dataset
from torchtitan_clone.run import preflight
from torchtitan_clone.run.describe import summary

TEXTS = [f"{text}{TURN}user {START}" if number % 3 else text[:-9] for number, text in enumerate(TRAINED[:60])]
CASES = {
    "as the files say": ({}, {"split_special_tokens": True}),
    "parsed": ({"training__parse_special_tokens": True}, {}),
    "without": ({"data__add_bos": False}, {"split_special_tokens": True, "add_special_tokens": False}),
}
"""Options of the run, and of transformers' call."""


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Returns a folder of the shape of Llama 3's: its post-processor puts the bos_token before each text."""
    folder = tmp_path_factory.mktemp("release") / "llama"
    with_turns(folder, post_processor=processors.Sequence([BYTES, BEFORE]), bos_token=START)
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=172,
        vocab_size=401, max_position_embeddings=256, initializer_range=0.2, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@torch.no_grad()
def their_loss(release, **call):
    """Returns the mean over all tokens after the first of each text, its end included."""
    model, words = AutoModelForCausalLM.from_pretrained(release), AutoTokenizer.from_pretrained(release)
    nats, targets = 0.0, 0
    for ids in words(TEXTS, **call).input_ids:
        tokens = torch.tensor([[*ids, words.eos_token_id]])
        nats += model(tokens, labels=tokens).loss.item() * len(ids)
        targets += len(ids)
    return nats / targets


def test_the_first_loss_is_that_of_transformers(release, tmp_path):
    """All documents are in the first batch, several in a row; the order of their tokens does not matter to the mean."""
    corpus = write(tmp_path / "corpus", {"a.jsonl": jsonl(TEXTS)})
    runs, printed = {}, {}
    for name, (changes, _) in CASES.items():
        options = {
            "model__hf_assets_path": release, "data__packing": "best_fit", "data__held_out_fraction": 0,
            "data__prepare_processes": 1, "validation__enable": False, "training__seq_len": 128,
            "training__steps": 1, "checkpoint__enable": False, **changes,
        }  # fmt: skip
        argv = starting(corpus, tmp_path / name, release, **options)
        plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
        config = plan.config
        dataset = open_dataset(training=config.training, data=config.data, tokenizer=plan.tokenizer)
        rows = dataset.num_rows("train", seq_len=config.training.seq_len)
        batch = {"training__local_batch_size": rows, "training__global_batch_size": rows}
        runs[name] = starting(corpus, tmp_path / name, release, **options, **batch)
        printed[name] = "<s> (0) before and </s> (1) after each text" in summary(plan)
    assert printed == {"as the files say": True, "parsed": True, "without": False}
    run_ranks(train_all, 1, list(runs.values()))
    expected = {name: their_loss(release, **call) for name, (_, call) in CASES.items()}
    assert {name: losses(tmp_path / name)[1] for name in runs} == pytest.approx(expected, rel=1e-6)
    assert min(abs(expected["as the files say"] - expected[name]) for name in ("parsed", "without")) > 1e-2

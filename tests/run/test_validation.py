"""Validation computes the same loss on any number of ranks, and its samples can be interrupted."""

import math

import pytest
import torch

from tests.data.corpora import jsonl, texts, write
from tests.data.test_tokenizer import MADE, stored
from tests.support.harness import run_ranks
from tests.support.runs import options, rows, train
from tests.support.trainers import open_trainer
from torchtitan_clone.config.messages import toml_like
from torchtitan_clone.data import build_tokenizer
from torchtitan_clone.data.token_store import is_held_out
from torchtitan_clone.run.stopping import Timeouts
from torchtitan_clone.tools.samples import NextTokens, sample


def test_validation_loss_does_not_depend_on_the_number_of_ranks(corpus, tmp_path):
    found = []
    for world_size in (1, 2):
        changes = {"validation__enable": True, "validation__freq": 5, "validation__local_batch_size": 3}
        argv = options(corpus, tmp_path / str(world_size), **changes)
        code, output = train(argv, world_size=world_size, log_folder=tmp_path)
        assert code == 0, output
        found.append([row for row in rows(tmp_path / str(world_size)) if "validation_loss" in row])
    assert [row["step"] for row in found[0]] == [5, 10]
    assert found[0][1]["validation_loss"] < found[0][0]["validation_loss"]
    for one, two in zip(*found, strict=True):
        assert two["validation_loss"] == pytest.approx(one["validation_loss"], rel=1e-5)
        assert two["validation_targets"] == one["validation_targets"]


@pytest.mark.parametrize("name", ["word_piece", "unigram"])
def test_bits_per_byte_by_source_are_those_of_the_text(tmp_path, name):
    """Of tokenizers that drop spaces and replace characters."""
    tokenizer = build_tokenizer(stored(tmp_path / "t", MADE[name]()))
    found = [f"{text} \u6f22\u5b57 \u6f22" for text in texts(600, words=20)]
    folder = write(tmp_path / "data" / "text", {"a.jsonl": jsonl(found)})
    argv = options(
        folder, tmp_path, training__dataset_path=None, training__steps=16, model__hf_assets_path=tmp_path / "t",
        data__held_out_fraction=0.3, validation__enable=True, validation__freq=16,
        data__sources=toml_like([{"name": "web", "path": str(folder)}]),
    )  # fmt: skip
    code, output = train(argv, log_folder=tmp_path)
    assert code == 0, output
    for is_validation in (True, False):
        prefix = "validation_" if is_validation else ""
        of_split = [text for text in found if is_held_out(text, fraction=0.3) == is_validation]
        encoded = tokenizer.encode_with_sizes(of_split)
        size = sum(sum(sizes[1:]) for _, sizes in encoded)  # nothing predicts the first token of a document
        targets = sum(len(ids) for ids, _ in encoded)  # but its last token predicts the end
        logged = [row for row in rows(tmp_path) if f"{prefix}loss/web" in row]
        sizes = [row[f"{prefix}loss/web"] / (math.log(2) * row[f"{prefix}bits_per_byte/web"]) for row in logged]
        # The steps are about an epoch. The sum is exact with the first tokens of documents, 1 in 18.
        assert sum(sizes) / len(sizes) == pytest.approx(size / targets, rel=0.03)


def test_held_out_text_that_fills_no_row_is_no_perfect_loss(corpus, tmp_path):
    """The text of a stream is not known before it is read."""
    pytest.importorskip("datasets")
    stream = write(tmp_path / "hub", {"org/name/a.jsonl": jsonl(texts(300, words=8))}) / "org" / "name"
    changes = {"training__dataset_path": None, "training__dataset": str(stream), "training__steps": 2}
    changes |= {
        "validation__enable": True,
        "validation__steps": 2,
        "training__seq_len": 2048,
        "model__args__max_seq_len": 2048,
    }
    code, output = train(options(corpus, tmp_path, **changes), log_folder=tmp_path)
    assert code == 0, output
    assert "validation: held-out text fills no row of seq_len tokens; raise data.held_out_fraction" in output
    assert not any("validation_loss" in row for row in rows(tmp_path))


def test_the_next_token_of_logits_with_nan_is_in_the_vocabulary():
    next_tokens = NextTokens(2, device=torch.device("cpu"))
    hidden_BTD = torch.tensor([[[torch.nan, 0.0]], [[1.0, 0.0]]])
    targets_BT, rows_BT = torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[0], [1]])
    next_tokens(hidden_BTD, torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0]]), targets_BT, rows_BT)
    assert next_tokens.tokens_B.tolist() == [0, 2]


class CountedBeats(Timeouts):
    """Counts the reports of progress."""

    count = 0

    def beat(self):
        self.count += 1
        super().beat()


def sampled(argv, limits):
    """Returns the samples of one rank that are stopped after so many tokens, and how often it reported progress."""
    found = []
    with open_trainer(argv) as trainer:
        for limit in limits:
            timeouts, tokens = CountedBeats(trainer.engine.plan, rank=0), iter(range(1, 100))
            prompts, stops = [[1, 2, 3], [4]], lambda tokens=tokens, limit=limit: next(tokens) == limit
            found.append((sample(trainer.engine, prompts, timeouts=timeouts, stops=stops), timeouts.count))
            timeouts.close()
    return found


def test_samples_report_progress_and_can_be_stopped_at_each_token(corpus, tmp_path):
    argv = options(corpus, tmp_path, validation__sample_tokens=4, checkpoint__enable=False)
    ((stopped, complete),) = run_ranks(sampled, 1, argv, (3, None))
    assert stopped == (None, 3)
    assert complete[1] == 4
    assert [len(ids) <= 4 for ids in complete[0]] == [True, True]

"""The losses of a run on chats, against transformers on the labels of its own masks."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from tests.data.chats import many_chats, template, write_tokenizer
from tests.data.corpora import write
from tests.run.test_from_folder import starting
from tests.support.harness import run_ranks
from tests.support.runs import losses
from tests.support.trainers import train_all
from torchtitan_clone.config import load_config
from torchtitan_clone.data import open_dataset
from torchtitan_clone.run import preflight
from torchtitan_clone.run.loaders import open_loaders

STEPS = 30
LR = 1e-3


@pytest.fixture(scope="module")
def release(tmp_path_factory):
    """Returns a folder with a model and a tokenizer whose end-of-text token ends turns."""
    folder = tmp_path_factory.mktemp("release") / "llama"
    write_tokenizer(folder, chat_template=template("chatml", is_marked=False), eos_token="<|im_end|>")
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=172,
        vocab_size=422, max_position_embeddings=512, initializer_range=0.1, bos_token_id=0, eos_token_id=401,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def their_losses(release, batches, *, chats):
    """Trains transformers' model on the documents of each batch one by one; returns the mean over all labels."""
    words = AutoTokenizer.from_pretrained(release)
    marked = template("chatml", is_marked=True)
    masks = {}
    for chat in chats:
        out = words.apply_chat_template(chat, chat_template=marked, return_dict=True, return_assistant_tokens_mask=True)
        for end in (None, -1):  # a full row has the line end after the last turn as a target that is none
            masks[tuple(out["input_ids"][:end])] = torch.tensor(out["assistant_masks"][:end], dtype=torch.bool)
    model = AutoModelForCausalLM.from_pretrained(release)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    found = []
    for batch in batches:
        loss, count = torch.zeros(()), 0
        for tokens, documents in zip(batch.tokens_BT, batch.documents_BT, strict=True):
            for number in documents.unique():
                ids = tokens[documents == number]
                if (mask := masks.get(tuple(ids.tolist()))) is not None:  # the others are padding
                    labels = torch.where(mask, ids, -100)[None]
                    labelled = int((labels[:, 1:] >= 0).sum())
                    loss = loss + model(ids[None], labels=labels).loss * labelled
                    count += labelled
        assert count == batch.num_targets
        found.append(loss.item() / count)
        (loss / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


def test_losses_are_those_of_transformers(release, tmp_path):
    """Rows hold several chats and targets in a part of their tokens; one batch is smaller than the epoch."""
    chats = many_chats(40)
    corpus = write(
        tmp_path / "corpus", {"a.jsonl": b"\n".join(json.dumps({"messages": each}).encode() for each in chats)}
    )
    options = {
        "model__hf_assets_path": release, "training__format": "chat", "data__packing": "best_fit",
        "data__held_out_fraction": 0, "data__prepare_processes": 1, "validation__enable": False,
        "training__seq_len": 512, "training__steps": STEPS, "training__max_norm": "inf", "optimizer__lr": LR,
        "optimizer__weight_decay": 0, "lr_scheduler__warmup_steps": 0, "lr_scheduler__min_lr_factor": 1.0,
        "training__global_batch_size": 4, "model__args__max_seq_len": 512, "checkpoint__enable": False,
    }  # fmt: skip
    argv = starting(corpus, tmp_path / "out", release, **options)
    plan = preflight.resolve(load_config(argv), world_size=1, device_type="cpu")
    dataset = open_dataset(training=plan.config.training, data=plan.config.data, tokenizer=plan.tokenizer)
    loader, _ = open_loaders(plan, dataset=dataset, rank=0)
    batches = [next(loader) for _ in range(STEPS)]
    run_ranks(train_all, 1, [argv])
    expected = their_losses(release, batches, chats=chats)
    found = losses(tmp_path / "out")
    assert [found[step] for step in range(1, STEPS + 1)] == pytest.approx(expected, rel=1e-6)
    assert expected[0] - expected[-1] > 0.1

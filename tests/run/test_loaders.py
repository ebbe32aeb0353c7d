"""The loaders of a rank: the tokens that it reads, and positions that belong to other data."""

import pytest
import torch

from tests.support.parity_matrix import GPT_OSS
from tests.support.plain_data import PlainData, context_of
from tests.support.runs import make_corpus, options
from torchtitan_clone.config import ConfigError, load_config
from torchtitan_clone.data import open_dataset
from torchtitan_clone.run import preflight
from torchtitan_clone.run.loaders import open_loaders, tokens_of_rank


def open_run(corpus, folder, *, world_size=1, **changes):
    """Returns the plan of a run and its data."""
    config = load_config(options(corpus, folder, **changes))
    plan = preflight.resolve(config, world_size=world_size, device_type="cpu")
    return plan, open_dataset(training=config.training, data=config.data, tokenizer=plan.tokenizer)


@pytest.mark.parametrize("method", ["allgather", "ring", "alltoall"])
def test_ranks_of_a_context_group_read_all_tokens_of_the_same_rows(corpus, tmp_path, method):
    context = {
        "parallelism__context_parallel_degree": 2,
        "parallelism__context_parallel_rotate_method": method,
        "model__args__n_kv_heads": 2,
    }
    plan, dataset = open_run(corpus, tmp_path, world_size=4, **context)
    data_parallel, _ = open_run(corpus, tmp_path, world_size=2)
    for group in range(2):
        expected = next(open_loaders(data_parallel, dataset=dataset, rank=group)[0]).tokens_BT
        found = torch.full_like(expected, -1)
        for rank in (2 * group, 2 * group + 1):
            tokens = next(open_loaders(plan, dataset=dataset, rank=rank)[0]).tokens_BT
            found[:, tokens_of_rank(plan, rank=rank)] = tokens
        assert torch.equal(found, expected)


def test_without_context_parallelism_a_rank_reads_complete_rows(corpus, tmp_path):
    plan, _ = open_run(corpus, tmp_path, world_size=2, parallelism__tensor_parallel_degree=2)
    assert [tokens_of_rank(plan, rank=rank) for rank in range(2)] == [None, None]


def test_the_validation_loader_is_opened_where_validation_is_enabled(corpus, tmp_path):
    plan, dataset = open_run(corpus, tmp_path)
    assert open_loaders(plan, dataset=dataset, rank=0)[1] is None
    enabled = {"validation__enable": True, "validation__local_batch_size": 3}
    plan, dataset = open_run(corpus, tmp_path, **enabled)
    validation = open_loaders(plan, dataset=dataset, rank=0)[1]
    assert next(iter(validation)).tokens_BT.shape == (3, 64)


def test_a_position_is_resumed_and_one_of_other_data_is_refused(corpus, tmp_path):
    plan, dataset = open_run(corpus, tmp_path)
    loader, _ = open_loaders(plan, dataset=dataset, rank=0)
    next(loader)
    position = loader.state_dict()
    resumed, _ = open_loaders(plan, dataset=dataset, rank=0, position=position)
    assert torch.equal(next(resumed).tokens_BT, next(loader).tokens_BT)
    other = make_corpus(tmp_path / "other" / "corpus", files=20)
    plan, dataset = open_run(other, tmp_path)
    with pytest.raises(ConfigError, match="allow_data_change"):
        open_loaders(plan, dataset=dataset, rank=0, position=position)
    plan, dataset = open_run(other, tmp_path, checkpoint__allow_data_change=True)
    open_loaders(plan, dataset=dataset, rank=0, position=position)


@pytest.mark.parametrize("changes", [{}, {"data__packing": "best_fit"}, {"training__document_masking": False}])
def test_batches_are_those_that_the_docs_describe(short_documents, tmp_path, changes):
    """Order, rows, packing and context of more than two epochs, as the reference of parity writes them again."""
    changes = GPT_OSS | changes | {"training__local_batch_size": 8}
    plan, dataset = open_run(short_documents, tmp_path, **changes)
    loader, _ = open_loaders(plan, dataset=dataset, rank=0)
    masking = plan.config.training.document_masking
    expected = PlainData(dataset, seq_len=64, rows=8, seed=plan.config.debug.seed, document_masking=masking)
    for _ in range(200):
        batch, plain = next(loader), next(expected)
        for name in ("tokens_BT", "targets_BT", "positions_BT", *(["documents_BT"] if masking else [])):
            assert torch.equal(getattr(batch, name), getattr(plain, name)), name
        assert torch.equal(batch.is_context_BKT[:, 0], context_of(plain.targets_BT >= 0, plain.documents_BT))
        assert batch.num_targets == plain.num_targets
    assert loader.sample_range.start > 2 * dataset.num_rows("train", seq_len=64)

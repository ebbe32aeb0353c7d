"""Attention within documents, and the block mask of flex attention."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from torchtitan_clone.models.attention import BLOCK, block_mask
from torchtitan_clone.models.llama3.model import Llama3Args, build
from torchtitan_clone.ops.blockwise_attention import document_starts

ARGS = Llama3Args(dim=64, n_layers=3, n_heads=4, vocab_size=97, multiple_of=16, rope_theta=10000.0, max_seq_len=256)


def test_documents_in_one_row_are_computed_as_separate_rows():
    torch.manual_seed(0)
    model = build(replace(ARGS, n_kv_heads=2))
    lengths = [5, 1, 30, 12]
    tokens = torch.randint(0, ARGS.vocab_size, (1, sum(lengths)))
    documents = torch.repeat_interleave(torch.arange(4), torch.tensor(lengths))[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    packed = model(tokens, positions_BT=positions, documents_BT=documents)
    separate = [model(row, positions_BT=torch.arange(row.shape[1])[None]) for row in tokens.split(lengths, dim=1)]
    torch.testing.assert_close(packed, torch.cat(separate, dim=1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("T", [128, 640, 1000])
def test_the_block_mask_is_that_of_all_pairs_of_tokens(T):
    torch.manual_seed(T)
    # Documents of one token to many blocks, and one row that is a single document.
    documents_BT = (torch.rand(4, T) < torch.tensor([0.5, 0.02, 0.004, 0.0])[:, None]).cumsum(1)

    def allowed(b, _head, q, kv):
        return (q >= kv) & (documents_BT[b, q] == documents_BT[b, kv])

    expected = create_block_mask(allowed, B=4, H=None, Q_LEN=T, KV_LEN=T, device="cpu")
    found = block_mask(document_starts(documents_BT))
    assert torch.equal(found.to_dense(), expected.to_dense())
    if T % BLOCK == 0:  # else torch calls a full block partial, because it lacks the queries behind the end
        assert torch.equal(found.full_kv_num_blocks, expected.full_kv_num_blocks)
        assert torch.equal(found.kv_num_blocks, expected.kv_num_blocks)
    q, k, v = torch.randn(3, 4, 2, T, 16)
    assert torch.equal(flex_attention(q, k, v, block_mask=found), flex_attention(q, k, v, block_mask=expected))

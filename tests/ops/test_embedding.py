"""Embeddings of tokens in bfloat16 on a CPU."""

import torch

from torchtitan_clone.ops.embedding import Embedding


def test_gradients_of_frequent_tokens_in_bfloat16_are_those_of_float32():
    """A total in bfloat16 stops growing at 256 times what is added."""
    embedding = Embedding(8, 16).to(torch.bfloat16)
    tokens = torch.zeros(4096, dtype=torch.int64)
    out = embedding(tokens)
    assert torch.equal(out, embedding.weight[tokens])
    out.backward(torch.ones_like(out))
    assert embedding.weight.grad[0].tolist() == [4096.0] * 16

#!/usr/bin/env bash
# transformers: position_ids that restart separate packed documents in attention layers, not in linear-attention layers.
#
# Expected: two documents in one row, with position_ids that begin again at the second, give the logits of each document
# alone, in every decoder that takes position_ids: Llama does so, and Qwen3.5 with full-attention layers only.
# Seen with transformers 5.23.0 on a CPU: a Qwen3.5 layer of linear attention carries its state and its convolution from
# the first document into the second, without an error or a warning, while the full-attention layers beside it are
# masked. A hybrid trained on rows packed by positions alone, as collators without padding make them, sees the
# documents before its own in three of four layers.
# Here documents are their first tokens' indices, which reach the delta rule and the convolution too.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch>=2.13,<2.14" "transformers==5.23.0" numpy
cd "$folder"
venv/bin/python -W ignore - <<'P'
import sys

import torch
import transformers
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3_5ForCausalLM, Qwen3_5TextConfig

sizes = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16,
}
linear = {f"linear_{key}": 2 for key in ("num_key_heads", "num_value_heads")}
linear |= {f"linear_{key}": 8 for key in ("key_head_dim", "value_head_dim")}


def hybrid(*types):
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **linear, layer_types=[f"{each}_attention" for each in types]))


print("transformers", transformers.__version__)
torch.manual_seed(0)
models = {
    "llama": LlamaForCausalLM(LlamaConfig(**sizes)),
    "qwen3_5, full and full": hybrid("full", "full"),
    "qwen3_5, linear and full": hybrid("linear", "full"),
    "qwen3_5, linear and linear": hybrid("linear", "linear"),
}
tokens = torch.randint(64, (1, 24))
positions = torch.arange(12).repeat(2)[None]
leaks = []
with torch.no_grad():
    for name, model in models.items():
        alone = model.eval()(tokens[:, 12:], use_cache=False).logits
        packed = model(tokens, position_ids=positions, use_cache=False).logits[:, 12:]
        difference = (packed - alone).abs().max().item()
        leaks.append(difference > 1e-4)
        print(f"{name}: the second document differs by {difference:.1e} from the same alone; expected: rounding")
sys.exit(leaks != [False, False, True, True])
P

#!/usr/bin/env bash
# torch.library: in the backward of a custom operator, ctx.needs_input_grad is shorter than the operator's inputs.
#
# Expected: one flag for each input, as in torch.autograd.Function: setup_context gets all inputs, and backward must
# return one gradient for each.
# Seen with torch 2.13.0: the dispatcher leaves out trailing arguments that equal their defaults, also where the caller
# has passed them, and the flags are of the others only. A backward that looks at the flag of an optional tensor works
# with the tensor, and fails with an IndexError without it. With another value in the last place all flags are there.
# Whoever writes such an operator asks ctx.saved_tensors or the inputs of setup_context whether the argument was given.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "torch>=2.13,<2.14" numpy
cd "$folder"
venv/bin/python - <<'P'
import sys

import torch
from torch import Tensor

seen = {}


@torch.library.custom_op("finding::scaled", mutates_args=())
def scaled(x: Tensor, factor: float = 2.0, weight: Tensor | None = None) -> Tensor:
    return x * factor if weight is None else x * factor * weight


def setup_context(ctx, inputs, output):
    seen["inputs"] = len(inputs)
    ctx.factor = inputs[1]


def backward(ctx, grad):
    seen["flags"] = len(ctx.needs_input_grad)
    return grad * ctx.factor, None, None  # fewer are an error


scaled.register_autograd(backward, setup_context=setup_context)
x = torch.ones(2, requires_grad=True)
calls = {
    "x": lambda: scaled(x),
    "x and both defaults": lambda: scaled(x, 2.0, None),
    "x and another factor": lambda: scaled(x, 3.0),
    "x and a weight": lambda: scaled(x, 2.0, torch.ones(2)),
}
print("torch", torch.__version__)
found = {}
for name, call in calls.items():
    call().sum().backward()
    found[name] = seen["flags"]
    print(f"{name}: {seen['inputs']} inputs, {seen['flags']} flags; expected as many")
sys.exit(list(found.values()) != [1, 1, 2, 3])
P

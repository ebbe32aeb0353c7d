#!/usr/bin/env bash
# transformers: OLMo 3 drops YaRN, without a word, from a config.json that writes it as other families do.
#
# Expected: `rope_parameters` of transformers 5 takes one table for all layers, as for Llama or Qwen3; for OLMo 3, whose
# layers differ, such a table is either used (by layers of full attention, as `rope_scaling` is) or refused.
# Seen with transformers 5.23.0: the table's keys are kept beside tables of each kind of layer, and these say "default".
# The model attends with unscaled positions: wrong beyond the length that it was trained with before scaling. The old
# keys, `rope_theta` and `rope_scaling`, and one table for each kind of layer are read as they are meant.
# Whoever writes config.json for OLMo 3 has to use one of those two forms.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.23.0"
cd "$folder"
venv/bin/python - 2>/dev/null <<'P'
import json
import sys
from pathlib import Path

import transformers
from transformers import AutoConfig

YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192}
THETA = 500000.0
FORMS = {
    "old keys": {"rope_theta": THETA, "rope_scaling": YARN},
    "one table": {"rope_parameters": {**YARN, "rope_theta": THETA}},
    "a table for each kind": {
        "rope_parameters": {
            "full_attention": {**YARN, "rope_theta": THETA},
            "sliding_attention": {"rope_type": "default", "rope_theta": THETA},
        }
    },
}


def kind_of_full_attention(form):
    values = {"model_type": "olmo3", "num_hidden_layers": 4, "max_position_embeddings": 65536, **form}
    Path("config.json").write_text(json.dumps(values))
    return AutoConfig.from_pretrained(".").rope_parameters["full_attention"]["rope_type"]


print("transformers", transformers.__version__)
found = {name: kind_of_full_attention(form) for name, form in FORMS.items()}
for name, kind in found.items():
    print(f"{name}: layers of full attention have positions of type {kind}; expected yarn, or an error")
sys.exit(found != {"old keys": "yarn", "one table": "default", "a table for each kind": "yarn"})
P

#!/usr/bin/env bash
# tokenizers: WordPieceTrainer and UnigramTrainer give another tokenizer each time they train on the same texts.
#
# Expected: training has no random draws, so that equal texts, options and version give equal vocabularies, as BpeTrainer
# and WordLevelTrainer do; a tokenizer could then be trained again instead of being kept.
# Seen with tokenizers 0.23.3: within one process and without threads, four trainings of WordPieceTrainer on 60 short
# sentences give different sets of tokens; ties between equally frequent pairs seem to be broken by the order of a hash
# map. UnigramTrainer gives the same tokens with other scores, and ids in another order.
# Who prepares ids with such a tokenizer must keep its tokenizer.json: one trained later reads other tokens.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "tokenizers==0.23.3"
TOKENIZERS_PARALLELISM=false "$folder/venv/bin/python" - <<'P'
import json
import sys

import tokenizers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

TEXTS = [f"The street to {n} costs {n * n} euro, said the owner of the old house." for n in range(60)]
KINDS = {
    "BPE": (models.BPE(), trainers.BpeTrainer, {"vocab_size": 120}),
    "WordLevel": (models.WordLevel(unk_token="?"), trainers.WordLevelTrainer, {"vocab_size": 40, "special_tokens": ["?"]}),
    "WordPiece": (models.WordPiece(unk_token="?"), trainers.WordPieceTrainer, {"vocab_size": 120, "special_tokens": ["?"]}),
    "Unigram": (
        models.Unigram(), trainers.UnigramTrainer, {"vocab_size": 100, "special_tokens": ["?"], "unk_token": "?"},
    ),
}


def train(kind):
    model, trainer, options = KINDS[kind]
    tokenizer = Tokenizer(type(model)() if kind in ("BPE", "Unigram") else type(model)(unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(TEXTS, trainer(**options, show_progress=False))
    return json.dumps(json.loads(tokenizer.to_str())["model"], sort_keys=True)


print("tokenizers", tokenizers.__version__)
found = {kind: len({train(kind) for _ in range(4)}) for kind in KINDS}
for kind, count in found.items():
    print(f"{kind}: {count} different tokenizers of 4 trainings; expected 1")
sys.exit(not (found["BPE"] == found["WordLevel"] == 1 and found["WordPiece"] > 1 and found["Unigram"] > 1))
P

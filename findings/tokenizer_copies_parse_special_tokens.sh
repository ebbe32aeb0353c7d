#!/usr/bin/env bash
# tokenizers: a copy of a Tokenizer forgets encode_special_tokens, whichever way it is copied.
#
# Expected: a tokenizer that encodes the spelling of special tokens as characters still does so after pickling, as
# when a data loader hands it to its worker processes, after copy.deepcopy and after Tokenizer.from_str(x.to_str()).
# Seen with tokenizers 0.23.3: all three copies have the property at False again and return the special token's id,
# while truncation and padding, which are set on the same object, are kept. Nothing is said. A loader then gives other
# ids with workers than without. Whoever copies one sets the property again.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "tokenizers==0.23.3"
cd "$folder"
venv/bin/python - <<'P'
import copy
import pickle
import sys

import tokenizers
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

tokenizer = Tokenizer(WordLevel({"a": 0, "<": 1, "x": 2, ">": 3, "?": 4}, unk_token="?"))
tokenizer.pre_tokenizer = Split(Regex("."), "isolated")
tokenizer.add_special_tokens(["<x>"])  # id 5
tokenizer.encode_special_tokens = True
tokenizer.enable_truncation(8)
copies = {
    "itself": tokenizer,
    "pickled": pickle.loads(pickle.dumps(tokenizer)),
    "deep copy": copy.deepcopy(tokenizer),
    "from_str(to_str())": Tokenizer.from_str(tokenizer.to_str()),
}
print("tokenizers", tokenizers.__version__)
found = []
for name, each in copies.items():
    ids = each.encode("a<x>").ids
    found.append(ids)
    print(f"{name}: ids {ids}, truncation {'kept' if each.truncation else 'lost'}; expected ids [0, 1, 2, 3]")
sys.exit(found != [[0, 1, 2, 3], [0, 5], [0, 5], [0, 5]])
P

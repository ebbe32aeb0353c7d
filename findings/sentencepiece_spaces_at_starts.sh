#!/usr/bin/env bash
# transformers: made of a tokenizer.model alone, a tokenizer has other ids than SentencePiece, and "a" and " a" are one.
#
# Expected: a model of SentencePiece states that a space precedes each text (add_dummy_prefix) and that spaces are kept
# (remove_extra_whitespaces is false), as Llama 2's. AutoTokenizer, which reads the file through SentencePiece's format
# where there is no tokenizer.json, gives the ids of sentencepiece, so that decoding returns the text.
# Seen with transformers 5.23.0 and sentencepiece 0.2.1: as LlamaTokenizer, a text that begins with a space gets no other
# space, so that "a" and " a" have the same ids and decoding loses the first character of indented lines. Without a
# tokenizer_class no text gets a space. Neither says so.
# Whoever has a tokenizer.model only has to compare ids with sentencepiece before training on them.
# Exit status 0 while that is so, 1 once it has changed.
set -euo pipefail
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.23.0" "sentencepiece==0.2.1" protobuf
cd "$folder"
venv/bin/python - 2>/dev/null <<'P'
import argparse
import json
import sys
from pathlib import Path

import sentencepiece
import transformers
from transformers import AutoTokenizer

sentencepiece.SentencePieceTrainer.train(
    input=argparse.__file__, model_prefix="tokenizer", model_type="bpe", vocab_size=700, byte_fallback=True,
    normalization_rule_name="identity", remove_extra_whitespaces=False, num_threads=1, minloglevel=2,
)
own = sentencepiece.SentencePieceProcessor(model_file="tokenizer.model")
print("transformers", transformers.__version__, "sentencepiece", sentencepiece.__version__)
found = {}
for name in ("LlamaTokenizer", None):
    chosen = {"tokenizer_class": name} if name else {}
    Path("tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>", **chosen}))
    theirs = AutoTokenizer.from_pretrained(".")
    for text in ("self", " self"):
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        found[name, text] = ids == own.encode(text)
        pieces = [own.id_to_piece(each) for each in own.encode(text)], theirs.convert_ids_to_tokens(ids)
        print(f"{name}, {text!r}: {pieces[1]}, decoded {theirs.decode(ids)!r}; expected {pieces[0]}")
seen = {("LlamaTokenizer", "self"): True, ("LlamaTokenizer", " self"): False, (None, "self"): False, (None, " self"): False}
sys.exit(found != seen)
P

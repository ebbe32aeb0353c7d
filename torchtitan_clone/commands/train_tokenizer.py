"""Trains a byte-level BPE tokenizer; by default the one that the package ships, on Python's standard library.

    python scripts/train_tokenizer.py
    python scripts/train_tokenizer.py --dataset_path=my_text --vocab_size=8192 --folder=my_tokenizer

The same corpus gives the same file, byte for byte. The corpus differs between versions of Python, so the shipped
file is kept in the repository, and its fingerprint is part of every token store and checkpoint.
"""

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data.sources import BadRows, describe_empty, find_source, read_documents
from torchtitan_clone.data.tokenizer import CONFIG_FILE, MAX_ID, SHIPPED_FOLDER, TOKENIZER_FILE
from torchtitan_clone.files import write_atomically
from torchtitan_clone.observe.outputs import reports_errors

EOS_TOKEN = "<|end_of_text|>"
MIN_VOCAB_SIZE = 257


def train(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Returns a byte-level BPE tokenizer with EOS_TOKEN as id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


@reports_errors
def main(words: list[str]) -> int:
    """Trains a tokenizer and writes its files; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("--vocab_size", type=int, default=2048)
    parser.add_argument("--dataset_path", help="as training.dataset_path; default: the standard library's source")
    parser.add_argument("--text_key", default="text", help="as training.text_key")
    parser.add_argument("--folder", type=Path, default=SHIPPED_FOLDER)
    options = parser.parse_args(words)
    if options.dataset_path is not None and options.folder == SHIPPED_FOLDER:
        parser.error("--dataset_path needs --folder: the shipped tokenizer is made from the standard library")
    if not MIN_VOCAB_SIZE <= options.vocab_size <= MAX_ID + 1:
        rule = f"must be from {MIN_VOCAB_SIZE} (the bytes and {EOS_TOKEN}) to {MAX_ID + 1}"
        parser.error(f"--vocab_size={options.vocab_size}: {rule}")
    source = find_source(Training(dataset_path=options.dataset_path, text_key=options.text_key))
    texts = (text for text, _ in read_documents(source, bad_rows=BadRows(limit=0)))
    if (first := next(texts, None)) is None:
        raise ConfigError(f"{describe_empty(source)}; set --dataset_path to text files.")
    tokenizer = train(chain([first], texts), vocab_size=options.vocab_size)
    options.folder.mkdir(parents=True, exist_ok=True)
    write_atomically(options.folder / TOKENIZER_FILE, tokenizer.to_str(pretty=True).encode())
    config = json.dumps({"eos_token": EOS_TOKEN}, indent=2) + "\n"
    write_atomically(options.folder / CONFIG_FILE, config.encode())
    print(f"wrote {options.folder / TOKENIZER_FILE}")
    return 0

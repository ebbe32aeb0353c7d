"""Make tokenizer.json of a BPE model of SentencePiece, such as the tokenizer.model of a release.

    python scripts/convert_tokenizer.py my_release/tokenizer.model my_release

    ./run_train.sh --model.hf_assets_path=my_release

The ids of the standard library's source, or of --dataset_path, are compared with those of SentencePiece; if one
differs, nothing is written. It requires `pip install "sentencepiece>=0.2" protobuf`.
"""

from itertools import islice
from pathlib import Path

from torchtitan_clone.commands.parsing import build_parser
from torchtitan_clone.config.schema_training import Training
from torchtitan_clone.data.sources import BadRows, find_source, read_documents
from torchtitan_clone.data.tokenizer import TOKENIZER_FILE
from torchtitan_clone.observe.outputs import reports_errors
from torchtitan_clone.tools.sentence_pieces import convert


@reports_errors
def main(words: list[str]) -> int:
    """Parses the command line, converts, and prints what was compared; returns the exit code."""
    parser = build_parser(__doc__)
    parser.add_argument("model", type=Path, help="file of SentencePiece")
    parser.add_argument("folder", type=Path, help="folder to write the tokenizer into")
    parser.add_argument("--dataset_path", help="text to compare, as training.dataset_path")
    parser.add_argument("--texts", type=int, default=200, help="number of documents to compare")
    options = parser.parse_args(words)
    documents = read_documents(find_source(Training(dataset_path=options.dataset_path)), bad_rows=BadRows(limit=0))
    count = convert(options.model, options.folder, texts=(text for text, _ in islice(documents, options.texts)))
    print(f"wrote {options.folder / TOKENIZER_FILE}: the ids of {count} texts are those of SentencePiece")
    return 0

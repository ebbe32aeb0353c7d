"""Text in, batches of token ids out.

The room's words. A *source* is a list of files. A *document* is one text in it. A *token store* is a source after
tokenization: two *splits*, "train" and "validation", each one long array of token ids in which an end-of-text id
follows every document. A *row* is a window of seq_len tokens (and one more, the last target) of such an array. A
*sample* is one use of a row in training; sample i is the (i mod n)-th row of a shuffled *epoch* of all n rows. A
*global batch* is what one optimizer step consumes over all ranks: samples s*G to (s+1)*G for step s and G rows. Hub
data is not stored; there, each row of the global batch is a *stream* of documents, and a *cursor* says how far it is.

Reading order: sources, tokenizer, encoder, fingerprint, token_store, order, packing, feed, prepared, streaming,
loader.
"""

from torchtitan_clone.data.loader import Dataset, Loader, ValidationLoader, build_loader, open_dataset
from torchtitan_clone.data.packing import IGNORE_INDEX, Batch
from torchtitan_clone.data.sources import DATASETS, describe_source
from torchtitan_clone.data.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "DATASETS",
    "IGNORE_INDEX",
    "Batch",
    "Dataset",
    "Loader",
    "Tokenizer",
    "ValidationLoader",
    "build_loader",
    "build_tokenizer",
    "describe_source",
    "open_dataset",
]

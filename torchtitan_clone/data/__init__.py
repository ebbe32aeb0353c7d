"""Turns text into batches of token ids.

Terms:
    source          A list of text files.
    document        One text of a source.
    token store     A tokenized source on disk: per *split*, "train" and "validation", one array of token ids in which
                    an end-of-text token follows every document.
    chat            A document of several turns, of which some tokens are *targets*; *marks* of its tokens say which.
    row             A window of seq_len + 1 tokens of such an array: the inputs, and the targets shifted by one.
    sample          One use of a row in training. Sample i is the (i mod n)-th row of a shuffled *epoch* of all n rows.
    global batch    The rows that one optimizer step consumes over all ranks: samples s * G to (s + 1) * G for step s
                    and G rows. A *batch slice* is what one rank reads of it.
    mixture         The order of samples from several sources, see mixture.py; a *use* of a source is one of its rows.
    stream          The documents of one row of the global batch, for a dataset of the Hugging Face hub, which is not
                    stored. A *cursor* is the position of a stream.
"""

from torchtitan_clone.data.dataset import Dataset
from torchtitan_clone.data.loader import Loader, LoaderOptions, ValidationLoader
from torchtitan_clone.data.opening import describe_data, open_dataset
from torchtitan_clone.data.packing import Batch
from torchtitan_clone.data.tokenizer import Tokenizer, build_tokenizer

__all__ = [
    "Batch",
    "Dataset",
    "Loader",
    "LoaderOptions",
    "Tokenizer",
    "ValidationLoader",
    "build_tokenizer",
    "describe_data",
    "open_dataset",
]

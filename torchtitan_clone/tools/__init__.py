"""What users do with a run besides training: evaluate, generate, inspect its data, draw a report.

- A *task* is a set of texts whose log-likelihoods are measured and turned into metrics (`evaluation_tasks.py`).
- *Scoring* packs texts into rows and sums the log-likelihoods of each (`scoring.py`), on any mesh (`evaluation.py`).
- A *sample* is the continuation of a prompt while training (`samples.py`).
- A *trained model* is opened from a checkpoint or a Hugging Face folder, on one device (`trained_model.py`).
- *Generation* continues prompts with a cache of keys and values (`generation.py`, `kv_cache.py`).
- *Engines* serve an export; what they make of it is compared with the trained model (`serving.py`).
- A model of *SentencePiece* is converted to tokenizer.json (`sentence_pieces.py`).
- The *harness* is lm-evaluation-harness, for which `harness.py` is a model.
- *Duplicates* are documents that occur before in the data, which `data.drop_duplicates` drops (`duplicates.py`).
- A *report* is one HTML page about runs (`report.py`, its data, charts and server).

The core finds what it calls, before training and between two steps, through `door.py`.
"""

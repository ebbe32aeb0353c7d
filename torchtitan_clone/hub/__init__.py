"""Weights in the format of the Hugging Face hub: read as initial weights of a run, and exported.

A *folder* of weights has config.json, files of tensors (safetensors) and, if there are several, an index of them. A
*format* (`DecoderHub`) says how one family's folder is written: which keys of config.json stand for our arguments, and
by which *rules* tensors of the folder hold our parameters. One of ours may be many of theirs (experts), or a share of
one of theirs (fused projections). Tensors of a folder may be *quantized*; they are read as fp32.

A family has its format in models/<family>/hf.py, or shares one of plain decoders in `formats.py`, as llama3 does;
`ModelSpec.hugging_face` names it, so that a run that neither reads nor writes folders does not import this package.
`torchtitan.py` reads checkpoints of torchtitan instead, for a script.
"""

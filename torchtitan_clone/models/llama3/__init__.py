"""Llama 3 and its sizes."""

from functools import partial

from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.models.llama3.model import Llama3Args, build
from torchtitan_clone.models.plan import decoder_styles
from torchtitan_clone.models.rope import RopeScaling
from torchtitan_clone.models.spec import ModelSpec


def tensor_plan(_args: Llama3Args) -> TensorPlan:
    """Returns the plan of a decoder."""
    return TensorPlan(styles=decoder_styles())


_llama_3_1 = partial(Llama3Args, n_kv_heads=8, rope_scaling=RopeScaling(factor=8.0))
_llama_3_2 = partial(Llama3Args, n_kv_heads=8, rope_scaling=RopeScaling(factor=32.0), tied_embeddings=True)

FLAVORS = {
    # 5 M parameters and the shipped tokenizer's vocabulary: learns on two CPU cores.
    "debugmodel": Llama3Args(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, vocab_size=2048, multiple_of=64, max_seq_len=8192
    ),
    "1B": _llama_3_2(dim=2048, n_layers=16, n_heads=32, ffn_dim_multiplier=1.5),
    "3B": _llama_3_2(dim=3072, n_layers=28, n_heads=24),
    "8B": _llama_3_1(dim=4096, n_layers=32, n_heads=32, multiple_of=1024, ffn_dim_multiplier=1.3),
    "70B": _llama_3_1(dim=8192, n_layers=80, n_heads=64, multiple_of=4096, ffn_dim_multiplier=1.3),
    "405B": _llama_3_1(dim=16384, n_layers=126, n_heads=128, multiple_of=4096, ffn_dim_multiplier=1.2),
}

SPEC = ModelSpec(
    name="llama3",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.hub.formats:LLAMA3",
)

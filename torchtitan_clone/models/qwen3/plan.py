"""How tensor parallelism shards Qwen3."""

from torchtitan_clone.models.plan import TensorPlan, decoder_styles, qk_norm_styles
from torchtitan_clone.models.qwen3.model import Qwen3Args


def tensor_plan(_args: Qwen3Args) -> TensorPlan:
    """Returns the plan of a decoder with norms of queries and keys."""
    return TensorPlan(styles=decoder_styles() | qk_norm_styles())

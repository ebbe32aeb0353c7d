"""How tensor parallelism shards Qwen3."""

from torchtitan_clone.models.plan import TensorPlan, decoder_styles, moe_styles, qk_norm_styles
from torchtitan_clone.models.qwen3.model import Qwen3Args, Qwen3MoEArgs


def tensor_plan(args: Qwen3Args) -> TensorPlan:
    """Returns the plan of a decoder with norms of queries and keys."""
    is_moe = isinstance(args, Qwen3MoEArgs)
    styles = moe_styles(has_shared_experts=args.moe.num_shared_experts > 0) if is_moe else decoder_styles()
    return TensorPlan(styles=styles | qk_norm_styles())

"""How tensor parallelism shards Llama 4."""

from torchtitan_clone.models.llama4.model import Llama4Args
from torchtitan_clone.models.plan import TensorPlan, moe_styles


def tensor_plan(args: Llama4Args) -> TensorPlan:
    """Returns the plan of a decoder of which some layers have experts."""
    dense = [layer for layer in range(args.n_layers) if not args.has_experts(layer)]
    return TensorPlan(styles=moe_styles(has_shared_experts=True, dense_layers=dense))

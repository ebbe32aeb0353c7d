"""How tensor parallelism shards gpt-oss."""

from torchtitan_clone.models.gpt_oss.model import GptOssArgs
from torchtitan_clone.models.plan import TensorPlan, moe_styles, sink_styles


def tensor_plan(_args: GptOssArgs) -> TensorPlan:
    """Returns the plan of a decoder with experts and sinks."""
    return TensorPlan(styles=moe_styles(has_shared_experts=False) | sink_styles())

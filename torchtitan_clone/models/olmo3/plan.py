"""How tensor parallelism shards OLMo 2 and 3."""

from torchtitan_clone.models.olmo3.model import Olmo2Args
from torchtitan_clone.models.plan import TensorPlan, decoder_styles, heads_norm_styles


def tensor_plan(_args: Olmo2Args) -> TensorPlan:
    """Returns the plan of a decoder with norms after its layers and over all heads."""
    return TensorPlan(styles=decoder_styles() | heads_norm_styles())

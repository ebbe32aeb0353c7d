"""How tensor parallelism shards Llama 3."""

from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.plan import TensorPlan, decoder_styles


def tensor_plan(_args: Llama3Args) -> TensorPlan:
    """Returns the plan of a decoder."""
    return TensorPlan(styles=decoder_styles())

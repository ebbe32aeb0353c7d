"""gpt-oss and its sizes."""

from torchtitan_clone.interfaces import TensorPlan
from torchtitan_clone.models.gpt_oss.model import GptOssArgs, build
from torchtitan_clone.models.moe import MoEArgs
from torchtitan_clone.models.plan import moe_styles, sink_styles
from torchtitan_clone.models.spec import ModelSpec


def tensor_plan(args: GptOssArgs) -> TensorPlan:
    """Returns the plan of a decoder with experts and sinks."""
    return TensorPlan(styles=moe_styles(args.moe) | sink_styles())


FLAVORS = {
    # As many active parameters as the dense debug models, windows shorter than rows; learns on two CPU cores.
    "debugmodel": GptOssArgs(
        dim=256, n_layers=6, n_heads=8, n_kv_heads=4, head_dim=32, vocab_size=2048, max_seq_len=8192,
        rope_scaling=None, moe=MoEArgs(num_experts=8, top_k=2, hidden_dim=384, biases=True, swiglu_limit=7.0),
    ),
    "20b": GptOssArgs(
        n_layers=24, moe=MoEArgs(num_experts=32, top_k=4, hidden_dim=2880, biases=True, swiglu_limit=7.0)
    ),
    "120b": GptOssArgs(),
}  # fmt: skip

SPEC = ModelSpec(
    name="gpt_oss",
    flavors=FLAVORS,
    build=build,
    tensor_plan=tensor_plan,
    hugging_face="torchtitan_clone.models.gpt_oss.hf:HUB",
)

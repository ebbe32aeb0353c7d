"""How tensor parallelism shards DeepSeek V3."""

from torchtitan_clone.models.deepseek_v3.model import DeepSeekV3Args
from torchtitan_clone.models.plan import TensorPlan, latent_attention_styles, moe_styles, prediction_styles


def tensor_plan(args: DeepSeekV3Args) -> TensorPlan:
    """Returns the plan of a decoder with latent attention and experts."""
    styles = moe_styles(has_shared_experts=True, dense_layers=range(args.n_dense_layers))
    others = {name: style for name, style in styles.items() if name.split(".")[2:3] != ["attention"]}
    latent = latent_attention_styles(has_query_latent=args.q_lora_rank > 0)
    return TensorPlan(styles=others | latent | (prediction_styles() if args.mtp_depth else {}))

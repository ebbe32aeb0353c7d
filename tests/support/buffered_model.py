"""A model family for tests: Llama 3 with persistent buffers that change in every step, and with an auxiliary term."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchtitan_clone.hub.formats import LLAMA3, DecoderHub
from torchtitan_clone.hub.mapping import DECODER_RULES, joined, same
from torchtitan_clone.models import MODELS
from torchtitan_clone.models.attention import Attention
from torchtitan_clone.models.decoder import Decoder, TransformerBlock
from torchtitan_clone.models.llama3 import tensor_plan
from torchtitan_clone.models.llama3.model import Llama3Args
from torchtitan_clone.models.spec import ModelSpec
from torchtitan_clone.ops.layers import SwiGLU


@dataclass(frozen=True, kw_only=True)
class BufferedArgs(Llama3Args):
    """Arguments of Llama 3, and the coefficient of the auxiliary term; 0 leaves it out."""

    penalty: float = 0.0


class BufferedSwiGLU(SwiGLU):
    """SwiGLU whose output is scaled by a buffer; with a penalty returns the sum [1] of its mean squares too."""

    scale_D: Tensor
    updates: Tensor

    def __init__(self, args: BufferedArgs) -> None:
        super().__init__(dim=args.dim, hidden_dim=args.ffn_hidden_dim)
        self._penalty = args.penalty
        self.register_buffer("scale_D", torch.empty(args.dim))
        self.register_buffer("updates", torch.empty((), dtype=torch.int64))

    def init_buffers(self, device: torch.device | None = None) -> None:
        """Sets the scale to one and the count to zero."""
        device = device or self.scale_D.device
        self.scale_D = torch.ones(self.scale_D.shape, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride], blocks take both
        self, x_BTD: Tensor
    ) -> Tensor | tuple[Tensor, Tensor]:
        out_BTD = super().forward(x_BTD)
        out_BTD = (out_BTD * self.scale_D).type_as(out_BTD)
        return (out_BTD, out_BTD.float().square().mean(dim=-1).sum()[None]) if self._penalty else out_BTD


def build(args: BufferedArgs) -> Decoder:
    """Returns the model."""
    return Decoder(args, build_block=_build_block, auxiliary={"output_square": args.penalty} if args.penalty else None)


def _build_block(args: BufferedArgs, _layer: int) -> TransformerBlock:
    attention = Attention(dim=args.dim, n_heads=args.n_heads, kv_heads=args.kv_heads, head_dim=args.head_dim)
    return TransformerBlock(args, attention=attention, feed_forward=BufferedSwiGLU(args))


def update_buffers(model_parts: Sequence[nn.Module]) -> None:
    """Changes every buffer after a committed step, differently in each element."""
    for module in (module for part in model_parts for module in part.modules()):
        if isinstance(module, BufferedSwiGLU):
            module.updates += 1
            module.scale_D *= torch.linspace(0.95, 1.0, len(module.scale_D), device=module.scale_D.device)


SPEC = ModelSpec(
    name="buffered",
    flavors={"debugmodel": BufferedArgs(dim=64, n_layers=4, n_heads=4, n_kv_heads=2, vocab_size=2048, multiple_of=32)},
    build=build,
    tensor_plan=tensor_plan,
    hugging_face=DecoderHub(
        family="buffered",
        architecture=LLAMA3.architecture,
        fixed=LLAMA3.fixed,
        defaults=LLAMA3.defaults,
        rules={
            **DECODER_RULES,
            "layers.*.feed_forward.scale_D": joined("model.layers.*.mlp.scale.0", "model.layers.*.mlp.scale.1"),
            "layers.*.feed_forward.updates": same("model.layers.*.mlp.updates"),
        },
    ),
    after_step=update_buffers,
)


def register() -> None:
    """Makes the family known to this process as model.name = "buffered"."""
    MODELS["buffered"] = SPEC

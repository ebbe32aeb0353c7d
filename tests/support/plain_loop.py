"""A reference training loop in plain PyTorch: logits are not chunked, bf16 uses autocast.

It trains the same model from the same initial weights on the same batches with the same optimizer and schedule as
`python -m torchtitan_clone.train` does for the same options on one device. Order, packing, schedule, groups of
parameters and the biases of routers are written again here and in plain_data.py: what is compared shares the model, the
initial weights and the token store.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.plain_data import PlainBatch, PlainData, context_of
from tests.support.plain_optimizers import build_optimizers
from tests.support.plain_qk_clip import PlainQKClip
from tests.support.teachers import STORED
from torchtitan_clone.config import load_config
from torchtitan_clone.config.schema_training import LRScheduler
from torchtitan_clone.models.moe import Router, force_load_balance
from torchtitan_clone.models.sparse_latent import SparseLatentAttention
from torchtitan_clone.parallel.init_weights import init_weights
from torchtitan_clone.parallel.runtime import Launch, pick_device
from torchtitan_clone.run import preflight
from torchtitan_clone.run.trained import find_trained
from torchtitan_clone.tools.trained_model import read_model


class PlainBalancing:
    """Counts the tokens of each expert in forward, and moves the biases. Source: arXiv 2408.15664."""

    def __init__(self, model: nn.Module) -> None:
        self.context_BT = torch.empty(0)
        """Which tokens count in the layers that run next."""
        self.counts = {module: torch.empty(0) for module in model.modules() if isinstance(module, Router)}
        for router in self.counts:
            router.register_forward_hook(self._count)

    def _count(self, router: nn.Module, _args: object, out: tuple[Tensor, Tensor, Tensor | None]) -> None:
        routed = cast("Router", router)
        self.counts[routed] = torch.bincount(out[1][self.context_BT].flatten(), minlength=routed.args.num_experts)

    def update_biases(self) -> None:
        """Moves those of experts with less than the mean load up, and those of others down."""
        for router, counts_E in self.counts.items():
            if router.expert_bias is not None:
                load_E = counts_E.double().cpu()
                change_E = torch.sign(load_E.mean() - load_E) * router.bias_update_rate
                router.expert_bias += (change_E - change_E.mean()).to(router.expert_bias)


class PlainLoop:
    """Trains the configuration of a command line on one device, one call of `train_step` a step."""

    def __init__(self, argv: list[str]) -> None:
        config = load_config(argv)
        launch = Launch.from_environment()
        self.device = pick_device(launch)
        self.steps = config.training.steps
        plan = preflight.resolve(config, world_size=1, device_type=self.device.type)
        dataset = preflight.prepare(plan, launch=launch).dataset
        training = config.training
        self._data = PlainData(
            dataset, seq_len=training.seq_len, rows=plan.global_batch_size, seed=config.debug.seed,
            document_masking=training.document_masking,
        )  # fmt: skip
        with torch.device(self.device):
            self.model: nn.Module = plan.spec.build(plan.model_args)
        if config.debug.moe_force_load_balance:
            force_load_balance(self.model)
        self.parameters = dict(self.model.named_parameters())
        init_weights(self.parameters, seed=config.debug.seed, std_of=plan.spec.std_of(plan.model_args))
        options = config.optimizer
        self.optimizers = build_optimizers(config, args=plan.model_args, parameters=self.parameters)
        self.optimizer = self.optimizers[-1]
        self._peak_lr = options.lr
        self._max_norm = config.training.max_norm
        self._lr_factor = partial(lr_factor, options=config.lr_scheduler, steps=self.steps)
        self._forward = torch.compile(self.model) if config.compile.enable else self.model
        self._args = plan.model_args
        self._final_BTD = torch.empty(0)  # of the last forward
        cast("nn.Module", self.model.norm).register_forward_hook(self._keep_final)
        self.balancing = PlainBalancing(self.model)
        self.mtp_losses: list[Tensor] = []
        """Of the last step, by depth."""
        self.qk_clip = None
        if (threshold := options.qk_clip) is not None:
            self.qk_clip = PlainQKClip(self.model, threshold=threshold, alpha=options.qk_clip_alpha)
        self._ema = config.ema
        weights = self.parameters if self._ema.enable else {}
        self.averages = {name: p.detach().double() for name, p in weights.items()}
        """Of the weights; none without ema.enable."""
        self._z_loss = training.z_loss
        self.output_z = torch.empty(0)
        """Mean square of the lse of the last step."""
        self.teacher, self._distillation = None, config.distillation
        self.divergence = torch.empty(0)
        """Mean divergence from the teacher in the last step."""
        if config.distillation.is_enabled:
            store = config.distillation.store
            path = config.distillation.teacher_path if store is None else Path(store).with_name("teacher")
            self.teacher = read_model(find_trained(Path(path)), dtype=torch.float32, device=self.device)
        self.index_losses: dict[nn.Module, Tensor] = {}
        """Of the tokens of the last step, by module; none without indexers."""
        self.indexer_kl = torch.empty(0)
        for module in self.model.modules():
            if isinstance(module, SparseLatentAttention):
                module.register_forward_hook(self._keep_index_loss)
        self._is_bf16 = plan.config.training.mixed_precision_param == "bfloat16"

    def _keep_final(self, _module: nn.Module, _args: object, out_BTD: Tensor) -> None:
        self._final_BTD = out_BTD

    def _keep_index_loss(self, module: nn.Module, _args: object, out: tuple[Tensor, Tensor]) -> None:
        self.index_losses[module] = out[1]

    def train_step(self, step: int) -> tuple[float, float]:
        """Trains the step of this number, which must follow the last; returns its loss and gradient norm."""
        batch = next(self._data).to(self.device)
        if self.balancing.counts:
            self.balancing.context_BT = context_of(batch.targets_BT >= 0, batch.documents_BT)
        for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
            group["lr"] = self._peak_lr * self._lr_factor(step) * group.get("lr_share", 1.0)
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._is_bf16):
            logits = self._forward(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), batch.targets_BT.flatten())
            self.mtp_losses = self._mtp_losses(batch)
            self.output_z = logits.float().logsumexp(-1)[batch.targets_BT >= 0].square().mean()
            objective = loss if self.teacher is None else self._distilled(loss, logits, batch)
        weight = getattr(self._args, "mtp_loss_weight", 0.0)
        if self.index_losses:
            of_context = [loss_BT[self.balancing.context_BT].sum() for loss_BT in self.index_losses.values()]
            self.indexer_kl = torch.stack(of_context).sum() / batch.num_targets
            objective = objective + getattr(self._args, "indexer_loss_weight", 0.0) * self.indexer_kl
        of_depths = weight * sum(self.mtp_losses) / max(1, len(self.mtp_losses))
        (objective + of_depths + self._z_loss * self.output_z).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self._max_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.qk_clip is not None:
            self.qk_clip.clip()
        self.balancing.update_biases()
        self._update_averages(step)
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm.item()

    def _distilled(self, loss: Tensor, logits: Tensor, batch: PlainBatch) -> Tensor:
        """Returns (1 - alpha) CE + alpha T^2 KL. Source: arXiv 1503.02531."""
        assert self.teacher is not None
        with torch.no_grad():
            theirs = self.teacher(batch.tokens_BT, positions_BT=batch.positions_BT, documents_BT=batch.documents_BT)
        alpha, temperature = self._distillation.alpha, self._distillation.temperature
        p, q = ((x[batch.targets_BT >= 0].float() / temperature).log_softmax(-1) for x in (theirs, logits))
        if self._distillation.store is not None:
            top = p.topk(STORED).indices
            p, q = (_with_rest(x, top) for x in (p, q))
        self.divergence = F.kl_div(q, p, log_target=True, reduction="batchmean")
        return (1 - alpha) * loss + alpha * temperature**2 * self.divergence

    def _update_averages(self, updates: int) -> None:
        """Moves the averages towards the weights by their half-life or decay, every ema.freq updates."""
        half_life, freq = self._ema.half_life, self._ema.freq
        decay = self._ema.decay if half_life is None else 0.5 ** (1 / (half_life * updates))
        for name, average in self.averages.items() if updates % freq == 0 else ():
            weight = self.parameters[name].detach().double()
            self.averages[name] = decay**freq * average + (1 - decay**freq) * weight

    def _mtp_losses(self, batch: PlainBatch) -> list[Tensor]:
        """Returns the loss of each depth of multi-token prediction, term by term of the report's equations 21 to 24.

        The sum over the positions of which the predicted token is in their document, over the targets of the next one.
        """
        model: Any = self.model
        length = batch.tokens_BT.shape[1]
        # As if each row was followed by its last target and then by padding.
        row = torch.cat((batch.tokens_BT, batch.targets_BT[:, -1:].clamp_min(0)), dim=1)
        documents = torch.zeros_like(batch.tokens_BT) if batch.documents_BT is None else batch.documents_BT
        documents = torch.cat((documents, documents[:, -1:]), dim=1)
        documents[:, -1] += batch.targets_BT[:, -1] < 0
        mask = model.attention_mask(batch.documents_BT, batch.positions_BT, window=None, chunk=None)
        rope, states, losses = model.rotary[0](batch.positions_BT), self._final_BTD, []
        for k in range(1, self._args.mtp_depth + 1):
            block = model.layers[str(self._args.n_layers + k - 1)]
            embedded = model.tok_embeddings(F.pad(row[:, k:], (0, k))[:, :length])
            x = block.eh_proj(torch.cat((block.enorm(embedded), block.hnorm(states)), dim=-1))
            x = x + block.attention(block.attention_norm(x), rope, mask)
            is_counted = documents[:, k + 1 :] == documents[:, : length - k]
            self.balancing.context_BT = context_of(F.pad(is_counted, (0, k)), batch.documents_BT)
            states = block.norm(x + block.feed_forward(block.ffn_norm(x)))
            log_probs = model.output(states[:, : length - k]).float().log_softmax(dim=-1)
            of_target = log_probs.gather(2, row[:, k + 1 :, None])[..., 0]
            losses.append(-of_target[is_counted].sum() / batch.num_targets)
        return losses


def _with_rest(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Returns the log-probabilities of these tokens, and that of all others together."""
    some = log_probs.gather(1, ids)
    return torch.cat((some, log_probs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)), dim=1)


def lr_factor(step: int, *, options: LRScheduler, steps: int) -> float:
    """Returns the factor of the learning rate: a linear warmup, a constant rate, and a decay up to the last step.

    The first step of the decay has the full rate.
    """
    assert not options.points
    steps = options.total_steps or steps
    warmup = min(options.warmup_steps, steps)
    if step < warmup:
        return step / warmup
    decay = steps - warmup
    if options.decay_ratio is not None:
        decay = min(decay, round(options.decay_ratio * steps))
    done = min(1.0, max(0, step - (steps - decay) - 1) / decay) if decay else 0.0
    left = {"linear": 1 - done, "cosine": math.cos(done * math.pi / 2) ** 2, "sqrt": 1 - done**0.5}[options.decay_type]
    return options.min_lr_factor + left * (1 - options.min_lr_factor)

"""Linear layers in float8, by torchao. Source: arXiv 2209.05433."""

import logging
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import nn

from torchtitan_clone import torch_compat
from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.messages import install
from torchtitan_clone.config.schema import Float8
from torchtitan_clone.ops.layers import Linear

logger = logging.getLogger("torchtitan_clone")

MULTIPLE = 16
"""Products in float8 on GPUs take matrices whose sizes are multiples of it."""

ROW_SCALES_ON_CPU_SINCE = "2.12"
"""First version of torch with products in float8 of a CPU with a scale per row."""

_OPTION = 'model.converters = ["float8"]'


def check_torchao(*, must_exist: bool) -> None:
    """Raises ConfigError, or warns, if the package that converts is not installed."""
    if find_spec("torchao") is not None:
        return
    problem = f"{_OPTION}: the package torchao is not installed; "
    if must_exist:
        raise ConfigError(f"{problem}{install('torchao')}, or set it to []")
    logger.warning("%sto train, %s", problem, install("torchao"))


def check_float8_products(options: Float8, *, device: torch.device) -> None:
    """Raises ConfigError if the device has no products in float8 with the scales of the recipe."""
    if options.emulate:
        return
    advice = "to try it out set quantize.linear.float8.emulate to true"
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < (8, 9):
        rule = f"this GPU has compute capability {found[0]}.{found[1]}, and products in float8 need 8.9"
        raise ConfigError(f"{_OPTION}: {rule}; set it to [], or {advice}")
    if device.type == "cpu" and options.recipe_name != "tensorwise" and torch.__version__ < ROW_SCALES_ON_CPU_SINCE:
        rule = f"torch {torch.__version__} multiplies on a CPU with one scale per tensor only"
        raise ConfigError(
            f"quantize.linear.float8.recipe_name = {options.recipe_name}: {rule}; set it to tensorwise, or {advice}"
        )


def convert_to_float8(model: nn.Module, *, options: Float8, tensor_degree: int, compiled: bool) -> None:
    """Replaces linear layers in place; parameters and their names stay the same.

    Not replaced: those that a filter names, those with a forward of their own, and those of which the matrix on one of
    `tensor_degree` ranks may have a size that products in float8 do not take.
    """
    logging.getLogger("torchao").setLevel(logging.ERROR)  # warns of kernels for other GPUs than are here
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training  # pyright: ignore[reportMissingImports]

    def is_converted(module: nn.Module, name: str) -> bool:
        return (
            isinstance(module, nn.Linear)
            and type(module) in (nn.Linear, Linear)
            and all(size % (MULTIPLE * tensor_degree) == 0 for size in module.weight.shape)
            and not any(part in name for part in options.filter_fqns)
        )

    if compiled and options.recipe_name == "rowwise":
        torch_compat.round_as_eager()
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    converted = [name for name in linear if is_converted(model.get_submodule(name), name)]
    config = replace(Float8LinearConfig.from_recipe_name(options.recipe_name), emulate=options.emulate)
    convert_to_float8_training(model, config=config, module_filter_fn=is_converted)
    level = logging.INFO if converted or not linear else logging.WARNING
    logger.log(level, "float8 %s: converted %d of %d linear layers", options.recipe_name, len(converted), len(linear))

"""Text models inside of folders that also hold a model of images: config.json has theirs in text_config."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torchtitan_clone.config import ConfigError
from torchtitan_clone.documents import DocumentError, Value, shorten
from torchtitan_clone.hub.formats import DecoderHub
from torchtitan_clone.hub.keys import WITHOUT_EFFECT, Arguments
from torchtitan_clone.models.decoder import ModelArgs

_KNOWN = {*WITHOUT_EFFECT, "model_type", "quantization_config", "text_config", "tie_word_embeddings", "vision_config"}


@dataclass(frozen=True, kw_only=True)
class WrappedHub(DecoderHub):
    """The format of a family that is published alone, or inside of such a folder; exports are of the text model."""

    wrapper: str
    """Value of model_type beside text_config."""
    wrapper_keys: frozenset[str]
    """Keys beside text_config that concern images."""
    image_tensors: tuple[str, ...]
    """What the names of tensors of images start with."""

    def is_format_of(self, config: Mapping[str, object]) -> bool:
        if config.get("model_type") != self.wrapper:
            return super().is_format_of(config)
        text, own = config.get("text_config"), self.fixed["model_type"]
        return not isinstance(text, Mapping) or text.get("model_type", own) == own

    def prefix(self, config: Mapping[str, object]) -> str:
        return "language_model." if "text_config" in config else ""

    def is_leftover(self, name: str, *, args: ModelArgs) -> bool:
        return name.startswith(self.image_tensors) or super().is_leftover(name, args=args)

    def describe_leftovers(self, names: Iterable[str], *, args: ModelArgs) -> list[str]:
        names = list(names)
        count = sum(name.startswith(self.image_tensors) for name in names)
        where = " and ".join(f"{prefix}*" for prefix in self.image_tensors)
        found = [f"leaves out the {count} tensors of {where}, which encode images"] if count else []
        return found + super().describe_leftovers(names, args=args)

    def from_config(self, config: Mapping[str, object]) -> Arguments:
        if config.get("text_config") is None:
            return super().from_config(config)
        try:
            text = Value(config["text_config"], where="config.json: text_config").plain_entries()
        except DocumentError as error:
            raise ConfigError(str(error)) from None
        known = _KNOWN | self.wrapper_keys
        wrong = [key for key, value in config.items() if value is not None and key not in known]
        if wrong:
            rule = f"beside text_config {self.family} has no such key; remove it if the model is the same without it"
            raise ConfigError(f"config.json: {shorten(wrong[0])} = {shorten(repr(config[wrong[0]]))}: {rule}")
        tied = self.defaults.get("tie_word_embeddings", False)
        outer, inner = (each.get("tie_word_embeddings", tied) for each in (config, text))
        if outer != inner:
            values = " and ".join(shorten(repr(value)) for value in (outer, inner))
            rule = "must be equal beside text_config and in it; write the one that the tensors have into both"
            raise ConfigError(f"config.json: tie_word_embeddings = {values}: {rule}")
        quantization = {"quantization_config": config["quantization_config"]} if "quantization_config" in config else {}
        return super().from_config({**text, **quantization})

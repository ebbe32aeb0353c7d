"""The fragments of a model that semi-synchronous training averages in turn."""

import functools
import operator

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.torchft.outer import split_into_fragments

NAMES = ["tok_embeddings.weight", "layers.0.w", "layers.0.v", "layers.1.w", "norm.weight", "output.weight"]


def test_fragments_contain_every_parameter_once():
    halves = split_into_fragments(NAMES, FaultTolerance(num_fragments=2), own=NAMES)
    assert halves == [NAMES[:3], NAMES[3:]]
    listed = [["norm", "layers.0"], ["tok_embeddings", "layers.1", "output"]]
    fragments = split_into_fragments(NAMES, FaultTolerance(module_fqns_per_model_fragment=listed), own=NAMES)
    assert sorted(functools.reduce(operator.iadd, fragments, [])) == sorted(NAMES)
    assert fragments[0] == ["layers.0.w", "layers.0.v", "norm.weight"]
    twice = FaultTolerance(module_fqns_per_model_fragment=[listed[0], [*listed[1], "norm"]])
    with pytest.raises(ConfigError, match="check norm"):
        split_into_fragments(NAMES, twice, own=NAMES)
    with pytest.raises(ConfigError, match=r"num_fragments = 6: the model has only 5 modules to divide; set it to at"):
        split_into_fragments(NAMES, FaultTolerance(num_fragments=6), own=NAMES)


HALVES = [["tok_embeddings", "layers.0"], ["layers.1", "norm", "output"]]


@pytest.mark.parametrize("fragments", [{"num_fragments": 5}, {"module_fqns_per_model_fragment": HALVES}])
def test_stages_of_a_pipeline_have_the_same_fragments(fragments):
    """Of some of them a stage has nothing."""
    options = FaultTolerance(**fragments)
    whole = split_into_fragments(NAMES, options, own=NAMES)
    first, second = (split_into_fragments(NAMES, options, own=own) for own in (NAMES[:3], NAMES[3:]))
    assert [] in first
    assert [one + other for one, other in zip(first, second, strict=True)] == whole

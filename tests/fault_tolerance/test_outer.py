"""The fragments of a model that semi-synchronous training averages in turn."""

import functools
import operator

import pytest

from torchtitan_clone.config import ConfigError
from torchtitan_clone.config.schema import FaultTolerance
from torchtitan_clone.fault_tolerance.outer import split_into_fragments

NAMES = ["tok_embeddings.weight", "layers.0.w", "layers.0.v", "layers.1.w", "norm.weight", "output.weight"]


def test_fragments_contain_every_parameter_once():
    halves = split_into_fragments(NAMES, FaultTolerance(num_fragments=2))
    assert halves == [NAMES[:3], NAMES[3:]]
    listed = [["norm", "layers.0"], ["tok_embeddings", "layers.1", "output"]]
    fragments = split_into_fragments(NAMES, FaultTolerance(module_fqns_per_model_fragment=listed))
    assert sorted(functools.reduce(operator.iadd, fragments, [])) == sorted(NAMES)
    assert fragments[0] == ["layers.0.w", "layers.0.v", "norm.weight"]
    with pytest.raises(ConfigError, match="check norm"):
        split_into_fragments(NAMES, FaultTolerance(module_fqns_per_model_fragment=[listed[0], [*listed[1], "norm"]]))

"""A rank whose copy differs by one bit is named within the interval, and nothing is saved after it."""

import pytest
import torch

from tests.support.faults import ReplicaGroupWrapper
from tests.support.harness import run_ranks
from tests.support.parity_matrix import EXPERT, MOE
from tests.support.runs import options, train
from tests.support.trainers import open_trainers
from torchtitan_clone.ops.dtensor_shards import local_shard
from torchtitan_clone.run.replica_check import checksum
from torchtitan_clone.run.state import TrainingError

REPLICATE, TENSOR = "parallelism__data_parallel_replicate_degree", "parallelism__tensor_parallel_degree"
SHARD, PIPELINE = "parallelism__data_parallel_shard_degree", "parallelism__pipeline_parallel_degree"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64])
def test_every_bit_and_every_place_changes_the_checksum(dtype):
    normal = torch.randn(5000, generator=torch.Generator().manual_seed(0)) * 1000
    values = normal > 0 if dtype == torch.bool else normal.to(dtype)
    width = 8 * values.element_size()
    seen = {int(checksum(values))}
    words = values.view({8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[width])
    for bit in range(1 if dtype == torch.bool else width):
        flipped = words.clone()
        flipped[4321] ^= 1 << bit if bit < width - 1 or width == 8 else -(1 << bit)
        seen.add(int(checksum(flipped)))
    assert len(seen) == 1 + (1 if dtype == torch.bool else width)
    assert int(checksum(values)) == int(checksum(values.view(50, 100).mT.contiguous().mT))
    assert int(checksum(values.flip(0))) != int(checksum(values))
    assert int(checksum(values[:0])) == 0


def test_every_piece_of_a_large_tensor_counts():
    values = torch.zeros(3 * 2**20)
    values[-1] = values[2**20] = 1.0
    sums = {int(checksum(values))}
    for place in (2**20, -1):
        values[place] = 0.0
        sums.add(int(checksum(values)))
    assert len(sums) == 3


class BitFlipper(ReplicaGroupWrapper):
    """Flips a bit of a tensor of one rank when a step begins."""

    def __init__(self, group, *, name, rank, step):
        super().__init__(group)
        self._place = name, rank, step
        self._step = 0
        self.trainer = None

    def record_samples(self, samples):
        name, rank, step = self._place
        self._step += 1
        if (self._step, torch.distributed.get_rank()) == (step, rank):
            local_shard(self.trainer.state_tensors()[name]).detach().view(torch.int32).flatten()[3] ^= 1 << 20
        self._group.record_samples(samples)


def train_with_a_flipped_bit(cases):
    """Returns the error that ends each run, and the last step that was trained."""
    flippers, found = [], []
    places = iter(cases)

    def wrap(group):
        flippers.append(BitFlipper(group, **next(places)[1]))
        return flippers[-1]

    for trainer in open_trainers([argv for argv, _ in cases], wrap_replica_group=wrap):
        flippers[-1].trainer = trainer
        try:
            trainer.train()
        except TrainingError as error:
            found.append(str(error))
        else:
            found.append("nothing")
    return found


def saved_steps(folder):
    """Returns the names of what the run saved."""
    return sorted(path.name for path in (folder / "run" / "checkpoint").glob("step-*"))


def flipped(corpus, folder, cases, *, world_size):
    """Returns the error of each case, which is the same on all ranks; `cases` are options, and where the bit is."""
    common = {"training__steps": 6, "training__local_batch_size": 1, "comm__replica_check_freq": 2, SHARD: 1}
    runs = [
        (options(corpus, folder / str(number), **{**common, **changes}), place)
        for number, (changes, place) in enumerate(cases)
    ]
    first, *others = run_ranks(train_with_a_flipped_bit, world_size, runs)
    assert all(other == first for other in others)
    return first


WEIGHT, NORM = "model/layers.1.attention.wq.weight", "model/layers.0.ffn_norm.weight"


def test_a_difference_of_two_replicas_names_both_and_the_tensor(corpus, tmp_path):
    moment = "optimizer/layers.1.attention.wq.weight/exp_avg_sq"
    cases = [
        ({REPLICATE: 2, "checkpoint__interval": 3}, {"name": WEIGHT, "rank": 1, "step": 3}),
        ({REPLICATE: 2}, {"name": moment, "rank": 0, "step": 3}),
        ({TENSOR: 2}, {"name": NORM, "rank": 1, "step": 4}),
        ({SHARD: 2, **MOE, EXPERT: 2, "model__args__moe__expert_bias": True},
         {"name": "model/layers.0.feed_forward.router.expert_bias", "rank": 1, "step": 3}),
        ({REPLICATE: 2, "comm__replica_check_freq": 0}, {"name": WEIGHT, "rank": 1, "step": 3}),
    ]  # fmt: skip
    found = flipped(corpus, tmp_path, cases, world_size=2)
    steps = ["step 3: ", "step 4: ", "step 4: ", "step 4: "]
    for error, step, (_, place) in zip(found, steps, cases, strict=False):
        assert error.startswith(f"{step}rank 0 (")
        assert ") and rank 1 (" in error
        assert ") differ, though they must hold the same " in error
        assert place["name"].removesuffix("/exp_avg_sq").partition("/")[2] in error
        assert "Nothing is saved" in error
    assert found[-1] == "nothing"
    assert [saved_steps(tmp_path / str(number)) for number in range(5)] == [[], [], [], [], ["step-6"]]


def test_of_three_replicas_the_one_that_differs_is_named(corpus, tmp_path):
    cases = [
        ({REPLICATE: 3, "training__global_batch_size": 6, "checkpoint__interval": 2},
         {"name": WEIGHT, "rank": rank, "step": 3})
        for rank in (2, 0)
    ]  # fmt: skip
    found = flipped(corpus, tmp_path, cases, world_size=3)
    for number, rank in enumerate((2, 0)):
        assert found[number].startswith(f"step 4: rank {rank} (")
        assert ") differs from 2 ranks that must hold the same " in found[number]
        assert saved_steps(tmp_path / str(number)) == ["step-2"]


@pytest.mark.many_ranks
def test_shards_are_compared_with_their_replicas_in_every_stage(corpus, tmp_path):
    mesh = {REPLICATE: 2, SHARD: 2, PIPELINE: 2, "training__local_batch_size": 2}
    (found,) = flipped(corpus, tmp_path, [(mesh, {"name": WEIGHT, "rank": 6, "step": 1})], world_size=8)
    assert found.startswith("step 2: rank 4 (")
    assert ") and rank 6 (" in found


def test_meshes_without_a_fault_have_no_difference(corpus, tmp_path):
    for name, mesh in {"shard": {SHARD: 2}, "tensor": {TENSOR: 2}, "pipeline": {PIPELINE: 2}}.items():
        changes = {**mesh, "comm__replica_check_freq": 1, "training__steps": 4, "optimizer__name": "Muon"}
        code, output = train(options(corpus, tmp_path / name, **changes), world_size=2, log_folder=tmp_path)
        assert code == 0, output
        assert ("on this mesh no two ranks hold the same weights" in output) == (name != "tensor")

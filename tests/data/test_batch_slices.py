"""The slices of all ranks and replica groups are the global batch, in order."""

import json

import pytest

from torchtitan_clone.data.dataset import BatchSlice, StreamState, slice_of_rank
from torchtitan_clone.data.streaming import streams_from_plain, streams_to_plain


def slices(*, global_batch_size: int, num_replicas: int, num_ranks: int, multiple_of: int = 1) -> list[BatchSlice]:
    """Returns the slices of all ranks of all replica groups."""
    return [
        slice_of_rank(
            rank,
            num_ranks=num_ranks,
            global_batch_size=global_batch_size,
            seq_len=4,
            replica_index=replica_index,
            num_replicas=num_replicas,
            multiple_of=multiple_of,
        )
        for replica_index in range(num_replicas)
        for rank in range(num_ranks)
    ]


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 7])
@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("multiple_of", [1, 4])
def test_all_slices_in_order_are_the_global_batch(num_replicas, num_ranks, multiple_of):
    found = slices(global_batch_size=24, num_replicas=num_replicas, num_ranks=num_ranks, multiple_of=multiple_of)
    assert [row for one in found for row in one.rows[: one.counted]] == list(range(24))
    (size,) = {one.size for one in found}
    assert size % multiple_of == 0
    assert size >= max(len(one.rows) for one in found)


def test_a_rank_without_rows_reads_one_that_does_not_count():
    found = slices(global_batch_size=2, num_replicas=1, num_ranks=4)
    assert [one.counted for one in found] == [0, 1, 0, 1]
    assert all(len(one.rows) == 1 for one in found)


def test_a_stream_state_survives_json():
    state = StreamState(cursors=[(0, 1, 2), (3, 4, 5)], bookmark=(0, 1, '{"shard": 2}'))
    assert streams_from_plain(json.loads(json.dumps(streams_to_plain([state])))) == [state]
    assert streams_from_plain({"samples": 3}) == []

"""Pseudorandom permutations of which any element is computed alone, without memory."""

import hashlib

import numpy as np

PERMUTATION_ROUNDS = 8


def permute(positions: np.ndarray, *, n: int, seed: int, epoch: int | str) -> np.ndarray:
    """Maps positions in [0, n) one-to-one onto [0, n); seed and epoch select the permutation.

    A Feistel network over pairs (left, right) with left < a and right < b, where a * b is slightly larger than n; a
    result of n or more is mapped again. Source: J. Black and P. Rogaway, Ciphers with Arbitrary Finite Domains, 2002.
    """
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=8 * PERMUTATION_ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8")
    b = np.uint64(max(1, int(np.ceil(np.sqrt(n)))))
    a = np.uint64(-(-n // int(b)))
    result = _network(positions.astype(np.uint64), a=a, b=b, keys=keys)
    while (outside := np.flatnonzero(result >= n)).size:
        result[outside] = _network(result[outside], a=a, b=b, keys=keys)
    return result.astype(np.int64)


def _network(values: np.ndarray, *, a: np.uint64, b: np.uint64, keys: np.ndarray) -> np.ndarray:
    left, right = np.divmod(values, b)
    for key_left, key_right in zip(keys[::2], keys[1::2], strict=True):
        left = (left + _mix(right ^ key_left) % a) % a
        right = (right + _mix(left ^ key_right) % b) % b
    return left * b + right


def _mix(values: np.ndarray) -> np.ndarray:
    """Hashes each value to 64 bits (multiplication wraps). Source: the finalizer of SplitMix64, OOPSLA 2014."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))

"""A stable 64-bit hash chain (splitmix64 finaliser), the same for Python ints and NumPy arrays.

Python's ``hash`` depends on ``PYTHONHASHSEED``; keys and draws made here are the same in every process. A chain
starts from a salt of its own, and every further word is mixed in, so the order of the words matters.
"""

import numpy as np
import numpy.typing as npt

Uint64Array = npt.NDArray[np.uint64]

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def extend_hash(state: int, word: int) -> int:
    """Mix one more word into a hash chain.

    Parameters
    ----------
    state : int
        The chain so far, in ``[0, 2**64)``; a salt starts a chain.
    word : int
        Any integer; taken modulo ``2**64``.

    Returns
    -------
    int
        The new state, in ``[0, 2**64)``.
    """
    value = ((state ^ (word & _MASK)) + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * _MULTIPLIER_1) & _MASK
    value = ((value ^ (value >> 27)) * _MULTIPLIER_2) & _MASK
    return value ^ (value >> 31)


def extend_hash_array(state: int | Uint64Array, words: Uint64Array) -> Uint64Array:
    """Do what :func:`extend_hash` does, for every element.

    Parameters
    ----------
    state : int or ndarray of uint64
        The chains so far, broadcast against ``words``.
    words : ndarray of uint64
        One word for each chain, at least one dimension.

    Returns
    -------
    ndarray of uint64
        The new states.
    """
    value = np.bitwise_xor(words, np.asarray(state, dtype=np.uint64))
    value += np.uint64(_GAMMA)
    value ^= value >> np.uint64(30)
    value *= np.uint64(_MULTIPLIER_1)
    value ^= value >> np.uint64(27)
    value *= np.uint64(_MULTIPLIER_2)
    value ^= value >> np.uint64(31)
    return value

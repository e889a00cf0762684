"""Counter-based random numbers: the same key gives the same number, whatever was drawn before.

Philox-4x32-10; Salmon, Moraes, Dror and Shaw 2011.
"""

import numpy as np
import numpy.typing as npt

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_UNIT = np.float32(4.6566127342e-10)
"2**-31, so that 31 bits become a number in [0, 1)."


def uniform(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """One number in [0, 1) for each 64-bit key: the first lane, at counter 0."""
    lane = first_lane(keys)
    return (lane & np.uint64(0x7FFFFFFF)).astype(np.float32) * _UNIT


def first_lane(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The first 32 bits that Philox makes of counter 0, for each key."""
    key0, key1 = keys & _LOW, keys >> _HALF
    lane0, lane1, lane2, lane3 = (np.zeros_like(keys) for _ in range(4))
    for _ in range(_ROUNDS):
        product0, product2 = lane0 * _MULTIPLIERS[0], lane2 * _MULTIPLIERS[1]
        lane0, lane1, lane2, lane3 = (
            (product2 >> _HALF) ^ lane1 ^ key0,
            product2 & _LOW,
            (product0 >> _HALF) ^ lane3 ^ key1,
            product0 & _LOW,
        )
        key0, key1 = (key0 + _KEY_STEPS[0]) & _LOW, (key1 + _KEY_STEPS[1]) & _LOW
    return lane0

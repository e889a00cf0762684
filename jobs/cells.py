"""Cells of a table, compared as values."""

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_LISTS = (pa.ListScalar, pa.LargeListScalar, pa.FixedSizeListScalar)


def equal_cells(left: pa.Scalar, right: pa.Scalar) -> bool:
    """Equal as values, where NaN is equal to NaN."""
    if left.equals(right):
        return True
    if left.is_valid != right.is_valid:
        return False
    numbers_a, numbers_b = flat_numbers(left), flat_numbers(right)
    if numbers_a is not None and numbers_b is not None:
        return np.array_equal(numbers_a, numbers_b, equal_nan=True)
    try:
        return repr(left.as_py()) == repr(right.as_py())
    except UnicodeDecodeError:  # Not equal as bytes, and no text that could be.
        return False


def plain_cell(cell: pa.Scalar) -> pa.Scalar:
    """The word itself, where a cell is its number in a dictionary."""
    if not pa.types.is_dictionary(cell.type):
        return cell
    return cell.value if cell.is_valid else pa.scalar(None, cell.type.value_type)


def flat_numbers(cell: pa.Scalar) -> npt.NDArray[np.generic] | None:
    """All numbers of a cell that is a list of them, however deep; None if it is something else.

    A list with a null in it is something else: numpy has no such number.
    """
    if not cell.is_valid or not isinstance(cell, _LISTS):
        return None
    values = cell.values
    while pa.types.is_fixed_size_list(values.type) and not values.null_count:
        values = values.flatten()
    is_number = pa.types.is_floating(values.type) or pa.types.is_integer(values.type)
    if not is_number or values.null_count:
        return None
    numbers: npt.NDArray[np.generic] = values.to_numpy(zero_copy_only=False)
    return numbers


def greatest_difference(old: npt.NDArray[np.float64], new: npt.NDArray[np.float64]) -> float:
    """The greatest difference of two numbers at one place; NaN is equal to NaN and far from all."""
    with np.errstate(invalid="ignore"):
        away = np.where(old == new, 0.0, np.abs(old - new))
    away[np.isnan(old) & np.isnan(new)] = 0.0
    away[np.isnan(away)] = np.inf
    return float(np.max(away, initial=0.0))

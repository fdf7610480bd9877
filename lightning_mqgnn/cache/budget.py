"""Budgets of memory, as users give them."""

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def num_bytes(name: str, budget: int | float | str, whole: int) -> int:
    """Return a budget in bytes.

    Args:
        name: The argument that it was given as, for errors.
        budget: Bytes as an int, `"512MiB"`, or as a float a fraction (0.1 is a tenth) of `whole`.
        whole: Bytes of what a fraction is of.

    Raises:
        TypeError: `budget` is none of these.
        ValueError: It is negative, not finite, or has an unknown unit.
    """
    remedy = "give bytes (an int), a size such as '512MiB', or a fraction such as 0.1 (a float)"
    if isinstance(budget, bool) or not isinstance(budget, int | float | str):
        raise TypeError(f"{name}={budget!r}: {remedy}")
    if isinstance(budget, str):
        return _parse(name, budget, remedy)
    if not 0 <= budget < float("inf"):
        raise ValueError(f"{name}={budget!r}: {remedy}, 0 or more")
    return budget if isinstance(budget, int) else round(budget * whole)


def _parse(name: str, budget: str, remedy: str) -> int:
    text = budget.strip()
    unit = next((unit for unit in _UNITS if text.endswith(unit)), "")
    try:
        value = float(text.removesuffix(unit)) * _UNITS.get(unit, 1)
        if not 0 <= value < float("inf"):
            raise ValueError
    except ValueError:
        raise ValueError(f"{name}={budget!r}: {remedy}; units are {', '.join(_UNITS)}") from None
    return round(value)

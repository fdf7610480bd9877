"""Checks of arguments that several classes take."""


def check_int(name: str, value: object, least: int) -> None:
    """Refuse what is no integer, or below `least`.

    Raises:
        TypeError: `value` is no integer.
        ValueError: It is too small.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: give an integer")
    if value < least:
        raise ValueError(f"{name}={value}: give {least} or more")

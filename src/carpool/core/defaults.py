"""Defaults for callables that a constructor may be given. They have names, so that a trace says what was called."""


def do_nothing(*given: object) -> None:
    """For a callback that its caller does not need."""


def no(*given: object) -> bool:
    """It never is."""
    return False


def yes(*given: object) -> bool:
    """It always is."""
    return True


def half() -> float:
    """Where nothing is left to chance."""
    return 0.5


def one() -> int:
    """This process alone."""
    return 1

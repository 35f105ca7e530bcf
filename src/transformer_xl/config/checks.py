"""What settings refuse: errors that name the setting, its value and the rule."""


def require(holds: bool, message: str) -> None:
    """Refuse settings."""
    if not holds:
        raise ValueError(message)


def require_fraction(name: str, value: float) -> None:
    """Refuse what is no share."""
    require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1")


def require_positive(name: str, value: float | None) -> None:
    """Refuse what is not above 0; None passes."""
    require(value is None or value > 0, f"{name}={value} must be above 0")

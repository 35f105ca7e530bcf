"""The errors that this library raises, which a caller can tell apart.

Each is also a `ValueError` (a value that the caller can change) or a `RuntimeError` (what was
stored is damaged). A missing file stays a `FileNotFoundError`, a full disk an `OSError`, and an
argument of the wrong type Python's `TypeError`.
"""


class TxlError(Exception):
    """An error whose message names what is wrong, the rule, and the remedy.

    Example:
        >>> import transformer_xl
        >>> try:
        ...     transformer_xl.ModelConfig(n_layer=0)
        ... except transformer_xl.TxlError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        SettingsError True
    """


class SettingsError(TxlError, ValueError):
    """A setting is unknown, out of range, or contradicts another one.

    It comes from a recipe, an option of a command, a stored ``config.json`` or Python alike.

    Example:
        >>> import transformer_xl
        >>> transformer_xl.ModelConfig(n_layer=0)
        Traceback (most recent call last):
        transformer_xl.errors.SettingsError: model.n_layer=0 must be above 0
    """


class InputError(TxlError, ValueError):
    """An argument of a function, or a field of a request, is out of range or of another shape.

    Example:
        >>> issubclass(InputError, (TxlError, ValueError))
        True
    """


class DataError(TxlError, ValueError):
    """A text, corpus, vocabulary, recording or archive cannot be read, or not be used.

    Example:
        >>> issubclass(DataError, (TxlError, ValueError))
        True
    """


class CheckpointError(TxlError, RuntimeError):
    """A model, checkpoint, run or session is damaged, of a newer version, or of another model.

    Example:
        >>> issubclass(CheckpointError, (TxlError, RuntimeError))
        True
    """

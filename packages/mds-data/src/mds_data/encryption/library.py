"""The libraries of the extra ``[encrypt]``, imported when a key is used."""

from importlib import import_module
from typing import Any

__all__ = ["library"]


def library(name: str) -> Any:
    """A module of the extra; its absence names the extra.

    Raises:
        ImportError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        package = __name__.partition(".")[0].replace("_", "-")
        raise ImportError(
            f"encryption needs {name.partition('.')[0]}: pip install '{package}[encrypt]' ({error})"
        ) from error

"""Where a finished store goes: at a free name, or in the place of the store that it replaces."""

from __future__ import annotations

import shutil
from pathlib import Path

from mds_data.errors import StoreError
from mds_data.store.folder import is_store

__all__ = ["check_free", "settle_output", "writing_path"]


def check_free(path: Path, *, overwrite: bool) -> None:
    """Raise StoreError if an output's name is taken by something that must not be replaced."""
    if not path.exists() and not path.is_symlink():
        return
    if not overwrite:
        raise StoreError(f"{path} exists. Choose another output, or replace it by --overwrite.")
    if not is_store(path):
        raise StoreError(f"{path} exists and is no token store, so --overwrite leaves it alone.")


def writing_path(path: Path, *, overwrite: bool) -> Path:
    """Return where to write: at the output itself, or beside a store that will be replaced."""
    return path.with_name(f"{path.name}.replacement") if overwrite and path.exists() else path


def settle_output(path: Path, *, overwrite: bool) -> None:
    """Put a finished replacement in the place of the old store, which goes last."""
    replacement = path.with_name(f"{path.name}.replacement")
    if not (overwrite and is_store(replacement)):
        return
    old = path.with_name(f"{path.name}.replaced")
    path.replace(old)
    replacement.replace(path)
    shutil.rmtree(old)

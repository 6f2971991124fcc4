"""Encryption of a run's checkpoints: who may open what is saved, and what opens what is read."""

from __future__ import annotations

from pathlib import Path

from mds_ckpt import KeySource, SealedError
from mds_ckpt.encryption.keys import recipients_of
from mds_ckpt.encryption.library import library
from mds_ckpt.files.sealed_folder import is_sealed
from mds_ckpt.protection.sealed_save import SealedSave
from mds_train.config import CheckpointConfig
from mds_train.config.keys import named_keys, ways_to_name
from mds_train.errors import InputError, MachineError
from mds_train.exchange import attempt_on_all

__all__ = ["check_sealing", "key_for", "new_sealing", "require_library"]

_CIPHER = "cryptography.hazmat.primitives.ciphers.aead"


def key_for(folder: Path, settings: CheckpointConfig) -> KeySource | None:
    """What opens a checkpoint; None for a plain one.

    Raises:
        InputError: If it is encrypted and the configuration names no key.
    """
    if not is_sealed(folder):
        return None
    named = named_keys(settings)
    if not named:
        raise InputError(
            f"{folder}: the checkpoint is encrypted, and no key was given; name what opens it: "
            f"{ways_to_name('checkpoint')}."
        )
    require_library()
    return KeySource(**named)  # type: ignore[arg-type]


def new_sealing(settings: CheckpointConfig) -> SealedSave | None:
    """The encryption of one more checkpoint; None where plain ones are saved."""
    if not settings.encrypt_to:
        return None
    recipients = [entry for entry in settings.encrypt_to if entry.startswith("age1")]
    return SealedSave(recipients=recipients, key=_wrapping_key(settings))


def _wrapping_key(settings: CheckpointConfig) -> KeySource | None:
    named = named_keys(settings)
    named.pop("identity", None)  # opens, but its public key is to be named
    if "key-command" not in settings.encrypt_to:
        named.pop("key_command", None)
    if "passphrase" not in settings.encrypt_to:
        named.pop("passphrase_file", None)
        named.pop("passphrase_variable", None)
    return KeySource(**named) if named else None  # type: ignore[arg-type]


def check_sealing(settings: CheckpointConfig, *, first: bool) -> str | None:
    """Try the encryption before anything is trained. Collective.

    Args:
        settings: The [checkpoint] table.
        first: Whether this is the rank that publishes checkpoints.

    Returns:
        A sentence if the run could not read again what it saves.

    Raises:
        InputError: If a key is no good.
        MachineError: If what encrypts is not installed.
    """
    return attempt_on_all(lambda: _checked(settings, first=first))[0]


def _checked(settings: CheckpointConfig, *, first: bool) -> str | None:
    if not settings.encrypt_to:
        return None
    require_library()
    if not first:
        return None
    try:
        new_sealing(settings)
        return None if _opens_its_own(settings) else _WARNING
    except SealedError as error:
        raise InputError(f"checkpoint.encrypt_to: {error}") from error


_WARNING = (
    "Checkpoints are saved encrypted for others only (checkpoint.encrypt_to): nothing that this "
    "run was given opens them, so to resume, checkpoint.identity must name an identity."
)


def _opens_its_own(settings: CheckpointConfig) -> bool:
    wrapped = set(settings.encrypt_to)
    if settings.identity is None:
        return bool(wrapped & {"passphrase", "key-command"})
    return bool(wrapped & {"passphrase", "key-command"}) or bool(
        wrapped & set(recipients_of(KeySource(identity=settings.identity)))
    )


def require_library() -> None:
    """Raise MachineError if what encrypts and decrypts is not installed."""
    try:
        library(_CIPHER)
        library("pyrage")
    except ImportError as error:
        raise MachineError(str(error)) from error

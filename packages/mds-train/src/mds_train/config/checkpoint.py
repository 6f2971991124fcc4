"""The [checkpoint] table: when to save, what to keep, where to start from."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mds_train.config.checks import require_not_negative, require_positive

__all__ = ["CheckpointConfig"]

_PUBLIC_KEY = re.compile(r"age1[02-9ac-hj-np-z]{58}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Saving and loading. Checkpoints of a run lie in RUN_DIR/checkpoints."""

    save_interval: int | None = None
    """Save every so many steps; only at the end when left out."""

    save_minutes: float | None = None
    """Also save when so many minutes have passed since the last save."""

    save_at_loss_spike: float | None = None
    """Also save after a step whose loss is more than this many times the median of the last 20."""

    async_save: bool = False
    """Copy the state and write it while training goes on; takes the state's size in host memory."""

    backup: str | None = None
    """Second place: a folder or URL to which each checkpoint is copied after its commit."""

    backup_identity: str | None = None
    """File of an age identity: backups at a URL are encrypted for it."""

    encrypt_to: tuple[str, ...] = ()
    """Save encrypted, for these: age public keys ("age1..."), "passphrase" and "key-command", the
    ones that this table names."""

    identity: str | None = None
    """File of the age identity that opens encrypted checkpoints, to load and to resume."""

    passphrase_file: str | None = None
    """File with the passphrase that opens them."""

    passphrase_variable: str | None = None
    """Name of the environment variable that holds their passphrase."""

    key_command: str | None = None
    """Program that unwraps (and wraps) their key, such as the client of a key service."""

    save_initial: bool = False
    """Also save before the first step."""

    save_final: bool = True
    """Save when the run ends."""

    keep_last: int = 3
    """Keep this many newest checkpoints; 0 keeps all of them."""

    keep_every: int | None = None
    """Keep besides every checkpoint whose step is a multiple of this."""

    load: str | None = None
    """Start from this checkpoint: a step-N folder, or a folder of them (the newest whole one)."""

    load_weights_only: bool = False
    """Take only the weights: counters, optimizer, schedule and data start afresh (fine-tuning)."""

    from_scratch_if_missing: bool = False
    """Start from random weights where there is no checkpoint to load or to resume."""

    def __post_init__(self) -> None:
        require_positive("checkpoint.save_interval", self.save_interval)
        require_positive("checkpoint.save_minutes", self.save_minutes)
        if self.save_at_loss_spike is not None and not self.save_at_loss_spike > 1:
            raise ValueError(
                f"checkpoint.save_at_loss_spike is {self.save_at_loss_spike}, but it must be "
                f"greater than 1: 2 saves where the loss is twice the median of the last steps."
            )
        if self.backup_identity is not None and "://" not in (self.backup or ""):
            raise ValueError(
                "checkpoint.backup_identity encrypts backups at a URL, but checkpoint.backup names "
                "none; set it to one such as s3://bucket/run, or leave the identity out."
            )
        self._check_encryption()
        require_positive("checkpoint.keep_every", self.keep_every)
        require_not_negative("checkpoint.keep_last", self.keep_last)
        if self.load_weights_only and self.load is None:
            raise ValueError(
                "checkpoint.load_weights_only is set, but checkpoint.load names no checkpoint."
            )

    def _check_encryption(self) -> None:
        named = {
            "passphrase": self.passphrase_file or self.passphrase_variable,
            "key-command": self.key_command,
        }
        for entry in self.encrypt_to:
            if entry not in named and not _PUBLIC_KEY.fullmatch(entry):
                raise ValueError(
                    f"checkpoint.encrypt_to holds {entry[:80]!r}, which is no public key of age "
                    f'(age1 and 58 letters and digits); "passphrase" and "key-command" stand for '
                    f"those that the table names."
                )
            if entry in named and not named[entry]:
                key = "passphrase_file" if entry == "passphrase" else "key_command"
                raise ValueError(
                    f'checkpoint.encrypt_to holds "{entry}", but nothing names it; set '
                    f"checkpoint.{key}."
                )

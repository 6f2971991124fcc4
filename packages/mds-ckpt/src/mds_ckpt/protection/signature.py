"""Sign a folder with a key of one's own, offline, and check such a signature.

The signature is OpenSSF's model signing format (a Sigstore bundle), made and read by its own
library, so that `model_signing verify key` checks ours and we check its. No service is asked.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from mds_ckpt.encryption.keys import KeySource
from mds_ckpt.errors import RejectedError
from mds_ckpt.files.file_operations import REAL, FileOperations, partial_path
from mds_ckpt.files.regular_file import read_whole

__all__ = ["SignatureCheck", "check_signature", "new_signing_key", "sign", "signature_beside"]

_LARGEST_KEY = 2**16
_LARGEST_SIGNATURE = 2**28
"""Room for the digests of a million files."""
_UNSIGNABLE = re.compile(r"Cannot use '(.*?)' (?:because|as)")
_CHANGED = re.compile(r"Hash mismatch for \\?'(.*?)\\?': Expected")
_EXTRA = re.compile(r"""Extra files found in model .*?: (.*?)["'](?:, |\])""")
_MISSING = re.compile(r"""Missing files in model .*?: (.*?)["'](?:, |\])""")


@dataclass(frozen=True, kw_only=True, slots=True)
class SignatureCheck:
    """What became of a signature."""

    signature: Path
    differences: tuple[str, ...] = ()
    """What is not as it was signed; nothing if the signature is good."""


def signature_beside(path: Path) -> Path:
    """Where the signature of a folder lies if nobody says otherwise."""
    whole = path if path.name and path.name != ".." else Path(os.path.realpath(path))
    return whole.with_name(f"{whole.name}.sig")


def new_signing_key(path: Path, *, passphrase: KeySource | None = None) -> Path:
    """Write a new private key (NIST P-256), and its public key beside it.

    Args:
        path: The file of the private key, which only its owner can read.
        passphrase: What the private key is to be encrypted with.

    Returns:
        The file of the public key, ``path`` with ``.pub`` behind it.

    Raises:
        FileExistsError: One of the two is there already.
    """
    curves = _library("cryptography.hazmat.primitives.asymmetric.ec")
    forms = _library("cryptography.hazmat.primitives.serialization")
    lock = forms.NoEncryption()
    if passphrase is not None:
        lock = forms.BestAvailableEncryption(passphrase.passphrase(repeat=True))
    key = curves.generate_private_key(curves.SECP256R1())
    public = key.public_key().public_bytes(
        forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo
    )
    private = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, lock)
    beside = Path(f"{path}.pub")
    _write_new(beside, public, mode=0o644)
    try:
        _write_new(path, private, mode=0o600)
    except OSError:
        beside.unlink()
        raise
    return beside


def _write_new(path: Path, data: bytes, *, mode: int) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    REAL.sync_folder(path.parent)


def sign(
    path: Path,
    *,
    private_key: Path,
    signature: Path,
    passphrase: KeySource | None = None,
    operations: FileOperations = REAL,
) -> None:
    """Sign every file of a folder: a checkpoint of any format, a store, a release.

    Args:
        path: The folder, or one file.
        private_key: An elliptic key as PEM (P-256, P-384 or P-521).
        signature: The file that appears, or is replaced.
        passphrase: Opens the private key, if that is encrypted.
        operations: The disk.

    Raises:
        RejectedError: The key is none, others can read it, or the folder holds a link or a device.
    """
    path, signature = _existing(path), signature.absolute()
    if Path(os.path.realpath(private_key)).is_relative_to(path):
        raise RejectedError(
            private_key,
            "the private key lies in the folder that it signs, and would be handed on with it",
            remedy="keep it elsewhere",
        )
    config = _library("model_signing.signing").Config()
    config.set_hashing_config(_every_file(path, but=signature))
    _give_key(config, private_key, passphrase)
    temporary = partial_path(signature)
    try:
        try:
            config.sign(path, temporary)
        except ValueError as error:
            raise RejectedError(path, _fault(error), remedy="sign a folder of files") from None
        operations.sync_path(temporary)
        operations.replace(temporary, signature)
        operations.sync_folder(signature.parent)
    finally:
        temporary.unlink(missing_ok=True)


def check_signature(path: Path, *, public_key: Path, signature: Path) -> SignatureCheck:
    """Compare every file of a folder with its signature.

    Args:
        path: The folder, or one file.
        public_key: PEM; it must be known to be the signer's.
        signature: The file.

    Raises:
        RejectedError: The key or the signature is no such file.
    """
    path, signature = _existing(path), signature.absolute()
    read_whole(public_key, limit=_LARGEST_KEY)
    read_whole(signature, limit=_LARGEST_SIGNATURE)
    config = _library("model_signing.verifying").Config()
    config.set_hashing_config(_every_file(path, but=signature))
    try:
        config.use_elliptic_key_verifier(public_key=public_key)
    except (ValueError, AttributeError) as error:
        raise RejectedError(
            public_key,
            f"it holds no public elliptic key ({_sentence(error)})",
            remedy="give the PEM file of a P-256, P-384 or P-521 key",
        ) from None
    forged = _library("cryptography.exceptions").InvalidSignature
    try:
        config.verify(path, signature)
    except forged:
        return SignatureCheck(
            signature=signature, differences=("the signature itself was changed",)
        )
    except ValueError as error:
        return SignatureCheck(signature=signature, differences=_differences(error, signature))
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _no_signature(signature, error) from None
    return SignatureCheck(signature=signature)


def _existing(path: Path) -> Path:
    if not path.exists():
        raise RejectedError(path, "there is no such file or folder", remedy="check the path")
    return path.absolute()


def _every_file(path: Path, *, but: Path) -> Any:
    """How files are read: all of them, links refused; ``but`` is the signature, if it is inside."""
    inside = [but] if but.is_relative_to(path) else []
    config = _library("model_signing.hashing").Config()
    return config.set_ignored_paths(paths=inside, ignore_git_paths=False)


def _give_key(config: Any, private_key: Path, passphrase: KeySource | None) -> None:
    """Let a configuration sign with a key, of which nobody else may know."""
    data = read_whole(private_key, limit=_LARGEST_KEY)
    if os.name == "posix" and private_key.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise RejectedError(
            private_key,
            "others than its owner can read this private key",
            remedy=f"chmod 600 {private_key}, and make a new key if somebody may have read it",
        )
    locked = b"ENCRYPTED" in data
    if locked and passphrase is None:
        raise RejectedError(
            private_key, "it is encrypted", remedy="give --passphrase-file or --ask-passphrase"
        )
    # Bytes, though the library's own types say text: with text it fails.
    password = passphrase.passphrase() if locked and passphrase is not None else None
    try:
        config.use_elliptic_key_signer(private_key=private_key, password=password)
    except (ValueError, AttributeError) as error:
        raise RejectedError(
            private_key,
            f"it holds no private elliptic key that opens ({_sentence(error)})",
            remedy="give the PEM file of a P-256, P-384 or P-521 key and its passphrase",
        ) from None


def _differences(error: ValueError, signature: Path) -> tuple[str, ...]:
    """What the library found to differ, without its digests."""
    text = str(error)
    if text.startswith("Key mismatch"):
        return ("the signature was made by another key",)
    if text.startswith("Cannot use"):
        return (_fault(error),)
    if not text.startswith("Signature mismatch"):
        raise _no_signature(signature, error) from None
    found = [f"{name}: changed since it was signed" for name in _CHANGED.findall(text)]
    for pattern, what in ((_EXTRA, "is there, and was not signed"), (_MISSING, "is missing")):
        found += [f"{names}: {what}" for names in pattern.findall(text)]
    return tuple(found or [_sentence(error)])


def _fault(error: ValueError) -> str:
    """What the library found in the folder that can't be signed."""
    found = _UNSIGNABLE.match(str(error))
    return _sentence(error) if found is None else f"{found[1]} is a link, or no regular file"


def _no_signature(signature: Path, error: Exception) -> RejectedError:
    return RejectedError(
        signature,
        f"it is no signature that can be read ({_sentence(error)})",
        remedy="give the file that mds-ckpt sign or model_signing wrote",
    )


def _sentence(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(". ")[:300] or type(error).__name__


def _library(name: str) -> Any:
    """A module of the extra ``[signing]``, imported when something is signed."""
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"signatures need model-signing: pip install 'mds-ckpt[signing]' ({error})"
        ) from error

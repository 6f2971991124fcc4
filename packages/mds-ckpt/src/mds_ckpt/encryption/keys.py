"""Wrap a folder's data key for those who may open it, and unwrap it with what they have.

Three ways: age recipients (X25519), a passphrase (scrypt), and a command, behind which a key
service stands. What opens a folder is named by where it lies, never by itself, so no secret stands
in arguments, messages or pickles.
"""

import base64
import getpass
import os
import re
import secrets
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# The same file lies in two packages.
from ..errors import SealedError  # noqa: TID252
from .library import library

__all__ = ["KeySource", "new_identity", "read_recipients", "recipients_of", "unwrap", "wrap"]

DATA_KEY_SIZE = 32
AGE, PASSPHRASE, COMMAND = "age", "scrypt", "command"
_LINE = re.compile(rb"mds-data-key/1 ([0-9a-f-]{36}) ([0-9a-f]{64})\n")
_PURPOSE = b"mds-encryption/1 key\0"
_SCRYPT_LOG_N = 17
"""128 MiB and a third of a second for each guess."""
_SCRYPT_RANGE = range(10, 19)
"""The largest takes 256 MiB; more would let a hostile folder fill the memory."""
_LARGEST_FILE = 2**20
_COMMAND_SECONDS = 300
_NAMES = {AGE: "age identities", PASSPHRASE: "a passphrase", COMMAND: "a key command"}


@dataclass(frozen=True, kw_only=True, slots=True)
class KeySource:
    """Where the key of an encrypted folder comes from. Holds no secret itself."""

    identity: str | os.PathLike[str] | None = None
    """A file of age identities, as age-keygen writes it."""
    identity_variable: str | None = None
    """Name of an environment variable that holds the path of such a file."""
    passphrase_file: str | os.PathLike[str] | None = None
    """A file with the passphrase on its only line."""
    passphrase_variable: str | None = None
    """Name of an environment variable that holds the passphrase."""
    key_command: str | None = None
    """Program and arguments, split as a shell would, run without one; ``wrap`` or ``unwrap`` is
    added. It reads the key on its standard input and writes the other form on its output."""
    ask: bool = False
    """Ask for the passphrase at the terminal."""

    def __post_init__(self) -> None:
        if not any(getattr(self, name) for name in self.__slots__):
            raise ValueError("a key source names no key: give an identity, passphrase or command")

    @property
    def has_passphrase(self) -> bool:
        """Whether a passphrase is at hand."""
        return bool(self.passphrase_file or self.passphrase_variable or self.ask)

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of wrapped keys that this can open."""
        found = {AGE} if self.identity or self.identity_variable else set()
        found |= {PASSPHRASE} if self.has_passphrase else set()
        return frozenset(found | ({COMMAND} if self.key_command else set()))

    def identity_path(self) -> Path:
        """The file of identities."""
        if self.identity is not None:
            return Path(self.identity)
        return Path(_variable(self.identity_variable or ""))

    def passphrase(self, *, repeat: bool = False) -> bytes:
        """The passphrase; ``repeat`` asks twice, where it is asked for."""
        if self.passphrase_file is not None:
            text = _read_text(Path(self.passphrase_file)).removesuffix("\n").removesuffix("\r")
            where = str(self.passphrase_file)
        elif self.passphrase_variable is not None:
            text, where = _variable(self.passphrase_variable), f"${self.passphrase_variable}"
        else:
            text, where = getpass.getpass("Passphrase: "), "the terminal"
            if repeat and getpass.getpass("The same again: ") != text:
                raise SealedError(where, "gave two different passphrases", remedy="try again")
        if not text or "\n" in text:
            raise SealedError(
                where, "holds no passphrase, or more than one line", remedy="put it on one line"
            )
        return text.encode()


@dataclass(frozen=True, slots=True)
class _Wrapped:
    """A wrapped key: what the header says of it, and a file beside the header, if it has one."""

    record: Mapping[str, Any]
    content: bytes | None = field(default=None, repr=False)


def wrap(
    data_key: bytes, *, folder: str, recipients: Sequence[str] = (), source: KeySource | None = None
) -> list[_Wrapped]:
    """Wrap a data key in every way that is asked for.

    Args:
        data_key: [32] the key.
        folder: Identity of the folder, bound to the key.
        recipients: Public keys of age (``age1...``).
        source: Its passphrase and its command are used, its identity is not.

    Raises:
        SealedError: Nobody could open it, or a recipient or the command is no good.
    """
    line = f"mds-data-key/1 {folder} {data_key.hex()}\n".encode()
    found = []
    if recipients:
        found.append(_Wrapped({"kind": AGE}, _wrap_age(line, recipients)))
    if source is not None and source.has_passphrase:
        found.append(_Wrapped(_wrap_passphrase(line, folder, source)))
    if source is not None and source.key_command:
        sealed = _run(source.key_command, "wrap", line)
        found.append(_Wrapped({"kind": COMMAND, "sealed": _text(sealed)}))
    if not found:
        raise SealedError(
            folder,
            "nobody could open it",
            remedy="name a recipient, a passphrase or a key command",
        )
    return found


def unwrap(
    wrapped: Sequence[Mapping[str, Any]],
    *,
    folder: str,
    source: KeySource,
    read_file: Callable[[str], bytes],
    name: str,
) -> bytes:
    """The data key of a folder.

    Args:
        wrapped: The keys that its header lists.
        folder: Identity of the folder.
        source: What opens one of them.
        read_file: Gives a small file of the folder.
        name: How messages call the folder.

    Raises:
        SealedError: Nothing that was given opens any of them.
    """
    offered = [record for record in wrapped if record["kind"] in source.kinds]
    if not offered:
        known = " or ".join(sorted({_NAMES[record["kind"]] for record in wrapped}))
        raise SealedError(name, f"opens by {known}, and that was not given", remedy="give its key")
    for record in offered:
        line = _opened(record, folder=folder, source=source, read_file=read_file)
        matched = _LINE.fullmatch(line or b"")
        if matched and matched[1].decode() == folder:
            return bytes.fromhex(matched[2].decode())
    given = " and ".join(sorted(_NAMES[kind] for kind in source.kinds))
    raise SealedError(
        name, f"does not open with the key that was given ({given})", remedy="give the right key"
    )


def _opened(
    record: Mapping[str, Any],
    *,
    folder: str,
    source: KeySource,
    read_file: Callable[[str], bytes],
) -> bytes | None:
    """The line that holds the data key, or None if this key does not open it."""
    if record["kind"] == AGE:
        return _unwrap_age(read_file(record["file"]), source.identity_path())
    if record["kind"] == COMMAND:
        return _run(str(source.key_command), "unwrap", _bytes(record, "sealed"))
    return _unwrap_passphrase(record, folder, source)


def _wrap_age(line: bytes, recipients: Sequence[str]) -> bytes:
    pyrage = library("pyrage")
    keys = []
    for text in recipients:
        try:
            keys.append(pyrage.x25519.Recipient.from_str(text))
        except pyrage.RecipientError as error:
            raise SealedError(
                text[:80], f"is no age recipient ({error})", remedy="give a key such as age1..."
            ) from None
    return bytes(pyrage.encrypt(line, keys, armored=True))


def _identities(path: Path) -> list[Any]:
    pyrage = library("pyrage")
    lines = [line.strip() for line in _read_text(path).splitlines()]
    texts = [line for line in lines if line and not line.startswith("#")]
    try:
        identities = [pyrage.x25519.Identity.from_str(text) for text in texts]
    except pyrage.IdentityError:
        identities = []
    if not identities:
        raise SealedError(
            str(path),
            "holds no age identity (a line AGE-SECRET-KEY-1...)",
            remedy="give the file that age-keygen or --new-identity wrote",
        )
    return identities


def recipients_of(source: KeySource) -> list[str]:
    """The recipients that belong to a source's identities; none if it names no identity."""
    if AGE not in source.kinds:
        return []
    return [str(each.to_public()) for each in _identities(source.identity_path())]


def _unwrap_age(content: bytes, path: Path) -> bytes | None:
    pyrage = library("pyrage")
    try:
        return bytes(pyrage.decrypt(content, _identities(path)))
    except pyrage.DecryptError:
        return None


def _derived(passphrase: bytes, salt: bytes, log_n: int) -> Any:
    scrypt = library("cryptography.hazmat.primitives.kdf.scrypt").Scrypt
    key = scrypt(salt=salt, length=32, n=2**log_n, r=8, p=1).derive(passphrase)
    return library("cryptography.hazmat.primitives.ciphers.aead").AESGCM(key)


def _wrap_passphrase(line: bytes, folder: str, source: KeySource) -> Mapping[str, Any]:
    salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
    cipher = _derived(source.passphrase(repeat=True), salt, _SCRYPT_LOG_N)
    sealed = bytes(cipher.encrypt(nonce, line, _PURPOSE + folder.encode()))
    return {
        "kind": PASSPHRASE,
        "log_n": _SCRYPT_LOG_N,
        "salt": _text(salt),
        "nonce": _text(nonce),
        "sealed": _text(sealed),
    }


def _unwrap_passphrase(record: Mapping[str, Any], folder: str, source: KeySource) -> bytes | None:
    refused = library("cryptography.exceptions").InvalidTag
    log_n = record.get("log_n")
    salt, nonce, sealed = (_bytes(record, member) for member in ("salt", "nonce", "sealed"))
    if type(log_n) is not int or log_n not in _SCRYPT_RANGE or (len(salt), len(nonce)) != (16, 12):
        raise SealedError(folder, "its passphrase record is damaged", remedy="restore it")
    cipher = _derived(source.passphrase(), salt, log_n)
    try:
        return bytes(cipher.decrypt(nonce, sealed, _PURPOSE + folder.encode()))
    except refused:
        return None


def _run(command: str, word: str, data: bytes) -> bytes:
    """Run a key command; the key goes through pipes only."""
    try:
        argv = [*shlex.split(command), word]
        done = subprocess.run(
            argv, input=data, stdout=subprocess.PIPE, timeout=_COMMAND_SECONDS, check=False
        )
    except (OSError, ValueError) as error:
        raise SealedError(command, f"can't be run ({error})", remedy="give a program") from None
    except subprocess.TimeoutExpired:
        seconds = f"did not end within {_COMMAND_SECONDS} s"
        raise SealedError(command, seconds, remedy="look at the key service") from None
    if done.returncode or not 0 < len(done.stdout) <= _LARGEST_FILE:
        what = f"ended with {done.returncode}" if done.returncode else "wrote no key"
        raise SealedError(f"{command} {word}", what, remedy="look at what it said above")
    return done.stdout


def new_identity(path: Path) -> str:
    """Write a new age identity to a file that only its owner can read; its recipient.

    Raises:
        FileExistsError: There is such a file.
    """
    identity = library("pyrage").x25519.Identity.generate()
    recipient = str(identity.to_public())
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w") as file:
        file.write(f"# public key: {recipient}\n{identity}\n")
        file.flush()
        os.fsync(file.fileno())
    _keep_name(path)
    return recipient


def _keep_name(path: Path) -> None:
    """Force a new file's name to the disk: with a lost key goes what was encrypted for it."""
    if os.name == "nt":  # pragma: no cover - there is no such call
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_recipients(path: Path) -> list[str]:
    """The recipients of a file: one a line, ``#`` begins a comment."""
    lines = [line.strip() for line in _read_text(path).splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


def _read_text(path: Path) -> str:
    with path.open("rb") as file:
        data = file.read(_LARGEST_FILE + 1)
    try:
        if len(data) > _LARGEST_FILE:
            raise ValueError("it is too large")
        return data.decode()
    except ValueError:
        raise SealedError(str(path), "is no small text file", remedy="give the right one") from None


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        raise SealedError(f"${name}", "is not set", remedy="set the environment variable")
    return value


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(record: Mapping[str, Any], member: str) -> bytes:
    try:
        return base64.b64decode(record[member], validate=True)
    except (KeyError, TypeError, ValueError):
        raise SealedError(f"key {member}", "is damaged", remedy="restore the manifest") from None

"""Find and replace private data in text: addresses, numbers of persons, keys and passwords."""

from mds_data.privacy.detection import AllowList, find
from mds_data.privacy.findings import KINDS, Finding, Kind
from mds_data.privacy.replacement import MODES, Mode, Redactor, redact
from mds_data.privacy.stream import redact_stream

__all__ = [
    "KINDS",
    "MODES",
    "AllowList",
    "Finding",
    "Kind",
    "Mode",
    "Redactor",
    "find",
    "redact",
    "redact_stream",
]

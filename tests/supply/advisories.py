"""Looks every locked package up among the known vulnerabilities: by pip-audit, at PyPI.

    python tests/supply/advisories.py

Exit code 0: looked up, none known. 1: some are known, or a package could not be looked up. 4: PyPI
can't be reached, so nothing was looked up; pip-audit would say of each package that it does not
exist.
"""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from urllib.error import URLError

from lock import LOCK

SERVICE = "https://pypi.org/pypi/pip/json"
SECONDS = 15


def is_reachable(url: str) -> bool:
    """Whether the service answers."""
    try:
        with urllib.request.urlopen(url, timeout=SECONDS):
            return True
    except (URLError, TimeoutError, ConnectionError):
        return False


def main(service: str = SERVICE) -> int:
    """Look all of the lock up."""
    if not is_reachable(service):
        sys.stderr.write(
            f"nothing was looked up: {service} can't be reached; run this where the network is\n"
        )
        return 4
    # Strict: an audit that could look something not up is no pass.
    command = ["pip-audit", "--strict", "--no-deps", "--disable-pip", "-r", str(LOCK)]
    return subprocess.run(command, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())

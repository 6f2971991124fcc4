"""``python -m mds_data`` is the command ``mds-data``."""

import sys

from mds_data.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""`python -m mds_train` is `mds-train`."""

import sys

from mds_train.cli import main

if __name__ == "__main__":
    sys.exit(main())

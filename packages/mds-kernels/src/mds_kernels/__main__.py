"""``python -m mds_kernels`` is ``mds-kernels``."""

import sys

from mds_kernels.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""``python -m mds_ckpt``."""

import sys

from mds_ckpt.cli import main

sys.exit(main())

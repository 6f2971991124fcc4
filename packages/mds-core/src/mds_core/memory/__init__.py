"""What is kept between the forward and the backward pass, and where."""

from mds_core.memory.again import again
from mds_core.memory.host import on_host

__all__ = ["again", "on_host"]

"""Full attention for one token: the cache written in place, and attention over what it holds."""

from pallas_kernels.attend.host import Attended, Placed, attend, place, supported
from pallas_kernels.attend.tuning import Cut

__all__ = ["Attended", "Cut", "Placed", "attend", "place", "supported"]

"""The gated delta rule over a window of drafted tokens: a look that changes nothing, and a fold of those to keep."""

from pallas_kernels.delta_step.tuning import Tiles
from pallas_kernels.delta_window.host import Kept, WindowOutput, delta_window_fold, delta_window_look, supported

__all__ = ["Kept", "Tiles", "WindowOutput", "delta_window_fold", "delta_window_look", "supported"]

"""Makes `render_kit`, the helpers of these tests, and the random specs of the plan's tests importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "plan")]

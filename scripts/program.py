"""Program that the scripts run: STERLING is the binary (target/release/sterling)."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STERLING = os.environ.get("STERLING", str(ROOT / "target/release/sterling"))

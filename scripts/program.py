"""The program that the scripts run: STERLING names the binary (default target/release/sterling)."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STERLING = os.environ.get("STERLING", str(ROOT / "target/release/sterling"))

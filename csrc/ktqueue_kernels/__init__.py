"""What a worker of ktqueue needs beside Python: its compiled CPU kernels, and the built-in model's file."""

from pathlib import Path

__version__ = "0.1.0"
__all__ = ["DEMO_MODEL", "__version__"]

DEMO_MODEL = Path(__file__).with_name("tale-teller-q4_0.gguf")

"""Lines of each package and bytes of the wheels: `python -m release.size`."""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from zipfile import ZipFile

from rich.console import Console
from rich.table import Table

from benchmarks.machine import ROOT
from ktqueue.core.units import format_bytes

KINDS = {".py", ".cpp", ".h", ".lua", ".yaml", ".md"}


def main() -> None:
    """Print the two tables."""
    console = Console()
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for name in names:
        path = Path(name)
        if path.suffix in KINDS and (ROOT / path).exists():
            group = "/".join(path.parts[:2]) if path.parts[0] == "ktqueue" and len(path.parts) > 2 else path.parts[0]
            lines[group] += len((ROOT / path).read_text().splitlines())
            files[group] += 1
    table = Table("package", "files", "lines", title="Lines")
    for group, count in sorted(lines.items()):
        table.add_row(group, str(files[group]), str(count))
    table.add_row("all", str(files.total()), str(lines.total()))
    console.print(table)
    with tempfile.TemporaryDirectory() as folder:
        sources = [str(ROOT), str(ROOT / "csrc")]
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*command, "--wheel-dir", folder, *sources], check=True)
        for wheel in sorted(Path(folder).glob("*.whl")):
            packed: Counter[str] = Counter()
            with ZipFile(wheel) as archive:
                for entry in archive.infolist():
                    packed["/".join(Path(entry.filename).parts[:2])] += entry.compress_size
            largest = Table("in it", "compressed", title=f"{wheel.name}: {format_bytes(wheel.stat().st_size)}")
            for name, size in packed.most_common(12):
                largest.add_row(name, format_bytes(size))
            console.print(largest)


if __name__ == "__main__":
    main()

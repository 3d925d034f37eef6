"""Get what draws curves and is of other projects from npm, checked against the hash of its package.

    python docs/make_vendored.py

Needs `npm`. Reads package, version and `integrity` of `vendored.toml` beside the files, and
writes the files there and their SHA-256 again. For another version, change the three first.
"""

from __future__ import annotations

import base64
import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from pathlib import Path

CHARTS = Path(__file__).resolve().parent.parent / "src" / "instep" / "report" / "charts"
FROM = {
    "uplot.js": "package/dist/uPlot.iife.min.js",
    "uplot.css": "package/dist/uPlot.min.css",
    "uplot.LICENSE": "package/LICENSE",
}


def main() -> int:
    """Write the files; 1 if the package is not the one whose hash is written down."""
    note = CHARTS / "vendored.toml"
    known = tomllib.loads(note.read_text("utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        words = ["npm", "pack", f"{known['package']}@{known['version']}", "--silent"]
        subprocess.run(words, cwd=folder, check=True)
        (package,) = Path(folder).glob("*.tgz")
        digest = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
        if f"sha512-{digest}" != known["integrity"]:
            print(f"{package.name} has sha512-{digest}, not {known['integrity']}", file=sys.stderr)
            return 1
        text = note.read_text("utf-8")
        with tarfile.open(package) as archive:
            for name, path in FROM.items():
                member = archive.extractfile(path)
                data = member.read() if member else b""
                (CHARTS / name).write_bytes(data)
                sha256 = hashlib.sha256(data).hexdigest()
                text = re.sub(
                    rf'^"{re.escape(name)}" = .*$', f'"{name}" = "{sha256}"', text, flags=re.M
                )
    note.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

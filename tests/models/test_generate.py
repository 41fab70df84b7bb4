"""models/generate writes the files that are kept in models/."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODELS = ROOT / "models"


def test_generated_files_are_the_ones_kept(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "models.generate", "--into", str(tmp_path)], cwd=ROOT, check=True)
    written = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file())
    kept = sorted(
        path.relative_to(MODELS)
        for path in MODELS.glob("*/*.prototxt")
        if path.parent.name != "lenet" and path.name != "solver.prototxt"
    )
    assert written == kept and len(kept) == 24
    for path in kept:
        assert (tmp_path / path).read_bytes() == (MODELS / path).read_bytes(), (
            f"models/{path} is not what the generator writes: run `python -m models.generate`"
        )

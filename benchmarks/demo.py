"""What `make demo` costs: seconds from a fresh clone to its result, and megabytes installed.

    python benchmarks/demo.py [--short] [--out benchmarks/results/demo.json]

The repository is cloned into a temporary folder, so only what is committed
counts. pip has no cache.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from record import parser_of, write

ROOT = Path(__file__).parent.parent


def main() -> None:
    parser = parser_of(__doc__, "demo")
    parser.add_argument("--short", action="store_true", help="one seed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "throughtime"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        started = time.perf_counter()
        flags = ["DEMO=--short"] if options.short else []
        without_cache = os.environ | {"PIP_NO_CACHE_DIR": "1"}
        subprocess.run(["make", "demo", *flags], cwd=clone, env=without_cache, check=True)
        seconds = time.perf_counter() - started
        files = [path for path in (clone / ".venv-demo").rglob("*") if not path.is_symlink()]
        megabytes = sum(path.stat().st_size for path in files if path.is_file()) / 1e6
        assert (clone / "runs" / "demo" / "demo.json").is_file()
    print(f"{seconds:.0f} s, {megabytes:,.0f} MB installed")
    write(options.out, {"seconds": round(seconds), "megabytes": round(megabytes)})


if __name__ == "__main__":
    main()

"""How much memory the process has held at most."""

import sys


def peak_memory() -> int | None:
    """Bytes of resident memory at its highest; `None` where the system does not tell (Windows)."""
    if sys.platform == "win32":
        return None
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

"""Describe where and when a result was measured."""

import datetime
import os
import platform


def described():
    """Date, versions, devices and cores, to be put first in a result's JSON."""
    import jax

    return {
        "date": datetime.date.today().isoformat(),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "devices": [jax.devices()[0].device_kind, jax.device_count()],
        "cores": os.cpu_count(),
    }

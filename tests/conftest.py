"""Property tests take the time that a loaded machine needs, and the same examples in every run of CI."""

import os

from hypothesis import HealthCheck, settings

settings.register_profile(
    "tpuconv",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
)
settings.load_profile("tpuconv")

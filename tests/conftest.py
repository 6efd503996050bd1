"""What every test shares: exact float32 products on CUDA, and hypothesis without deadlines."""

import os

# MLX's CUDA backend rounds float32 matrix products to TF32 (10 bits) unless told otherwise; comparisons
# with float64 and between batch shapes need all of float32. Read once, when MLX starts.
os.environ.setdefault("MLX_ENABLE_TF32", "0")

from hypothesis import HealthCheck, settings

import dflash  # noqa: F401 (before any `import mlx`: loads the fast BLAS)

# The first example of a shape pays for building a model, so examples have no even duration.
settings.register_profile("dflash", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("dflash")

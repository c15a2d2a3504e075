"""Make two runs of a step agree bit for bit: the options of XLA for this, and errors for choices that may differ.

On CPUs, a compiled program gives the same bits whenever it runs. On GPUs, XLA by default measures kernels and keeps
the fastest, and adds with atomics in the order in which threads arrive. `OPTIONS` turns both off. NCCL's rings and
trees add in a fixed order, but the switches of NVLink do not.

References:
    NVIDIA/nccl issue 1497, about the sums of NVLink SHARP (NVLS).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax

from zerojax.config import Config

FLAG = "xla_gpu_deterministic_ops"
# XLA does not use Triton's products together with FLAG. Without the second option, it tries to where there is no GPU,
# and then cannot compile a plan.
OPTIONS: Mapping[str, Any] = MappingProxyType({FLAG: True, "xla_gpu_enable_triton_gemm": False})
# Further options with which a program would not be deterministic, unless they have these values.
REQUIRED: Mapping[str, Any] = MappingProxyType(
    {
        **OPTIONS,
        "xla_gpu_exclude_nondeterministic_ops": True,
        "xla_gpu_autotune_level": 0,
        "xla_gpu_experimental_deterministic_ops_triton": "DETERMINISTIC_OPS_TRITON_MODE_OFF",
    }
)
SENTENCE = "The step is deterministic: on the same devices, two runs of the same programs agree bit for bit."


def check_choices(config: Config, memory: Any, compiler_options: Any) -> None:
    """Raise a `ValueError` if an option of a deterministic step would be chosen by a measurement, or contradicts it."""
    offload = config.offload
    if offload is not None and offload.update == "auto" and not config.params_on_disk:
        raise ValueError(
            'train_step(deterministic=True) with Offload(update="auto"): where the update runs would be measured in '
            'each run. Give Offload(update="device") or Offload(update="host").'
        )
    if memory == "auto":
        raise ValueError(
            'train_step(deterministic=True, memory="auto"): the memory that JAX may use differs between runs, and with '
            'it the program. Give the bytes, such as memory="72 GB".'
        )
    for name, value in ({} if compiler_options == "auto" else compiler_options).items():
        if name in REQUIRED and value != REQUIRED[name]:
            raise ValueError(
                f"train_step(deterministic=True, compiler_options={{{name!r}: {value!r}}}): with this option, runs may "
                f"differ. Leave it out, or give {REQUIRED[name]!r}."
            )


def options_of(config: Config) -> Mapping[str, Any]:
    """Return the options of XLA for deterministic programs: none on CPUs, or if `XLA_FLAGS` has set them.

    Raises:
        ValueError: If parameters are on disk, and `XLA_FLAGS` has not set the options.
    """
    if not is_gpu(config) or f"--{FLAG}=true" in os.environ.get("XLA_FLAGS", "").split():
        return {}
    if config.params_on_disk:
        raise ValueError(
            f'deterministic=True with Offload(params="disk"): a step is many programs, which take no options. Set the '
            f"option for all programs before JAX starts: XLA_FLAGS=--{FLAG}=true."
        )
    return OPTIONS


def check_devices(config: Config) -> None:
    """Raise a `ValueError` if programs on the devices of this process would not be deterministic."""
    options_of(config)
    if not is_gpu(config):
        return
    if jax.config.values.get("jax_enable_pgle"):
        raise ValueError(
            "deterministic=True with the option jax_enable_pgle: after some steps, JAX compiles the program again with "
            "measured times. Turn the option off."
        )
    algorithms = os.environ.get("NCCL_ALGO", "")
    named = algorithms and not algorithms.startswith("^") and "NVLS" not in algorithms.upper()
    if config.mesh.size > 1 and os.environ.get("NCCL_NVLS_ENABLE") != "0" and not named:
        raise ValueError(
            "deterministic=True on several GPUs: NCCL may let the switches of NVLink add (NVLS), in an order that "
            "changes from call to call. Set NCCL_NVLS_ENABLE=0 before JAX starts."
        )


def is_gpu(config: Config) -> bool:
    return config.mesh.devices.flat[0].platform in ("cuda", "gpu", "rocm")

"""The table of an estimate: bytes per device and bytes sent, one row per stage and number of devices."""

from __future__ import annotations

import dataclasses

from zerojax.units import format_bytes

PARTS = ("params", "grads", "master", "opt_state")


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """One stage on a number of devices, in bytes per device.

    Attributes:
        stage: ZeRO stage.
        devices: Data-parallel workers.
        params: Stored parameters.
        grads: Gradients, as `value_and_grad` returns them.
        master: Master weights, where parameters are stored in a narrower type.
        opt_state: State of the wrapped transformation.
        errors: Rounding errors of quantised gradients, which are fed back.
        gathered: At stage 3, parameters gathered at a time, of the layer in use and the prefetched layers. None for a
            number of parameters, whose layers are unknown.
        host: Bytes offloaded to host memory.
        disk: Bytes offloaded to disk.
        sent: Bytes that a device sends in a step. It receives as many.
        across: The part of `sent` in groups of devices of several hosts. None where hosts are not known.
        backward: Gradients during the backward pass. At stages 0 to 2 they are full until they are reduced. With
            several microbatches, their sums are included.
        update: Gradients in the optimizer's type, and as many bytes for the updates.
        activations: One device's rows, and the temporary memory of the plain gradient on these rows. None without a
            loss.
    """

    stage: int
    devices: int
    params: int
    grads: int
    master: int
    opt_state: int
    errors: int
    gathered: int | None
    host: int
    disk: int
    sent: float
    across: float | None
    backward: int
    update: int
    activations: int | None = None

    @property
    def resident(self) -> int:
        """Return bytes on a device between steps: model states without gradients."""
        return self.params + self.master + self.opt_state + self.errors

    @property
    def peak(self) -> int | None:
        """Return the most bytes on a device in a step, or None where activations are not known.

        This is `resident` and the larger of two: gradients, activations and gathered parameters in the backward pass,
        or the update. At stages 1 and 2 it is an upper bound for unrolled layers, whose gradients may be reduced one by
        one. Chunks of an offloaded update are not included.
        """
        if self.activations is None:
            return None
        return self.resident + max(self.backward + self.activations + (self.gathered or 0), self.update)

    @property
    def total(self) -> int:
        """Return bytes of all model states on a device, gradients included, without gathered parameters."""
        return self.resident + self.grads


@dataclasses.dataclass(frozen=True)
class Estimate:
    """One row per stage and number of devices.

    Attributes:
        parameters: Elements of all parameters.
        trained: Elements of trained parameters.
        rows: The rows, in the order of the call.
    """

    parameters: int
    trained: int
    rows: tuple[StageEstimate, ...]

    def __getitem__(self, stage: int) -> StageEstimate:
        """Return the row of a stage, on the first number of devices.

        Raises:
            KeyError: If the estimate does not have this stage.
        """
        return {row.stage: row for row in reversed(self.rows)}[stage]

    def break_even_tokens(self, stage: int, *, link: float, flops: float, recomputed: bool = True) -> float:
        """Return tokens per device and step at which compute takes as long as communication.

        A token costs `6 x parameters` FLOPs, or `8 x` if the forward pass is recomputed. Communication takes
        `sent / link`. With fewer tokens, the link bounds the step even if the two overlap fully.

        Args:
            stage: ZeRO stage.
            link: Bytes per second that a device sends.
            flops: FLOP/s that a device reaches in practice.
            recomputed: Whether activations are recomputed in the backward pass.
        """
        return self[stage].sent / link * flops / ((8 if recomputed else 6) * self.parameters)

    def offload_seconds(self, stage: int, *, link: float, disk: float | None = None) -> float:
        """Return the least time, in seconds, of a step's offloaded update, streamed through the device.

        Offloaded state comes in and goes out once, both at the same time: `bytes / link`. State on disk is read and
        written: `2 x bytes / disk`. The slower of the two decides.

        Args:
            stage: ZeRO stage.
            link: Bytes per second each way between host and device, per device.
            disk: Bytes per second of the disk, per device, reading and writing together.
        """
        row = self[stage]
        seconds = (row.host + row.disk) / link
        return max(seconds, 2 * row.disk / disk) if disk else seconds

    def __str__(self) -> str:
        """Return a table with stages in rows and parts in columns."""
        offloaded = [name for name in ("host", "disk") if any(getattr(row, name) for row in self.rows)]
        peaks = ["activations", "peak"] if any(row.activations is not None for row in self.rows) else []
        hosts = ["across"] if any(row.across is not None for row in self.rows) else []
        errors = ["errors"] if any(row.errors for row in self.rows) else []
        columns = [*PARTS, *errors, "total", "gathered", *peaks, *offloaded, "sent", *hosts]
        lines = [f"{self.parameters:,} parameters; bytes per device"]
        lines.append("stage  devices" + "".join(f"{name:>12s}" for name in columns))
        for row in self.rows:
            cells = "".join(f"{format_bytes(getattr(row, name)):>12s}" for name in columns)
            lines.append(f"{row.stage:5d}  {row.devices:7d}{cells}")
        return "\n".join(lines)

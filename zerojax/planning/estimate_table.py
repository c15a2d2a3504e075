"""The table of an estimate: bytes per device and bytes sent, one row for each stage and number of devices."""

from __future__ import annotations

import dataclasses

from zerojax.units import format_bytes

PARTS = ("params", "grads", "master", "opt_state")


@dataclasses.dataclass(frozen=True)
class StageEstimate:
    """One stage on a number of devices; bytes per device.

    Attributes:
        stage: ZeRO stage.
        devices: Data-parallel workers.
        params: Parameters in storage.
        grads: Gradients, as `value_and_grad` returns them.
        master: Master weights, where parameters are stored in a narrower type.
        opt_state: State of the wrapped transformation.
        errors: Rounding errors of quantised gradients, which are fed back.
        gathered: Stage 3: parameters gathered at a time, of the layer in use and those prefetched;
            None for a count of parameters, which says nothing of layers.
        host: Offloaded to host memory.
        disk: Offloaded to disk.
        sent: What a device sends in a step (and receives as much).
        across: Of this, what goes over groups of devices of several hosts; None where hosts are not known.
        backward: Gradients during the backward pass: at stages 0 to 2 full, until they are reduced
            over the devices; with several microbatches their sums so far, too.
        update: What the optimizer needs: gradients as it sees them, and as much for its updates.
        activations: One device's rows, and the temporary memory of the plain gradient on them;
            None unless the loss was given.
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
        """Return bytes on a device from step to step: model states without gradients."""
        return self.params + self.master + self.opt_state + self.errors

    @property
    def peak(self) -> int | None:
        """Return the most bytes on a device in a step, or None where activations are not known.

        `resident`, and the larger of what the backward pass needs (gradients, activations,
        gathered parameters) and what the update does. At stages 1 and 2 it is an upper bound
        for unrolled layers, whose gradients may be reduced one by one. Chunks of an offloaded
        update are not included.
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
    """Stages side by side.

    Attributes:
        parameters: How many there are, in elements.
        trained: How many of them are trained.
        rows: One for each stage and number of devices, in the order asked for.
    """

    parameters: int
    trained: int
    rows: tuple[StageEstimate, ...]

    def __getitem__(self, stage: int) -> StageEstimate:
        """Return the row of a stage, on the first number of devices.

        Raises:
            KeyError: If it was not asked for.
        """
        return {row.stage: row for row in reversed(self.rows)}[stage]

    def break_even_tokens(self, stage: int, *, link: float, flops: float, recomputed: bool = True) -> float:
        """Return tokens per device and step at which compute takes as long as communication.

        A token costs `6 x parameters` FLOPs, `8 x` where the forward pass is recomputed;
        communication takes `sent / link`. With fewer tokens the step is bound by the link,
        however well the two overlap.

        Args:
            stage: ZeRO stage.
            link: Bytes per second that a device sends.
            flops: FLOP/s that a device reaches in practice.
            recomputed: Whether activations are recomputed in the backward pass.

        Returns:
            Tokens.
        """
        return self[stage].sent / link * flops / ((8 if recomputed else 6) * self.parameters)

    def offload_seconds(self, stage: int, *, link: float, disk: float | None = None) -> float:
        """Return the least time of a step's offloaded update, streamed through the device.

        Offloaded state comes in and goes out once, both ways at once: `bytes / link`; on disk
        it is read and written: `2 x bytes / disk`. The slower of the two decides.

        Args:
            stage: ZeRO stage.
            link: Bytes per second each way between host and device, per device.
            disk: Bytes per second of the disk, per device, reading and writing together.

        Returns:
            Seconds.
        """
        row = self[stage]
        seconds = (row.host + row.disk) / link
        return max(seconds, 2 * row.disk / disk) if disk else seconds

    def __str__(self) -> str:
        """Return a table: stages in rows, parts in columns."""
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

"""What decides where the leaves of a model live."""

from __future__ import annotations

import dataclasses

from zerojax.config.data_mesh import DataMesh


@dataclasses.dataclass(frozen=True)
class LayoutPolicy:
    """The part of a configuration that a layout depends on; it rides in `ZeroState`, so it holds no functions.

    Attributes:
        stage: ZeRO stage, 0 to 3.
        data: Which axes divide the batch and each part of the model states.
        persist_below: A leaf of fewer elements is not sharded by dim.
        stores_compute_dtype: Whether parameters are stored in the type they are computed in.
        params_on_host: Whether sharded parameters are kept in host memory.
    """

    stage: int
    data: DataMesh
    persist_below: int
    stores_compute_dtype: bool = True
    params_on_host: bool = False

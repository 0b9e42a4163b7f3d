"""The device mesh: its five named axes and how a mesh is made. Owns no rule of what lies where."""

import contextlib
import contextvars
import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, PartitionSpec
from pydantic import ValidationError

from shardtrain.errors import ShardingError
from shardtrain.sharding.config import MeshConfig

MESH_AXES = ("pipeline", "replica", "data", "context", "tensor")
"""All axes, slowest links first. A degree of 1 turns a feature off."""

PIPELINE = "pipeline"
"""The axis whose devices are the stages that share out the layers."""

DATA_AXES = ("replica", "data")
"""The axes that share out the samples of a batch."""


def make_mesh(
    *,
    pipeline: int = 1,
    replica: int = 1,
    data: int = -1,
    context: int = 1,
    tensor: int = 1,
    devices: Sequence[jax.Device] | None = None,
) -> Mesh:
    """Makes the mesh that all else is placed on.

    Args:
        pipeline, replica, data, context, tensor: degree of each axis; `data=-1` takes what is left.
        devices: devices to use, all of them; by default every device of the run.

    Returns:
        A mesh with the axes of `MESH_AXES`, all of them Auto: XLA places the communication.

    Raises:
        ShardingError: the degrees do not multiply to the number of devices.

    Example:
        >>> make_mesh(tensor=1).axis_names
        ('pipeline', 'replica', 'data', 'context', 'tensor')
    """
    devices = list(jax.devices() if devices is None else devices)
    try:
        config = MeshConfig(
            pipeline=pipeline, replica=replica, data=data, context=context, tensor=tensor
        )
    except ValidationError as error:
        first = error.errors()[0]
        raise ShardingError(
            first["msg"], where=f"mesh.{first['loc'][0]}", value=str(first["input"])
        ) from None
    sizes = config.degrees(len(devices))
    auto = (AxisType.Auto,) * len(MESH_AXES)
    shape = tuple(sizes[name] for name in MESH_AXES)
    if devices[0].platform == "cpu" or len(devices) == 1:
        # Virtual devices have no topology worth searching; keep their order.
        return Mesh(np.array(devices).reshape(shape), MESH_AXES, axis_types=auto)
    return jax.make_mesh(shape, MESH_AXES, axis_types=auto, devices=devices)


def abstract_mesh(degrees: Mapping[str, int], platform: str = "") -> AbstractMesh:
    """A mesh without devices: enough for shapes and placements.

    Args:
        degrees: of each axis of `MESH_AXES`; what is left out is 1.
        platform: "cpu", "gpu" or "tpu", for code that is traced for such devices; "" = as jax has.
    """
    device = AbstractDevice(platform, None, platform) if platform else None
    return AbstractMesh(
        tuple(degrees.get(axis, 1) for axis in MESH_AXES),
        MESH_AXES,
        axis_types=(AxisType.Auto,) * len(MESH_AXES),
        abstract_device=device,
    )


def data_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """The axes that really share out the samples: those of `DATA_AXES` of degree above 1."""
    return tuple(axis for axis in DATA_AXES if mesh.shape[axis] > 1)


def split_axes(mesh: Mesh | AbstractMesh) -> list[str]:
    """Every axis of degree above 1 with its degree, for the eye: `["data 4", "tensor 2"]`."""
    return [f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1]


_lowers_for: contextvars.ContextVar[str] = contextvars.ContextVar("lowers for", default="")


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """While this is open, every mesh says that its devices are of another platform.

    For programs that are lowered on virtual devices and compiled for others (`plan.elsewhere`).
    """
    token = _lowers_for.set(platform)
    try:
        yield
    finally:
        _lowers_for.reset(token)


def mesh_platform(mesh: Mesh | AbstractMesh) -> str:
    """The devices' platform, "cpu", "gpu" or "tpu"; of a mesh without devices, jax's default."""
    if _lowers_for.get():
        return _lowers_for.get()
    if isinstance(mesh, AbstractMesh):
        device = mesh.abstract_device
        return str(device.platform if device else jax.default_backend())
    return str(mesh.devices.flat[0].platform)


def data_degree(mesh: Mesh | AbstractMesh) -> int:
    """Number of shards that a batch is cut into."""
    return math.prod(mesh.shape[axis] for axis in DATA_AXES)


def mesh_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that split one dim, from its entry in a partition."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def only_axes(spec: PartitionSpec, axes: Collection[str]) -> PartitionSpec:
    """The part of a partition that is over some mesh axes."""
    kept = (tuple(axis for axis in mesh_axes(entry) if axis in axes) for entry in spec)
    return PartitionSpec(*(some or None for some in kept))

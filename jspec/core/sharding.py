"""Programs over a mesh of devices, and the part of each array on a device (Shoeybi et al., arXiv 1909.08053).

Every device runs one program (`jax.shard_map`) in which all shapes are its own. The devices of a group have the same
sequences: each has the whole residual stream, all tokens and all lengths, and so makes the same decisions; heads, the
widths of MLPs and the vocabulary are split. A model adds up the parts of its devices (`sum_over_devices`) and
gathers logits (`gather_last`).

Several groups (data parallelism) have equal weights and sequences, pages and random keys of their own. They never
communicate, so each runs as many rounds as its own sequences need. Arrays of groups are stacked: outside of the
program they have a first axis of groups.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, PyTree

from jspec.core.struct import Leaf, flatten_leaves, map_leaves
from pallas_kernels.parts import add_parts

TENSOR = "tensor"
"""The axis of the mesh for the parts of weights."""
DATA = "data"
"""The axis for groups of sequences."""
_MOST_AXES = 7
"""The most axes of an array of a state: a ring in snapshots."""
WORTH_A_STEP = 3_000_000
"""Bytes that take as long as another step of communication: estimated, with 10 us at 300 GB/s."""

T = TypeVar("T")


class Device(Protocol):
    """A device of JAX."""

    @property
    def platform(self) -> str:
        """Such as "gpu"."""
        ...


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a model; static, hashable by value.

    mesh: has the axis "tensor", and may have the axis "data"; weights are equal along all but the first.
    draft: whether the draft is split like the target. Otherwise each device has all of it, and of its caches.
    """

    mesh: Mesh
    draft: bool = False

    @property
    def size(self) -> int:
        """Devices that share the weights."""
        return self.mesh.shape[TENSOR]

    @property
    def groups(self) -> int:
        """Groups of such devices, each with its own sequences."""
        return self.mesh.shape.get(DATA, 1)

    def __str__(self) -> str:
        total, groups = self.mesh.size, self.groups
        return f"{total} devices" if groups == 1 else f"{total} devices (data={groups}, tensor={self.size})"

    @property
    def devices(self) -> list[Device]:
        """The devices of this process."""
        return [device for device in self.mesh.devices.flat if device.process_index == jax.process_index()]

    @property
    def processes(self) -> list[int]:
        """The processes with some of the devices, ascending."""
        return sorted({device.process_index for device in self.mesh.devices.flat})

    @property
    def everywhere(self) -> NamedSharding:
        """The sharding of an array with a copy on each device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def group(self, index: int) -> "Placement":
        """The devices of one group alone."""
        names = self.mesh.axis_names
        if DATA not in names:
            return self
        devices = np.take(self.mesh.devices, index, axis=names.index(DATA))
        return dataclasses.replace(self, mesh=_mesh(devices, [name for name in names if name != DATA]))

    def restrict(self, params: T) -> T:
        """The weights on these devices alone, without a copy of arrays already here.

        Where none of the devices belongs to this process, the shapes of the weights.
        """
        devices, here = self.mesh.devices.flatten().tolist(), self.devices

        def take(leaf: Array) -> Any:
            if not here:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            if not leaf.sharding.device_set.issuperset(devices):
                return self.copy(leaf)
            part = leaf.sharding.shard_shape(leaf.shape)
            axis = next((axis for axis, size in enumerate(part) if size < leaf.shape[axis]), None)
            shards = {shard.device: shard.data for shard in leaf.addressable_shards}
            sharding = NamedSharding(self.mesh, _spec(axis))
            return jax.make_array_from_single_device_arrays(leaf.shape, sharding, [shards[device] for device in here])

        return jax.tree.map(take, params)

    def specs(self, tree: PyTree, *, stacked: bool = False) -> PyTree:
        """The split of each leaf of `Params`, of a state, or of anything. stacked: they have a first axis of groups."""

        def spec(options: Leaf, array: Array) -> PartitionSpec:
            return _spec(self.axis_of(options, array.shape[stacked:]), stacked=stacked)

        return map_leaves(spec, tree)

    def shardings(self, tree: PyTree) -> PyTree:
        """The same as `NamedSharding`s."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), self.specs(tree))

    def local(self, shapes: PyTree) -> PyTree:
        """The part of one device of a model's weights, or of a state, as `jax.ShapeDtypeStruct`s."""

        def shape(options: Leaf, whole: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            axis, dims = self.axis_of(options, whole.shape), list(whole.shape)
            if axis is not None:
                dims[axis] //= self.size
            return jax.ShapeDtypeStruct(dims, whole.dtype)

        return map_leaves(shape, shapes)

    def put(self, options: Leaf, parts: Sequence[np.ndarray]) -> Array:
        """Weights side by side on their last axis, as one array over the devices.

        options: of the field that gets them. If it is split, each device has its share of every part, next to each
          other. So a device's columns of a fused weight are those of its own heads.
        """
        # One row is the scales of whole columns, of a quantized matrix whose rows are split.
        if_split = dataclasses.replace(options, if_many=True)
        axis = None if options.split is None else if_split.axis(_joined_shape(parts), self.size)
        if axis is None:
            return self.copy(side_by_side(parts))
        # The devices of each share.
        shape, devices_of = _joined_shape(parts), {}
        sharding = NamedSharding(self.mesh, _spec(axis))
        for device, index in sharding.addressable_devices_indices_map(shape).items():
            assert index is not None
            devices_of.setdefault((index[axis].start or 0) * self.size // shape[axis], []).append(device)
        arrays = []
        for share, devices in devices_of.items():
            sizes = [part.shape[axis] // self.size for part in parts]
            index = [(*[slice(None)] * axis, slice(share * size, (share + 1) * size)) for size in sizes]
            columns = side_by_side([part[at] for part, at in zip(parts, index, strict=True)])
            # Waiting bounds the memory of the host: it has one share at a time.
            arrays += jax.block_until_ready([jax.device_put(columns, device) for device in devices])
        return jax.make_array_from_single_device_arrays(shape, sharding, arrays)

    @property
    def spans_processes(self) -> bool:
        """Whether some of the devices belong to another process."""
        return not self.everywhere.is_fully_addressable

    def copy(self, array: Array | np.ndarray, axis: int | None = None) -> Array:
        """An array that each process has, on these devices. axis: the split one; None: each device has all."""
        sharding = NamedSharding(self.mesh, _spec(axis))
        if not self.spans_processes:
            return jax.device_put(array if isinstance(array, jax.Array) else np.asarray(array), sharding)
        # Each process copies its own parts; `device_put` would first compare the arrays of all processes.
        whole = np.asarray(array)
        return jax.make_array_from_callback(whole.shape, sharding, lambda index: np.asarray(whole[index]))

    def arrange(self, options: Leaf, parts: Sequence[Array]) -> list[Array]:
        """Weights whose concatenation on the last axis is the array of `put`, from the parts of that array."""
        if len(parts) == 1 or options.axis(_joined_shape(parts), self.size) != parts[0].ndim - 1:
            return list(parts)
        shares = [jnp.split(part, self.size, axis=-1) for part in parts]
        return [share[device] for device in range(self.size) for share in shares]

    def gather(self, array: Array | np.ndarray) -> Array:
        """An array on these devices, for a program over them: itself, or split on an axis where possible."""
        if isinstance(array, Tracer):
            return array
        if isinstance(array, jax.Array):
            sharding = array.sharding
            # A program takes arrays of one order of devices.
            if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
                if sharding.mesh.devices.flatten().tolist() == self.mesh.devices.flatten().tolist():
                    return without_types(array)
            if not sharding.is_fully_addressable and not sharding.is_fully_replicated:
                raise ValueError(
                    f"arrays: one of shape {array.shape} is on devices of several processes, but not on those of the "
                    f"model in their order: it has the sharding {sharding}, and the model the mesh {self.mesh}"
                )
        axis = next((axis for axis, size in enumerate(array.shape) if size and size % self.size == 0), None)
        return self.copy(array, axis)

    def spread(self, params: T) -> T:
        """Within a program: weights, each split as declared at its field."""
        return jax.tree.map(lax.with_sharding_constraint, params, self.shardings(params))

    def complete(self, params: T) -> T:
        """The weights, with a copy of unsplit ones on all devices."""

        def place(leaf: Array) -> Array:
            placed = isinstance(leaf.sharding, NamedSharding) and leaf.sharding.mesh == self.mesh
            return leaf if placed else self.copy(leaf)

        return jax.tree.map(place, params)

    def place(self, options: Leaf, matrix: T) -> T:
        """A quantized matrix, split as the field with these options is."""

        def put(part: Leaf, array: Array) -> Array:
            axis = dataclasses.replace(options, if_many=part.if_many).axis(array.shape, self.size)
            return jax.device_put(array, NamedSharding(self.mesh, _spec(axis)))

        return map_leaves(put, matrix)

    def axis_of(self, options: Leaf, shape: Sequence[int]) -> int | None:
        """The split axis of a leaf of `Params` or of a state, counted from the first; None: it is whole."""
        return None if options.draft and not self.draft else options.axis(shape, self.size)


def side_by_side(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Arrays next to each other on their last axis, in the layout of the first: JAX transposes faster than NumPy."""
    if len(parts) == 1:
        return np.asarray(parts[0])
    joined = np.empty_like(parts[0], shape=_joined_shape(parts))
    np.concatenate(parts, axis=-1, out=joined)
    return joined


def _joined_shape(parts: Sequence[Any]) -> tuple[int, ...]:
    """The shape of arrays next to each other on their last axis."""
    return (*parts[0].shape[:-1], sum(part.shape[-1] for part in parts))


def without_types(array: Array) -> Array:
    """An array whose sharding is not part of its type, as programs here decide themselves how values are split."""
    sharding = array.sharding
    if not isinstance(sharding, NamedSharding) or all(kind == AxisType.Auto for kind in sharding.mesh.axis_types):
        return array
    assert isinstance(sharding.mesh, Mesh)
    mesh = _mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return jax.device_put(array, NamedSharding(mesh, sharding.spec))


def refuse_types(name: str, array: Array) -> None:
    """Raises ValueError if a traced array has its sharding in its type. name: of the array, for the message."""
    sharding = jax.typeof(array).sharding
    if any(kind == AxisType.Explicit for kind in sharding.mesh.axis_types):
        raise ValueError(
            f"{name}: is traced with the type {jax.typeof(array)}; inside jax.jit the axes of its mesh must be of "
            "jax.sharding.AxisType.Auto, outside of it they may be of any type"
        )


def _spec(axis: int | None, *, stacked: bool = False) -> PartitionSpec:
    """Splits an axis over the devices of a group. stacked: after an axis of groups."""
    first = [DATA] if stacked else []
    return PartitionSpec(*first) if axis is None else PartitionSpec(*first, *[None] * axis, TENSOR)


def over(placement: Placement | None, function: Callable[..., T], *args: PyTree, shared: Collection[int] = (0,)) -> T:
    """`function(*args)` on each device with its own part of the arguments. placement None: the call itself.

    Of the results, those whose fields say so are split (`jspec.core.struct.leaf`), and the others are equal on all
    devices of a group.

    shared: which arguments are equal for all groups, such as weights, the first one. If there are several groups, the
      others and the results are stacked.
    """
    if placement is None:
        return function(*args)
    structures, axes = [], (None, *range(_MOST_AXES))
    stacks = placement.groups > 1
    stacked = [stacks and index not in shared for index in range(len(args))]

    def local(*args: PyTree) -> tuple[tuple[Array, ...], ...]:
        """The results, grouped by their split axis, known once this is traced."""
        parts = (
            jax.tree.map(lambda x: jnp.squeeze(x, 0), arg) if is_stacked else arg
            for arg, is_stacked in zip(args, stacked, strict=True)
        )
        results, structure = flatten_leaves(function(*parts))
        split = [placement.axis_of(options, leaf.shape) for options, leaf in results]
        structures.append((structure, split))
        leaves = [jnp.expand_dims(leaf, 0) if stacks else leaf for _, leaf in results]
        return tuple(tuple(leaf for leaf, at in zip(leaves, split, strict=True) if at == axis) for axis in axes)

    specs = tuple(placement.specs(arg, stacked=is_stacked) for arg, is_stacked in zip(args, stacked, strict=True))
    out_specs = tuple(_spec(axis, stacked=stacks) for axis in axes)
    # Unsplit results are the same on all devices; the checks of `check_vma` cannot know this of kernels.
    run = jax.shard_map(local, mesh=placement.mesh, in_specs=specs, out_specs=out_specs, check_vma=False)
    groups = dict(zip(axes, map(iter, run(*args)), strict=True))
    structure, split = structures[-1]
    return jax.tree.unflatten(structure, [next(groups[axis]) for axis in split])


def on_one_device(placement: Placement | None, tree: T) -> T:
    """The part of one device of weights or of a state, as shapes; placement None: all of it, as it is."""
    return tree if placement is None else placement.local(tree)  # pyright: ignore[reportReturnType]  # shapes


def sum_over_devices(x: Float[Array, "*batch E"], devices: int) -> Float[Array, "*batch E"]:
    """The sum over `devices`."""
    return x if devices == 1 else lax.psum(x, TENSOR)


def in_order(x: Float[Array, "*batch E"], devices: int) -> Float[Array, "D *batch E"] | Float[Array, "*batch E"]:
    """The terms of a sum over D devices in their order; or the sum itself, added in that order, if the terms are large.

    Then each device adds a share of the columns: a second step, and 2 / D of the bytes. Bits are equal (`add_parts`).
    """
    columns, moved = x.shape[-1], (devices - 1) * x.size * x.dtype.itemsize
    if columns % devices or moved - 2 * moved // devices < WORTH_A_STEP:
        return lax.all_gather(x, TENSOR)
    terms = lax.all_to_all(x.reshape(*x.shape[:-1], devices, columns // devices), TENSOR, x.ndim - 1, 0)
    return lax.all_gather(add_parts(terms, x.dtype), TENSOR, axis=x.ndim - 1, tiled=True)


def gather_last(x: Float[Array, "*batch W"], size: int) -> Float[Array, "*batch V"]:
    """All `size` columns, where each device has the next W; `x` itself if it has them all."""
    return x if x.shape[-1] == size else lax.all_gather(x, TENSOR, axis=x.ndim - 1, tiled=True)


def added_once(x: Float[Array, "*shape"], devices: int) -> Float[Array, "*shape"]:
    """`x` on the first of `devices` and zeros on the others, such as a bias, to be added once in a sum over them."""
    return x if devices == 1 else jnp.where(lax.axis_index(TENSOR) == 0, x, jnp.zeros((), x.dtype))


def held_heads(kv_heads: int, devices: int) -> int:
    """Heads of keys and values on all devices, copies included where there are more devices than heads."""
    return max(kv_heads, devices)


def check_split(devices: int, sizes: Mapping[str, int], copied: Mapping[str, int] | None = None) -> None:
    """Checks that the parts of a model can be split evenly.

    sizes: name of a split part -> its size.
    copied: the same for parts of which several devices may have copies.

    Raises:
      ValueError: the number of devices does not suit one of them; the message has those that do.
    """

    copied = copied or {}

    def fits(n: int) -> bool:
        even = all(size % n == 0 for size in sizes.values())
        return even and all(size % n == 0 or n % size == 0 for size in copied.values())

    if fits(devices):
        return
    fitting = [str(n) for n in range(1, min(sizes.values()) + 1) if fits(n)]
    split, shared = ([f"{size} {name}" for name, size in table.items()] for table in (sizes, copied))
    also = f", and divide or be a multiple of {_listed(shared, 'and')}" if shared else ""
    raise ValueError(
        f"tensor={devices}: must divide {_listed(split, 'and')} of this model{also}: {_listed(fitting, 'or')}"
    )


def _listed(items: Sequence[str], word: str) -> str:
    *first, last = items
    return f"{', '.join(first)} {word} {last}" if first else last


def make_placement(
    tensor: int | None, mesh: object, devices: Sequence[Device], data: int | None = None
) -> Placement | None:
    """The placement of a target that these arguments of `jspec.load` describe; None: on one device.

    Raises:
      ValueError, TypeError: too few devices, a mesh without the axes "tensor" and "data" or with another one of several
        devices, or a process without a device.
    """
    # The first devices of JAX.
    if mesh is None:
        shape = (data or 1, tensor or 1)
        if shape == (1, 1):
            return None
        if (count := math.prod(shape)) > len(devices):
            named = {"data": data, "tensor": tensor}
            shown = ", ".join(f"{name}={size}" for name, size in named.items() if size is not None)
            product = "their product must be" if None not in named.values() else "must be"
            raise ValueError(f"{shown}: {product} at most {len(devices)}, the number of devices that JAX has")
        axes, sizes = ((DATA, TENSOR), shape) if shape[0] > 1 else ((TENSOR,), shape[1:])
        return _placement(np.array(devices[:count]).reshape(sizes), axes)
    # A mesh of the caller: its axes, and their sizes.
    if not isinstance(mesh, Mesh):
        raise TypeError(f"mesh is of type {type(mesh).__name__}: must be a jax.sharding.Mesh, as jax.make_mesh makes")
    shape = dict(mesh.shape)
    others = [size for name, size in shape.items() if name not in (TENSOR, DATA)]
    if not {TENSOR, DATA} & set(shape) or any(size > 1 for size in others):
        raise ValueError(
            f"mesh has the axes {shape}: must have the axis 'tensor' or 'data', and no other of several devices"
        )
    for name, size in ((TENSOR, tensor), (DATA, data)):
        if size is not None and size != shape.get(name, 1):
            raise ValueError(
                f"{name}={size}: the mesh has {shape.get(name, 1)} devices on its axis {name!r}; omit {name}"
            )
    if TENSOR not in shape:
        return _placement(mesh.devices[..., None], (*mesh.axis_names, TENSOR), by_caller=True)
    return _placement(mesh.devices, mesh.axis_names, by_caller=True)


def _placement(devices: np.ndarray, names: Collection[str], *, by_caller: bool = False) -> Placement:
    """The placement on these devices. by_caller: they may be those of this process alone.

    Raises:
      ValueError: a process has none of them.
    """
    processes = {device.process_index for device in devices.flat}
    missing = [process for process in range(jax.process_count()) if process not in processes]
    if missing and not (by_caller and processes == {jax.process_index()}):
        raise ValueError(
            f"the model is on {devices.size} devices, none of which belongs to process {missing[0]}: each of the "
            f"{jax.process_count()} processes must have some, or a mesh must have devices of one process alone"
        )
    return Placement(_mesh(devices, names))


def _mesh(devices: np.ndarray, names: Collection[str]) -> Mesh:
    """A mesh of which only `shard_map` knows, whatever the types of a user's own axes."""
    return Mesh(devices, tuple(names), axis_types=(AxisType.Auto,) * devices.ndim)

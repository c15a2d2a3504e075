"""How long a compiled program takes at least: operations of its products, bytes of its kernels, bytes it sends.

A kernel is an instruction that the device runs by itself: a fusion, a product, a copy, a
library call. It takes as long as its operations or its bytes, whichever is slower.

References:
    Williams et al. 2009, doi 10.1145/1498765.1498785: the roofline model.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from zerojax.gpus.devices import Device
from zerojax.inspect.collectives import KINDS, Array, Collective, arrays_of
from zerojax.inspect.hlo import Computation, Instruction, Module
from zerojax.inspect.overlap import Overlap

HIGHEST = "f32 highest"
CONTROL = frozenset({"while", "conditional", "call", "async-start"})
FREE = frozenset(
    {
        *CONTROL,
        "parameter",
        "constant",
        "tuple",
        "get-tuple-element",
        "bitcast",
        "after-all",
        "partition-id",
        "replica-id",
        "optimization-barrier",
        *(kind + part for kind in KINDS for part in ("", "-start")),
    }
)
FUSIONS = frozenset({"fusion", "fusion-start"})
SLICES = frozenset({"slice", "dynamic-slice", "gather"})
UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_TARGET = re.compile(r'custom_call_target="([^"]*)"')


class Kernel(NamedTuple):
    """One instruction that the device runs by itself.

    Attributes:
        name: Its HLO instruction.
        times: Executions in one run of the program; a loop of unknown turns counts as one.
        operations: Multiplications and additions of its matrix products, by type of the operands; one execution.
        traffic: Bytes it reads and writes; one execution. Of a slice, only what is sliced.
        unknown: The library function it calls, if that is none whose operations are known.
    """

    name: str
    times: int
    operations: dict[str, int]
    traffic: int
    unknown: str = ""

    def seconds(self, device: Device) -> float:
        """How long one execution takes at least."""
        return max(product_seconds(self.operations, device), self.traffic / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """What one run of a program takes a device at least.

    Attributes:
        operations: Of matrix products, by type of the operands; `"f32"` runs as TF32, `"f32 highest"` does not.
        traffic: Bytes that kernels read and write.
        products: Seconds of the products alone.
        memory: Seconds of the traffic alone.
        kernels: Seconds of all kernels, each the slower of its two.
        communication: Seconds of all collectives.
        exposed: Of these, those with no matrix product in flight.
        unknown: Library functions whose operations are not counted.
    """

    operations: dict[str, int]
    traffic: int
    products: float
    memory: float
    kernels: float
    communication: float
    exposed: float
    unknown: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """`max(kernels + exposed, communication)`: what hides costs nothing, as long as the link keeps up."""
        return max(self.kernels + self.exposed, self.communication)


def roofline(module: Module, flights: Overlap, device: Device) -> Roofline:
    """Add up the kernels and the collectives of a program.

    Args:
        module: The program.
        flights: Its collectives, with what hides them.
        device: What it would run on.
    """
    found = list(kernels(module))
    operations = Counter[str]()
    for kernel in found:
        operations.update({dtype: count * kernel.times for dtype, count in kernel.operations.items()})
    traffic = sum(kernel.traffic * kernel.times for kernel in found)
    return Roofline(
        operations=dict(operations),
        traffic=traffic,
        products=product_seconds(operations, device),
        memory=traffic / device.bandwidth,
        kernels=sum(kernel.seconds(device) * kernel.times for kernel in found),
        communication=sum(sending_seconds(flight.collective, device) for flight in flights.flights),
        exposed=sum(sending_seconds(flight.collective, device) for flight in flights.exposed),
        unknown=tuple(sorted({kernel.unknown for kernel in found if kernel.unknown})),
    )


def product_seconds(operations: dict[str, int], device: Device) -> float:
    """How long matrix products take at the device's peak."""
    return sum(count / device.rate(dtype) for dtype, count in operations.items())


def sending_seconds(c: Collective, device: Device) -> float:
    """How long a collective takes, all its executions, on a ring at the link's peak."""
    return c.sent * c.times_if_once / device.sends(c.group_size)


def launches(module: Module, i: Instruction) -> bool:
    """Whether an instruction is a kernel: of one that runs beside others its start is, a fused collective is none."""
    if i.opcode in FREE or i.opcode.endswith(("-update", "-done")):
        return False
    fused = _fused(module, i) if i.opcode in FUSIONS else []
    return not any(inside.opcode in KINDS for inner in fused for inside in inner.instructions)


def kernels(module: Module) -> Iterator[Kernel]:
    """Every kernel that a run of the program launches."""
    running = set(module.entries)
    for name in module.callers_first:
        if name not in running:
            continue
        c, times = module.computations[name], module.executions[name].times_if_once
        running |= {call.callee for call in module.calls[name] if call.instruction.opcode in CONTROL}
        for i in c.instructions:
            if launches(module, i):
                operations, unknown = _operations(module, c, i)
                yield Kernel(i.name, times, dict(operations), _traffic(module, c, i), unknown)


def _operations(module: Module, c: Computation, i: Instruction) -> tuple[Counter[str], str]:
    """Operations of the products in an instruction, and the library function it calls if that is not understood."""
    if i.opcode in FUSIONS:
        total, unknown = Counter[str](), ""
        for inner in _fused(module, i):
            for inside in inner.instructions:
                counted, name = _operations(module, inner, inside)
                total, unknown = total + counted, unknown or name
        return total, unknown
    shapes = [_operand(c, name) for name in i.operands] if i.opcode in ("dot", "convolution", "custom-call") else []
    called = _TARGET.search(i.attributes) if i.opcode == "custom-call" else None
    name = called[1] if called else i.opcode
    if name == "dot" or name.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        return _dot(i, shapes), ""
    if name == "convolution" or name.startswith("__cudnn$conv"):
        return _convolution(i, name, shapes), ""
    return Counter(), name if called else ""


def _dot(i: Instruction, operands: list[Array]) -> Counter[str]:
    """Two operations for each element of the result and each that is summed for it."""
    stated = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", i.rest)
    dims = re.findall(r"\d+", stated[1]) if stated else ()
    summed = math.prod(operands[0].shape[int(d)] for d in dims)
    return Counter({_type(i, operands[0]): 2 * arrays_of(i.shape)[0].elements * summed})


def _convolution(i: Instruction, name: str, operands: list[Array]) -> Counter[str]:
    """Two operations for each element that the forward pass makes and each of the kernel that adds to it."""
    kernel, made = operands[1], arrays_of(i.shape)[0]
    if "BackwardFilter" in name:
        kernel, made = made, operands[1]
    elif "BackwardInput" in name:
        made = operands[0]
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    outputs = kernel.shape[labels[1].index("o")] if labels else 1
    return Counter({_type(i, operands[0]): 2 * made.elements * kernel.elements // max(outputs, 1)})


def _type(i: Instruction, operand: Array) -> str:
    """The type that decides a product's rate."""
    highest = operand.dtype == "f32" and re.search(r'operand_precision(?:=\{|":\[")highest', i.rest, re.IGNORECASE)
    return HIGHEST if highest else operand.dtype


def _traffic(module: Module, c: Computation, i: Instruction) -> int:
    """Bytes that one execution of a kernel reads and writes, each operand once."""
    operands = i.operands
    if i.opcode in SLICES:
        return 2 * _bytes(i.shape)
    if i.opcode in UPDATES:
        return 2 * _put(c, i)
    if i.opcode.endswith("-start") and i.opcode not in FUSIONS:
        return _bytes(i.shape)  # which lists operands, results and a context of 4 bytes
    if i.opcode not in FUSIONS:
        return sum(_bytes(c.by_name[name].shape) for name in operands if name in c.by_name) + _bytes(i.shape)
    return sum(_read_by_fusion(inner) + _written(inner, inner.by_name.get(inner.root)) for inner in _fused(module, i))


def _read_by_fusion(inner: Computation) -> int:
    """Bytes that a fused computation reads of its parameters."""
    users: dict[str, list[Instruction]] = defaultdict(list)
    for i in inner.instructions:
        for name in i.operands if i.opcode != "parameter" else ():
            users[name].append(i)

    def read(i: Instruction) -> int:
        whole, found = _bytes(i.shape), 0
        for user in users[i.name]:
            first = user.operands[0] == i.name
            if user.opcode == "bitcast":
                found += read(user)
            elif user.opcode in SLICES and first:
                found += _bytes(user.shape)
            elif user.opcode == "scatter" and first:  # which is done in place, and may add to what is there
                found += _put(inner, user)
            elif user.opcode not in UPDATES or not first:
                return whole
        return min(found, whole)

    return sum(read(i) for i in inner.instructions if i.opcode == "parameter")


def _written(inner: Computation, root: Instruction | None) -> int:
    """Bytes that a fused computation writes; of an update in place, those that are updated."""
    if root is None:
        return 0
    if root.opcode == "bitcast":
        return _written(inner, inner.by_name.get(root.operands[0]))
    if root.opcode == "tuple":
        return sum(_written(inner, inner.by_name.get(name)) for name in root.operands)
    if root.opcode in UPDATES:
        return _put(inner, root)
    return _bytes(root.shape)


def _put(c: Computation, i: Instruction) -> int:
    """Bytes that an update in place puts in."""
    return _operand(c, i.operands[1 if i.opcode == "dynamic-update-slice" else -1]).bytes


def _fused(module: Module, i: Instruction) -> list[Computation]:
    called = re.search(r"\bcalls=%?([\w.\-]+)", i.attributes)
    return [module.computations[called[1]]] if called and called[1] in module.computations else []


def _operand(c: Computation, name: str) -> Array:
    return arrays_of(c.by_name[name].shape)[0]


def _bytes(shape: str) -> int:
    return sum(array.bytes for array in arrays_of(shape))

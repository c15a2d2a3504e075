"""Compute a lower bound on a compiled program's time, from its products' FLOPs, its kernels' bytes and its collectives.

A kernel is an instruction that the device launches, such as a fusion, a product, a copy or a library call. A kernel
takes at least the time of its FLOPs, and at least the time of its bytes.

References:
    Williams et al. 2009, doi 10.1145/1498765.1498785: the roofline model.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from zerojax.gpus.devices import Device
from zerojax.inspect.compiled_collectives import KINDS, Collective, CompiledCollectives, collectives_of
from zerojax.inspect.hlo import HloArray, HloComputation, Instruction, Module, read

HIGHEST = "f32 highest"
CONTROL = frozenset({"while", "conditional", "call", "async-start"})
_NAMES = "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id optimization-barrier"
# Instructions that take no time on the compute stream, and so do not count as kernels.
NO_KERNELS = frozenset({*CONTROL, *_NAMES.split(), *(kind + part for kind in KINDS for part in ("", "-start"))})
FUSIONS = frozenset({"fusion", "fusion-start"})
SLICES = frozenset({"slice", "dynamic-slice", "gather"})
UPDATES = frozenset({"dynamic-update-slice", "scatter"})
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PRODUCTS = frozenset({"dot", "ragged-dot", "scaled-dot", "convolution"})
# Library calls that are products. The pattern leaves out cuBLAS's triangular solves and cuDNN's normalisations.
_LIBRARY = re.compile(r'custom_call_target="(?:__cublas\$(?!triangular)|__cudnn\$(?!norm)|__onednn\$matmul|[^"]*gemm)')


class Kernel(NamedTuple):
    """One instruction that the device launches."""

    name: str  # the name of the HLO instruction
    times: int  # executions in one run of the program. A loop of unknown trip count counts as one iteration
    operations: dict[str, int]  # FLOPs of the kernel's matrix products in one execution, by type of the operands
    traffic: int  # bytes that the kernel reads and writes in one execution. A slice reads only the sliced part
    unknown: str = ""  # the library function that the kernel calls, if its FLOPs are not known; otherwise empty

    def seconds(self, device: Device) -> float:
        return max(product_seconds(self.operations, device), self.traffic / device.bandwidth)


@dataclasses.dataclass(frozen=True)
class Roofline:
    """The least time of one run of a program on a device."""

    operations: dict[str, int]  # FLOPs of products, by type of the operands. `"f32"` is TF32; see also `HIGHEST`
    traffic: int  # bytes that kernels read and write
    products: float  # seconds of the products alone
    memory: float  # seconds of the traffic alone
    kernels: float  # seconds of all kernels. Each takes the time of its products or of its traffic, whichever is longer
    communication: float  # seconds of all collectives
    exposed: float  # seconds of the collectives that no matrix product hides
    unknown: tuple[str, ...] = ()  # library functions whose FLOPs are not counted

    @property
    def seconds(self) -> float:
        """Return `max(kernels + exposed, communication)`: either the kernels or the links are the bottleneck."""
        return max(self.kernels + self.exposed, self.communication)


def roofline(module: Module, moved: CompiledCollectives, device: Device) -> Roofline:
    launched = list(kernels(module))
    operations = product_flops(launched)
    traffic = sum(kernel.traffic * kernel.times for kernel in launched)
    return Roofline(
        operations=operations,
        traffic=traffic,
        products=product_seconds(operations, device),
        memory=traffic / device.bandwidth,
        kernels=sum(kernel.seconds(device) * kernel.times for kernel in launched),
        communication=sum(collective_seconds(c, device) for c in moved),
        exposed=sum(collective_seconds(c, device) for c in moved.exposed),
        unknown=tuple(sorted({kernel.unknown for kernel in launched if kernel.unknown})),
    )


def product_flops(launched: Iterable[Kernel]) -> dict[str, int]:
    found = Counter[str]()
    for kernel in launched:
        found.update({dtype: count * kernel.times for dtype, count in kernel.operations.items()})
    return dict(found)


def product_seconds(operations: dict[str, int], device: Device) -> float:
    return sum(count / device.rate(dtype) for dtype, count in operations.items())


def collective_seconds(c: Collective, device: Device) -> float:
    return c.sent * c.times_if_once / device.ring_bandwidth(c.group)


def is_kernel(module: Module, i: Instruction) -> bool:
    """Return whether `i` is a kernel. Control flow, collectives and the ends of asynchronous instructions are not."""
    if i.opcode in NO_KERNELS or i.opcode.endswith(("-update", "-done")):
        return False
    fused = module.callee(i) if i.opcode in FUSIONS else None
    return not (fused and any(inner.opcode in KINDS for inner in fused.instructions))


def kernels(module: Module) -> Iterator[Kernel]:
    executed = set(module.entries)
    for name in module.callers_first:
        if name not in executed:
            continue
        c, times = module.computations[name], module.executions[name].times_if_once
        executed |= {call.callee for call in module.calls[name] if call.instruction.opcode in CONTROL}
        for i in c.instructions:
            if is_kernel(module, i):
                operations, unknown = _operations(module, c, i)
                yield Kernel(i.name, times, dict(operations), _traffic(module, c, i), unknown)


def _operations(module: Module, c: HloComputation, i: Instruction) -> tuple[Counter[str], str]:
    """Return the FLOPs of the products in `i`, and the library function with unknown FLOPs that `i` calls, or ""."""
    if i.opcode in FUSIONS:
        fused = module.callee(i)
        found = [_operations(module, fused, inner) for inner in fused.instructions] if fused else []
        return sum((total for total, _ in found), Counter[str]()), next((name for _, name in found if name), "")
    operands = lambda: [c.by_name[name].arrays[0] for name in i.operands]
    target = _TARGET.search(i.attributes) if i.opcode == "custom-call" else None
    name = target[1] if target else i.opcode
    if name == "dot" or name.startswith(("__cublas$gemm", "__cublas$lt$matmul")):
        return _dot_flops(i, operands()), ""
    if name == "convolution" or name.startswith("__cudnn$conv"):
        return _convolution(i, name, operands()), ""
    return Counter(), name if target else ""


def _dot_flops(i: Instruction, operands: list[HloArray]) -> Counter[str]:
    contracting = re.search(r"lhs_contracting_dim(?:s=\{|ensions\":\[)([\d,\"]*)", i.rest)
    dims = re.findall(r"\d+", contracting[1]) if contracting else ()
    contracted = math.prod(operands[0].shape[int(d)] for d in dims)
    return Counter({_rate_dtype(i, operands[0]): 2 * i.arrays[0].elements * contracted})


def _convolution(i: Instruction, name: str, operands: list[HloArray]) -> Counter[str]:
    """Return a convolution's FLOPs: two per pair of a forward output element and a kernel element that affects it."""
    kernel, output = operands[1], i.arrays[0]
    if "BackwardFilter" in name:
        kernel, output = output, operands[1]
    elif "BackwardInput" in name:
        output = operands[0]
    labels = re.search(r"dim_labels=\w+_(\w+)->", i.attributes)
    features = kernel.shape[labels[1].index("o")] if labels else 1
    return Counter({_rate_dtype(i, operands[0]): 2 * output.elements * kernel.elements // max(features, 1)})


def _rate_dtype(i: Instruction, operand: HloArray) -> str:
    highest = operand.dtype == "f32" and re.search(r'operand_precision(?:=\{|":\[")highest', i.rest, re.IGNORECASE)
    return HIGHEST if highest else operand.dtype


def _traffic(module: Module, c: HloComputation, i: Instruction) -> int:
    """Return the bytes that one execution of a kernel reads and writes. Each operand counts as read once."""
    if i.opcode in SLICES:
        return 2 * i.bytes
    if i.opcode in UPDATES:
        return 2 * _update_bytes(c, i)
    if i.opcode.endswith("-start") and i.opcode not in FUSIONS:
        return i.bytes  # includes the operands: the shape lists operands, results and a context of 4 bytes
    if i.opcode not in FUSIONS:
        return sum(c.by_name[name].bytes for name in i.operands if name in c.by_name) + i.bytes
    fused = module.callee(i)
    return _bytes_read(fused) + _bytes_written(fused, fused.root) if fused else 0


def _bytes_read(fused: HloComputation) -> int:
    def read(i: Instruction) -> int:
        full, touched = i.bytes, 0
        for user in fused.users.get(i.name, ()):
            is_first = user.operands[0] == i.name
            if user.opcode == "bitcast":
                touched += read(user)
            elif user.opcode in SLICES and is_first:
                touched += user.bytes
            elif user.opcode == "scatter" and is_first:  # an in-place update, which may read the old values
                touched += _update_bytes(fused, user)
            elif user.opcode not in UPDATES or not is_first:
                return full
        return min(touched, full)

    return sum(read(i) for i in fused.instructions if i.opcode == "parameter")


def _bytes_written(fused: HloComputation, name: str) -> int:
    """Return the bytes that a fused computation writes for its result `name`. An in-place update writes only a part."""
    root = fused.by_name.get(name)
    if root is None:
        return 0
    if root.opcode in ("bitcast", "tuple"):
        return sum(_bytes_written(fused, operand) for operand in root.operands)
    if root.opcode in UPDATES:
        return _update_bytes(fused, root)
    return root.bytes


def _update_bytes(c: HloComputation, i: Instruction) -> int:
    return c.by_name[i.operands[1 if i.opcode == "dynamic-update-slice" else -1]].arrays[0].bytes


def overlap(compiled: Any) -> CompiledCollectives:
    """List the collectives of a scheduled program, each with the number of matrix products that run meanwhile.

    A product is a dot or a convolution, a library call that computes either, or a fusion that contains either. The
    products of a loop are multiplied by the loop's trip count, or by 1 if the trip count is unknown. Of a conditional,
    the branch with the fewest products counts. A synchronous collective has no products. If the start and the done are
    in different computations, the collective is in flight until the end of the computation with the start. The count
    does not measure time: one small product hides even a large collective.
    """
    module = read(compiled)
    if "is_scheduled=true" not in module.text.partition("\n")[0]:
        raise ValueError(
            "Cannot read overlap from HLO that is not scheduled: the order of its lines means nothing. "
            "Give the text of compile(), not of lower()."
        )
    products: dict[str, int] = {}
    windows: dict[str, dict[str, int]] = {}
    for name in reversed(module.callers_first):
        windows[name], products[name] = _schedule(module, name, products)
    outer = dict.fromkeys(module.entries, 0)
    for caller in module.callers_first:
        for call in module.calls[caller]:
            # A wrapped collective is in flight as long as its wrapper. The caller with the fewest products counts.
            around = outer[caller] + windows[caller].get(call.instruction.name, 0)
            outer[call.callee] = min(around, outer.get(call.callee, around))
    during = lambda c: outer[c.computation] + windows[c.computation].get(c.name, 0)
    return CompiledCollectives(dataclasses.replace(c, products=during(c)) for c in collectives_of(module))


def _schedule(module: Module, computation: str, products: dict[str, int]) -> tuple[dict[str, int], int]:
    """Return how many products run between each collective's start and done, and how many in the whole computation.

    `products` has the number of products of each computation that this computation calls.
    """
    started: dict[str, tuple[str, int]] = {}
    windows: dict[str, int] = {}
    executed = 0
    for i in module.computations[computation].instructions:
        if i.opcode.endswith(("-update", "-done")) and i.operands[0] in started:
            start, before = started.pop(i.operands[0])
            if i.opcode.endswith("-done"):
                windows[start] = executed - before
            else:
                started[i.name] = start, before
            continue
        if i.opcode in _PRODUCTS or (i.opcode == "custom-call" and _LIBRARY.search(i.attributes)):
            executed += 1
        elif inner := [products[call.callee] * call.trips for call in module.calls_of(i)]:
            if i.opcode.startswith("fusion"):
                executed += min(1, sum(inner))
            else:
                executed += min(inner) if i.opcode == "conditional" else sum(inner)
        if not i.is_synchronous:
            started[i.name] = i.name, executed
    return windows | {start: executed - before for start, before in started.values()}, executed

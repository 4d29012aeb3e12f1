"""Passes of a layer over memory: norms, residuals, rotations, activations, dropout, and the routing of experts.

Each is counted by the bytes that are read and written for each element.
"""

from tonnage.timing.operations import ELEMENT_BYTES, Operation, Slice
from tonnage.timing.shape import Shape


def pointwise_operations(shape: Shape, part: Slice) -> tuple[list[Operation], list[Operation]]:
    """Return the passes of a layer over memory, forward and backward."""
    e, r = ELEMENT_BYTES[part.between], part.residual_bytes
    stream = part.tokens / (part.tp if part.sequence_parallel else 1) * shape.hidden
    rotated = part.tokens * (shape.query_width + shape.key_width) / part.tp * shape.rotary
    turned, turned_back = (2 * e, 2 * e) if part.one_kernel else (12 * e, 14 * e)
    active = part.tokens * inner_width(shape, part) / part.tp * _activation_bytes(shape, part, e)
    added = stream * 6 * r + _dropout_bytes(shape, stream, r)

    def passing(name: str, moved: float, kernels: int) -> Operation:
        return Operation(name, "pointwise", part.dtype, 0, moved, kernels)

    return (
        [
            norm_operation(shape, part, stream, rotated),
            passing("residual", added, 2),
            passing("rotation", rotated * turned, _kernels(part, 8)),
            passing("activation", active, _kernels(part, 2)),
            *_routing(shape, part, 1),
            *_around_experts(shape, part),
        ],
        [
            norm_operation(shape, part, stream, rotated, backward=True),
            passing("residual backward", added, 4),
            passing("rotation backward", rotated * turned_back, _kernels(part, 16)),
            passing("activation backward", 2 * active, _kernels(part, 4)),
            *_routing(shape, part, 2),
            *_around_experts(shape, part, backward=True),
        ],
    )


def _kernels(part: Slice, eager: int) -> int:
    """Return the kernels of a pass that eager code makes in so many."""
    return 1 if part.one_kernel else eager


def inner_width(shape: Shape, part: Slice) -> int:
    """Return the values of a token inside the feed-forward network, or inside all experts that it goes through."""
    if not part.experts:
        return shape.intermediate
    return shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate


def _activation_bytes(shape: Shape, part: Slice, e: float) -> float:
    """Return the bytes of an activation for each inner value: SiLU (2 e) and the gate's product (3 e), or GELU (2 e).

    Written out, GELU's tanh formula is eight kernels (18 e); autocast runs the power and what follows in fp32 (60).
    A squared ReLU is written out in fused codes too (torch.pow(relu(x), 2), which NeMo does not compile): 4 e, and in
    backward 10 e.
    """
    if shape.squared_activation:
        return 14 / 3 * e  # over three passes, of which backward has two
    if not shape.gated:
        written_out = 60 if part.residual_bytes > e else 18 * e
        return written_out if shape.stepwise_activation and not part.fused else 2 * e
    return 3 * e if part.one_kernel else 5 * e


def _dropout_bytes(shape: Shape, stream: float, r: int) -> float:
    """Return the bytes of two dropouts: read, written, and a mask of one byte."""
    return 2 * stream * (2 * r + 1) if shape.dropout else 0.0


def norm_operation(shape: Shape, part: Slice, stream: float, rotated: float, *, backward: bool = False) -> Operation:
    """Return all norms of a layer as one operation.

    `stream`: values of the residual stream; `rotated`: values of queries and keys.

    Fused: forward reads and writes, backward reads two and writes one.  A root-mean-square norm in eager code is
    a cast, a square, a mean, a product, a cast back and the weight: r + 30 bytes forward, r + 50 backward.
    """
    r = part.residual_bytes
    if part.one_kernel or not shape.rms_norm:
        each, kernels = (3 * r, 2) if backward else (2 * r, 1)
    else:
        each, kernels = (r + 50, 12) if backward else (r + 30, 6)
    elements = shape.norms * stream + (rotated if shape.head_norms else 0)
    count = kernels * (shape.norms + (2 if shape.head_norms else 0))
    return Operation("norms backward" if backward else "norms", "norm", part.dtype, 0, elements * each, count)


def _routing(shape: Shape, part: Slice, passes: int) -> list[Operation]:
    """Return the routing of a layer with experts: tokens are gathered by expert and summed up again (each k times).

    A sort is between the two.
    """
    if not part.experts:
        return []
    e = ELEMENT_BYTES[part.between]
    moved = part.tokens * shape.experts_per_token * shape.hidden * 4 * e / (part.tp if part.experts_whole else 1)
    return [Operation("routing", "pointwise", part.dtype, 0, passes * moved, 24 * passes)]


def _around_experts(shape: Shape, part: Slice, *, backward: bool = False) -> list[Operation]:
    """Return the passes that Megatron's grouped experts make in plain torch, unless one kernel does it all.

    Clamping both halves and putting them together: 16 bytes an inner value, 20 backward.  Adding the last product's
    bias times the router's weights, expert by expert, in fp32: 28 bytes a value, 40 backward.  (Megatron-LM
    core_v0.16.0, `weighted_bias_quick_geglu_impl` and `TEGroupedMLP._apply_bias`.)
    """
    if not (part.fused and part.experts) or part.experts_fused:
        return []
    rows = part.tokens * shape.experts_per_token / (part.tp if part.experts_whole else 1)
    suffix = " backward" if backward else ""
    operations: list[Operation] = []
    if shape.clamped_activation:
        moved = rows * shape.expert_intermediate * (20 if backward else 16)
        operations.append(Operation("clamp" + suffix, "pointwise", part.dtype, 0, moved, 6 if backward else 3))
    if shape.expert_biases:
        moved, count = rows * shape.hidden * (40 if backward else 28), round(shape.experts / part.ep)
        kernels = count * (6 if backward else 3)
        biases = Operation("expert biases" + suffix, "pointwise", part.dtype, 0, moved, kernels, grouped=True)
        operations.append(biases)
    return operations

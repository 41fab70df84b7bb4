"""Which inputs of a call have outputs in their place: a plain second computation, which plans are held to."""

from collections import Counter

IN_PLACE = {
    "relu_forward", "relu_backward", "dropout_forward", "dropout_backward", "copy", "eltwise_sum",
    "eltwise_sum_backward", "scale_forward", "scale_backward_data", "batch_norm_forward", "batch_norm_inference",
    "batch_norm_backward", "sum_arrays", "prelu_forward", "prelu_backward_data", "softmax_loss_backward",
}  # fmt: skip
"""Ops of the nets in `models/` that may write an output where an input of its size is, if they are the last to read it."""


def given_up(call, dying, born):
    """Of the memories that are in use for the last time during a call, oldest first, those in whose place it makes
    arrays (`born`), which are in use for the first time."""
    operands = list(call.present())
    if call.op not in IN_PLACE:
        return []
    if call.op == "sum_arrays":  # on the host those after the second are added to what is there
        operands = [*operands[:2], operands[-1]]
    often = Counter(operand.view.memory for operand in call.present())
    sizes = {operand.view.memory: operand.view.nbytes for operand in operands if often[operand.view.memory] == 1}
    wanted = Counter(o.view.nbytes for o in operands if o.view.memory in born and o.blob.dtype != "uint8")
    result = []
    for memory in dying:
        if memory in sizes and wanted[sizes[memory]]:
            wanted[sizes[memory]] -= 1
            result.append(memory)
    return result

"""Losses between two blobs of as many values: ContrastiveLoss, EuclideanLoss, SigmoidCrossEntropyLoss."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from blobmem.layers.base import EXACT, NET, register_layer
from blobmem.layers.loss import Loss, rows
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


class _OfPairs(Loss):
    """Two bottoms with the same batch and as many values per item."""

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if rows(bottom[0]) != rows(bottom[1]):
            raise self.error("bottom", f"as many values as {bottom[0].describe()}", bottom[1].describe())
        self.folded = rows(bottom[0])
        top[0].reshape()


@register_layer
class EuclideanLoss(_OfPairs):
    """Sum of squared differences over twice the batch."""

    type = "EuclideanLoss"
    propagates = (True,)
    bottom_kinds = (NET,)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        self.internal_blob("difference", self.folded)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        a, b = (read(blob, self.folded) for blob in bottom)
        yield call("euclidean_loss_forward", a, b, overwrite(self.internal["difference"]), overwrite(top[0]))

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        for blob, sign, wanted in zip(bottom, (1.0, -1.0), propagate_down, strict=True):
            if wanted:
                difference, dloss = read(self.internal["difference"]), read_diff(top[0])
                done = overwrite_diff(blob, self.folded)
                yield call("euclidean_loss_backward", difference, dloss, done, sign=sign)


@register_layer
class SigmoidCrossEntropyLoss(_OfPairs):
    """Sum of -(t log p + (1 - t) log(1 - p)), p = sigmoid(x), t the second bottom, over what `normalization` counts.

    By default that is the batch. Targets are ignored whose whole part is `ignore_label`.
    """

    type = "SigmoidCrossEntropyLoss"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        self.attributes = self.normalization("BATCH_SIZE")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        x, target = (read(blob, self.folded) for blob in bottom)
        yield call("sigmoid_cross_entropy_forward", x, target, overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            x, target = (read(blob, self.folded) for blob in bottom)
            dx = overwrite_diff(bottom[0], self.folded)
            yield call("sigmoid_cross_entropy_backward", x, target, read_diff(top[0]), dx, **self.attributes)


@register_layer
class ContrastiveLoss(_OfPairs):
    """Half the mean over pairs of items of d^2 if they are similar, else of max(0, margin - d)^2, d their distance.

    The third bottom says of each pair whether it is similar (not 0). With legacy_version, dissimilar ones give
    max(0, margin - d^2). Hadsell et al. 2006.
    """

    type = "ContrastiveLoss"
    bottoms = (3, 3)
    propagates = (True, True, False)
    bottom_kinds = (NET, NET, EXACT)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().setup(bottom, top)
        options = self.param.contrastive_loss_param
        self.attributes = {"margin": options.margin, "legacy": options.legacy_version}

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        super().reshape(bottom, top)
        if bottom[2].count != self.folded[0]:
            raise self.error("bottom", f"{self.folded[0]} flags, one for each pair", bottom[2].describe())
        self.flags = (self.folded[0],)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        a, b, similar = read(bottom[0], self.folded), read(bottom[1], self.folded), read(bottom[2], self.flags)
        yield call("contrastive_loss_forward", a, b, similar, overwrite(top[0]), **self.attributes)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        similar, dloss = read(bottom[2], self.flags), read_diff(top[0])
        for index in (0, 1):
            if propagate_down[index]:
                one, other = read(bottom[index], self.folded), read(bottom[1 - index], self.folded)
                done = overwrite_diff(bottom[index], self.folded)
                yield call("contrastive_loss_backward", one, other, similar, dloss, done, **self.attributes)

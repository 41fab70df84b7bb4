"""The layers of Fast and Faster R-CNN: Proposal, ROIPooling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from blobmem.layers.base import EXACT, NET, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


def anchor_boxes(base_size: int, ratios: Sequence[float], scales: Sequence[float]) -> list[tuple[float, ...]]:
    """The boxes (x1, y1, x2, y2), in pixels, both ends included, of each ratio (height / width) and each scale of it.

    They have the centre of a square of base_size with a corner at 0. Sides are rounded before they are scaled: halves
    up, as in the layers in C++ that read `proposal_param` (py-faster-rcnn's own anchors meet no half that matters).
    """
    boxes: list[tuple[float, ...]] = []
    center = (base_size - 1) / 2
    for ratio in ratios:
        width = math.floor(math.sqrt(base_size * base_size / ratio) + 0.5)
        height = math.floor(width * ratio + 0.5)
        for scale in scales:
            w, h = (width * scale - 1) / 2, (height * scale - 1) / 2
            boxes.append((center - w, center - h, center + w, center + h))
    return boxes


@register_layer
class Proposal(Layer):
    """Regions of interest of a region proposal network, by the rule of py-faster-rcnn.

    Bottoms: scores (batch, 2 * anchors, height, width), of background and then of objects; deltas (batch, 4 * anchors,
    height, width); of each image its height, width and scale, or height, width and the scale of each. Tops: (found, 5),
    rows of image, x1, y1, x2, y2 in pixels, best first for each image; and (found, 1), their scores.

    Anchors are moved by the deltas and clipped to the image. Those smaller than min_size times scale go, then those
    beyond the pre_nms_topn best, those that overlap with better ones, and those beyond the post_nms_topn best (0: no
    limit). Without ratio or scale these are py-faster-rcnn's: 0.5, 1, 2 and 8, 16, 32.
    """

    type = "Proposal"
    bottoms = (3, 3)
    tops = (1, 2)
    propagates = (False,)
    dynamic = True
    bottom_kinds = (EXACT,)
    top_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.proposal_param
        ratios, scales = list(options.ratio) or [0.5, 1, 2], list(options.scale) or [8, 16, 32]
        for name, values in (("ratio", ratios), ("scale", scales)):
            if not min(values) > 0:
                raise self.error(name, "values above 0", values)
        for name in ("feat_stride", "base_size"):
            if getattr(options, name) < 1:
                raise self.error(name, "1 or more", getattr(options, name))
        if not options.nms_thresh >= 0:
            raise self.error("nms_thresh", "0 or more", options.nms_thresh)
        self.anchors = anchor_boxes(options.base_size, ratios, scales)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options, count = self.param.proposal_param, len(self.anchors)
        scores, deltas, info = bottom
        for blob, each in ((scores, 2), (deltas, 4)):
            if blob.num_axes != 4 or blob.shape[1] != each * count:
                raise self.error("bottom", f"4 axes, with {each} channels for each of {count} anchors", blob.describe())
        images, _, height, width = scores.shape
        if deltas.shape != (images, 4 * count, height, width):
            raise self.error("bottom", f"batch and plane of {scores.describe()}", deltas.describe())
        described = info.shape[0] if info.num_axes > 1 else 1
        if images < 1 or described != images or info.count < 3 * images:
            raise self.error("bottom", f"height, width and scale of each of {images} images", info.describe())
        self.info = (images, info.count // images)
        total = height * width * count
        self.entering = min(total, options.pre_nms_topn or total)
        most = min(self.entering, options.post_nms_topn or total)
        self.internal_blob("boxes", (images, 1, total, 4), self.context.exact)
        self.internal_blob("scores", (images, total, 1), self.context.exact)
        self.internal_blob("kept", (images, 1, most), "int32")
        self._shape_tops(top, images * most)

    def _shape_tops(self, top: Sequence[Blob], found: int) -> None:
        for blob, width in zip(top, (5, 1), strict=False):
            blob.reshape(found, width)

    def find(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        options = self.param.proposal_param
        boxes, kept_scores, kept = (self.internal[name] for name in ("boxes", "scores", "kept"))
        yield call(
            "propose_boxes", read(bottom[0]), read(bottom[1]), read(bottom[2], self.info), overwrite(boxes),
            overwrite(kept_scores), anchors=self.anchors, stride=options.feat_stride, min_size=options.min_size,
        )  # fmt: skip
        yield call(
            "suppress_boxes", read(boxes), read(kept_scores), overwrite(kept), background=-1, least=-math.inf,
            entering=self.entering, threshold=options.nms_thresh, eta=1.0, pixels=True,
        )  # fmt: skip

    def resize(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        self._shape_tops(top, int((self.internal["kept"].cpu_data() >= 0).sum()))

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        boxes, kept_scores, kept = (read(self.internal[name]) for name in ("boxes", "scores", "kept"))
        scores = overwrite(top[1]) if len(top) > 1 else None
        yield call("region_rows", boxes, kept_scores, kept, overwrite(top[0]), scores)


@register_layer
class ROIPooling(Layer):
    """The maximum over each cell of a grid over each region (Fast R-CNN).

    Bottoms: (batch, channels, height, width), and regions (count, 5), rows of image, x1, y1, x2, y2 in pixels of the
    image, which spatial_scale makes those of the bottom. The top is (count, channels, pooled_h, pooled_w).
    """

    type = "ROIPooling"
    bottoms = (2, 2)
    propagates = (True, False)
    bottom_kinds = (NET, EXACT)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.roi_pooling_param
        self.grid = (options.pooled_h, options.pooled_w)
        if min(self.grid) < 1:
            raise self.error("pooled_h", "pooled_h and pooled_w of 1 or more", self.grid)
        self.scale = options.spatial_scale
        if not 0 < self.scale < math.inf:
            raise self.error("spatial_scale", "above 0", self.scale)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        if bottom[0].num_axes != 4:
            raise self.error("bottom", "4 axes (batch, channels, height, width)", bottom[0].describe())
        if bottom[1].num_axes < 2 or bottom[1].count_of(1) != 5:
            raise self.error("bottom", "regions of 5 values (image, x1, y1, x2, y2)", bottom[1].describe())
        self.regions = (bottom[1].shape[0], 5)
        top[0].reshape(self.regions[0], bottom[0].shape[1], *self.grid)
        self.internal_blob("argmax", top[0].shape, "int32")

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        argmax = overwrite(self.internal["argmax"]) if self.keeps_state else None
        regions = read(bottom[1], self.regions)
        yield call("roi_pool_forward", read(bottom[0]), regions, overwrite(top[0]), argmax, scale=self.scale)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if propagate_down[0]:
            argmax, regions = read(self.internal["argmax"]), read(bottom[1], self.regions)
            yield call("roi_pool_backward", read_diff(top[0]), regions, argmax, overwrite_diff(bottom[0]))

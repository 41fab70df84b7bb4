"""The layers of SSD: PriorBox, DetectionOutput."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import ANY, EXACT, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, read
from blobmem.proto import caffe_pb2


@register_layer
class PriorBox(Layer):
    """The boxes that SSD's offsets start from, at each point of the first bottom, in units of the second's image.

    At each point, for each min_size: a square of it; with max_size one of sqrt(min_size * max_size); and for each
    aspect ratio but 1 (and, with flip, its inverse) a box of min_size's area. Sizes are whole pixels: fractions are cut
    off, as SSD does. The top is (1, 2, boxes * 4): corners, then variances.
    """

    type = "PriorBox"
    bottoms = (2, 2)
    propagates = (False,)
    bottom_kinds = (ANY,)
    top_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.prior_box_param
        smallest, largest = list(options.min_size), list(options.max_size)
        if not smallest or min(smallest) < 1:
            raise self.error("min_size", "values of 1 or more", smallest or "none")
        if largest and (len(largest) != len(smallest) or any(a >= b for a, b in zip(smallest, largest, strict=True))):
            raise self.error("max_size", f"none, or {len(smallest)} values, each above its min_size", largest)
        self.variance = tuple(options.variance) or (0.1,)
        if len(self.variance) not in (1, 4) or not min(self.variance) > 0:
            raise self.error("variance", "1 or 4 values above 0", list(self.variance))
        ratios = self._ratios()
        self.sizes: list[tuple[float, float]] = []
        for index, size in enumerate(map(int, smallest)):
            self.sizes.append((size, size))
            if largest:
                between = math.sqrt(size * int(largest[index]))
                self.sizes.append((between, between))
            self.sizes += [(size * math.sqrt(ratio), size / math.sqrt(ratio)) for ratio in ratios]
        self.image = self._pair("img_size", "img_h", "img_w")
        self.step = self._pair("step", "step_h", "step_w")

    def _ratios(self) -> list[float]:
        """The aspect ratios besides 1, each once."""
        options, ratios = self.param.prior_box_param, [1.0]
        for ratio in options.aspect_ratio:
            if not ratio > 0:
                raise self.error("aspect_ratio", "values above 0", ratio)
            if all(abs(ratio - other) >= 1e-6 for other in ratios):
                ratios += [ratio, 1 / ratio] if options.flip else [ratio]
        return ratios[1:]

    def _pair(self, name: str, name_h: str, name_w: str) -> tuple[float, float] | None:
        """An option given for both directions, or as _h and _w; None if it is not given."""
        options = self.param.prior_box_param
        parts = options.HasField(name_h), options.HasField(name_w)
        if not any(parts):
            if not options.HasField(name):
                return None
            pair = getattr(options, name), getattr(options, name)
        elif all(parts) and not options.HasField(name):
            pair = getattr(options, name_h), getattr(options, name_w)
        else:
            raise self.error(name, f"either {name}, or both {name_h} and {name_w}")
        if not min(pair) > 0:
            raise self.error(name, "above 0", pair)
        return pair

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob in bottom:
            if blob.num_axes != 4 or min(blob.shape[2:]) < 1:
                raise self.error("bottom", "4 axes (batch, channels, height, width) and a plane", blob.describe())
        height, width = bottom[0].shape[2:]
        image = self.image or (float(bottom[1].shape[2]), float(bottom[1].shape[3]))
        self.attributes: dict[str, Any] = {
            "plane": (height, width),
            "sizes": self.sizes,
            "image": image,
            "step": self.step or (image[0] / height, image[1] / width),
            "offset": self.param.prior_box_param.offset,
            "clip": self.param.prior_box_param.clip,
            "variance": self.variance,
        }
        top[0].reshape(1, 2, height * width * len(self.sizes) * 4)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        # a matter of shapes alone: values of the bottoms change nothing
        yield call("prior_boxes", overwrite(top[0], top[0].shape[1:]), once=True, **self.attributes)


@register_layer
class DetectionOutput(Layer):
    """What SSD has found: boxes decoded, and for each class freed of those that overlap with better ones.

    Bottoms: offsets (batch, boxes * 4; without share_location times classes), scores (batch, boxes * classes), prior
    boxes (1, 2, boxes * 4); a fourth, the images that SSD could show, is not looked at. The top is (1, 1, found, 7),
    rows of image, class, score, xmin, ymin, xmax, ymax, by image and class, best first; if nothing at all is found, a
    row of image, -1, ..., -1 for each image.
    """

    type = "DetectionOutput"
    bottoms = (3, 4)
    propagates = (False,)
    dynamic = True
    bottom_kinds = (EXACT,)
    top_kinds = (EXACT,)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.detection_output_param
        if options.num_classes < 1:
            raise self.error("num_classes", "1 or more", options.num_classes)
        nms = options.nms_param
        if not nms.nms_threshold >= 0:
            raise self.error("nms_threshold", "0 or more", nms.nms_threshold)
        if not 0 < nms.eta <= 1:
            raise self.error("eta", "above 0, up to 1", nms.eta)
        self.top_k = nms.top_k if nms.HasField("top_k") and nms.top_k >= 0 else None
        self.attributes: dict[str, Any] = {
            "background": options.background_label_id,
            "least": options.confidence_threshold if options.HasField("confidence_threshold") else -math.inf,
            "threshold": nms.nms_threshold,
            "eta": nms.eta,
            "pixels": False,
        }
        self.code = caffe_pb2.PriorBoxParameter.CodeType.Name(options.code_type)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        options = self.param.detection_output_param
        classes, places = options.num_classes, 1 if options.share_location else options.num_classes
        offsets, scores, priors = bottom[:3]
        least = 1 if options.variance_encoded_in_target else 2
        if priors.num_axes < 3 or priors.shape[0] != 1 or not least <= priors.shape[1] <= 2:
            raise self.error("bottom", "prior boxes of shape 1 x 2 x boxes * 4", priors.describe())
        images, values = offsets.shape[0] if offsets.num_axes else 0, priors.count_of(2)
        count = values // 4
        for blob, each in ((offsets, places * 4), (scores, classes)):
            if blob.num_axes < 2 or values % 4 or blob.shape[0] != images or blob.count_of(1) != count * each:
                raise self.error("bottom", f"{images} x {count * each} values for {priors.describe()}", blob.describe())
        entering = count if self.top_k is None else min(count, self.top_k)
        self.attributes["entering"] = entering
        self.shapes = (images, count, places, 4), (images, count, classes), (*priors.shape[1:2], values)
        self.internal_blob("boxes", (images, places, count, 4), self.context.exact)
        self.internal_blob("kept", (images, classes, entering), "int32")
        self.internal_blob("counts", (images, classes), "int32")
        most = classes * entering
        if options.keep_top_k >= 0:
            most = min(most, options.keep_top_k)
        top[0].reshape(1, 1, images * max(1, most), 7)

    def find(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        options = self.param.detection_output_param
        offsets, scores, priors = (read(blob, shape) for blob, shape in zip(bottom[:3], self.shapes, strict=True))
        boxes, kept, counts = (self.internal[name] for name in ("boxes", "kept", "counts"))
        variances = not options.variance_encoded_in_target
        yield call("decode_boxes", offsets, priors, overwrite(boxes), code=self.code, variances=variances)
        yield call("suppress_boxes", read(boxes), scores, overwrite(kept), **self.attributes)
        yield call("best_boxes", scores, read(kept), overwrite(counts), most=max(-1, options.keep_top_k))

    def resize(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        counts = self.internal["counts"].cpu_data()
        top[0].reshape(1, 1, int(counts.sum()) or len(counts), 7)

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        boxes, kept, counts = (read(self.internal[name]) for name in ("boxes", "kept", "counts"))
        rows = overwrite(top[0], top[0].shape[2:])
        yield call("detection_rows", boxes, read(bottom[1], self.shapes[1]), kept, counts, rows)

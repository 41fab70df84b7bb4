"""Layers that give planes another size: Interp, Upsample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from blobmem.layers.base import EXACT, NET, Layer, register_layer
from blobmem.layers.checks import refuse_in_place
from blobmem.memory.blob import Blob
from blobmem.ops.call import Call, call, overwrite, overwrite_diff, read, read_diff


class _Resample(Layer):
    """What the two have in common: planes of four axes, in blobs of their own, perhaps with a second bottom."""

    bottoms = (1, 2)
    propagates = (True, False)

    def reshape(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        for blob in bottom:
            if blob.num_axes != 4:
                raise self.error("bottom", "4 axes (batch, channels, height, width)", blob.describe())
        plane = self.plane(bottom)
        top[0].reshape(*bottom[0].shape[:2], *plane)

    def plane(self, bottom: Sequence[Blob]) -> tuple[int, int]:
        """The top's height and width."""
        raise NotImplementedError


@register_layer
class Interp(_Resample):
    """Bilinear interpolation in which the corners stay corners (DeepLab, PSPNet).

    The top's size is the second bottom's, if there is one. Else it comes from the fields that are given, as in DeepLab:
    shrink_factor or zoom_factor alone, height and width, both factors, in this order.
    """

    type = "Interp"

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.interp_param
        for name in ("pad_beg", "pad_end"):
            if getattr(options, name) > 0:
                raise self.error(name, "0, or less to cut off rows and columns", getattr(options, name))
        self.crop = (-options.pad_beg, -options.pad_end)
        for name in ("zoom_factor", "shrink_factor"):
            if getattr(options, name) < 1:
                raise self.error(name, "1 or more", getattr(options, name))
        if options.HasField("height") != options.HasField("width"):
            raise self.error("height", "both height and width, or none")
        sized = options.HasField("height")
        factors = options.HasField("zoom_factor"), options.HasField("shrink_factor")
        if len(bottom) == 1 and not sized and not any(factors):
            raise self.error("height", "height and width, a zoom_factor, a shrink_factor, or a second bottom")
        self.size = (options.height, options.width) if sized and factors in ((False, False), (True, True)) else None
        if self.size and min(self.size) < 1:
            raise self.error("height", "height and width of 1 or more", self.size)

    def kept(self, bottom: Blob) -> tuple[int, ...]:
        """Height and width of the bottom less what is cut off."""
        return tuple(size - sum(self.crop) for size in bottom.shape[2:])

    def plane(self, bottom: Sequence[Blob]) -> tuple[int, int]:
        kept = self.kept(bottom[0])
        if min(kept) < 1:
            pads = tuple(-count for count in self.crop)
            raise self.error("pad_beg", f"pad_beg and pad_end that leave some of {bottom[0].describe()}", pads)
        if len(bottom) > 1:
            height, width = bottom[1].shape[2:]
            if min(height, width) < 1:
                raise self.error("bottom", "a height and width of 1 or more to follow", bottom[1].describe())
            return height, width
        if self.size:
            return self.size
        options = self.param.interp_param
        height, width = ((size - 1) // options.shrink_factor * options.zoom_factor + 1 for size in kept)
        return height, width

    def _same(self, bottom: Blob, top: Blob) -> bool:
        return self.crop == (0, 0) and bottom.shape == top.shape

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if self._same(bottom[0], top[0]):
            yield call("copy", read(bottom[0]), overwrite(top[0]))
        else:
            yield call("interp_forward", read(bottom[0]), overwrite(top[0]), crop=self.crop)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0]:
            return
        if self._same(bottom[0], top[0]):
            yield call("copy", read_diff(top[0]), overwrite_diff(bottom[0]))
        else:
            yield call("interp_backward", read_diff(top[0]), overwrite_diff(bottom[0]), crop=self.crop)


@register_layer
class Upsample(_Resample):
    """Larger planes: with two bottoms the first's values go back to where a max pooling took them from (SegNet).

    The second bottom is that pooling's second top. With one bottom every value is repeated.
    """

    type = "Upsample"
    bottom_kinds = (NET, EXACT)

    def setup(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> None:
        refuse_in_place(self)
        options = self.param.upsample_param
        for height, width in (("upsample_h", "upsample_w"), ("scale_h", "scale_w")):
            if options.HasField(height) != options.HasField(width):
                raise self.error(height, f"both {height} and {width}, or none")
        # the original looks at the size first and then ignores any scale
        self.size = (options.upsample_h, options.upsample_w) if options.HasField("upsample_h") else None
        if self.size:
            if min(self.size) < 1:
                raise self.error("upsample_h", "upsample_h and upsample_w of 1 or more", self.size)
            return
        if options.HasField("scale") == options.HasField("scale_h"):
            raise self.error("scale", "either scale, or scale_h and scale_w, or upsample_h and upsample_w")
        scaled = options.HasField("scale_h")
        self.scale = (options.scale_h, options.scale_w) if scaled else (options.scale, options.scale)
        self.cut = (int(options.pad_out_h), int(options.pad_out_w))
        if min(self.scale) < 1:
            raise self.error("scale", "1 or more", self.scale)
        for name, cut, scale in zip(("pad_out_h", "pad_out_w"), self.cut, self.scale, strict=True):
            if cut and scale != 2:
                raise self.error(name, "a scale of 2, as for another the size is not defined", scale)

    def plane(self, bottom: Sequence[Blob]) -> tuple[int, int]:
        if len(bottom) > 1 and bottom[1].shape != bottom[0].shape:
            raise self.error("bottom", f"a mask of the shape of {bottom[0].describe()}", bottom[1].describe())
        tall, wide = bottom[0].shape[2:]
        if self.size:
            if min(tall, wide) < 1:
                raise self.error("bottom", "a height and width of 1 or more", bottom[0].describe())
            self.steps: dict[str, Any] = {"times": (tall, wide), "over": self.size}
            return self.size
        self.steps = {"times": (1, 1), "over": self.scale}
        return max(0, tall * self.scale[0] - self.cut[0]), max(0, wide * self.scale[1] - self.cut[1])

    def forward(self, bottom: Sequence[Blob], top: Sequence[Blob]) -> Iterable[Call]:
        if len(bottom) > 1:
            yield call("unpool_forward", read(bottom[0]), read(bottom[1]), overwrite(top[0]))
        else:
            yield call("nearest_forward", read(bottom[0]), overwrite(top[0]), **self.steps)

    def backward(self, bottom: Sequence[Blob], top: Sequence[Blob], propagate_down: Sequence[bool]) -> Iterable[Call]:
        if not propagate_down[0]:
            return
        if len(bottom) > 1:
            yield call("unpool_backward", read_diff(top[0]), read(bottom[1]), overwrite_diff(bottom[0]))
        else:
            yield call("nearest_backward", read_diff(top[0]), overwrite_diff(bottom[0]), **self.steps)

"""Inception v3."""

from __future__ import annotations

from .writer import AVE, MAX, MSRA, TRAIN, Net, Word

EPS = 0.001
SEVENS = (128, 160, 160, 192)  # channels of the factorised 7x7 convolutions of blocks b1 to b4
POOL_PROJECTIONS = (32, 64, 64)  # of blocks a1 to a3


def inception_v3(deploy: bool) -> Net:
    """Szegedy et al. 2015: factorised convolutions, batch norm everywhere, an auxiliary head while training."""
    title = "Inception v3 (Szegedy et al. 2015)"
    net = Net("Inception-v3", "inception_v3", title, (3, 299, 299), deploy, bias_doubled=False)
    blob = _stem(net)
    for index, projection in enumerate(POOL_PROJECTIONS, start=1):
        blob = _Block(net, f"inception_a{index}", blob).a(projection)
    blob = _Block(net, "reduction_a", blob).reduction_a()
    for index, channels in enumerate(SEVENS, start=1):
        blob = _Block(net, f"inception_b{index}", blob).b(channels)
    if not deploy:
        _auxiliary(net, blob)
    blob = _Block(net, "reduction_b", blob).reduction_b()
    for index in (1, 2):
        blob = _Block(net, f"inception_c{index}", blob).c()
    blob = net.pool("pool_8x8_s1", blob, AVE)
    blob = net.layer("pool_8x8_s1_drop", "Dropout", blob, "pool_8x8_s1_drop", dropout_param={"dropout_ratio": 0.2})
    net.head(net.fc("classifier", blob, 1000))
    return net


def _conv(
    net: Net,
    name: str,
    bottom: str,
    outputs: int,
    kernel: int | tuple[int, int],
    stride: int = 1,
    pad: int | tuple[int, int] | None = None,
    phase: Word | None = None,
) -> str:
    """Convolution without bias, batch norm, scale, rectifier. `pad` None keeps the plane's size."""
    if pad is None:
        pad = (kernel[0] // 2, kernel[1] // 2) if isinstance(kernel, tuple) else kernel // 2
    blob = net.conv(name, bottom, outputs, kernel, stride=stride, pad=pad, weight=MSRA, bias=None, phase=phase)
    net.batch_norm(f"{name}_bn", f"{name}_scale", blob, eps=EPS, phase=phase)
    return net.relu(f"{name}_relu", blob, phase=phase)


def _stem(net: Net) -> str:
    blob = net.data(train=32, test=25, deploy=1, mean=(128,), scale=0.0078125)
    blob = _conv(net, "conv1_3x3_s2", blob, 32, 3, stride=2, pad=0)
    blob = _conv(net, "conv2_3x3_s1", blob, 32, 3, pad=0)
    blob = _conv(net, "conv3_3x3_s1", blob, 64, 3)
    blob = net.pool("pool1_3x3_s2", blob, MAX, 3, stride=2)
    blob = _conv(net, "conv4_3x3_reduce", blob, 80, 1)
    blob = _conv(net, "conv4_3x3", blob, 192, 3, pad=0)
    return net.pool("pool2_3x3_s2", blob, MAX, 3, stride=2)


class _Block:
    """One inception block over `bottom`; its layers are named BLOCK_PART."""

    def __init__(self, net: Net, block: str, bottom: str) -> None:
        self.net, self.block, self.bottom = net, block, bottom

    def conv(self, part: str, source: str, outputs: int, stride: int = 1) -> str:
        """The convolution that `part` names: its kernel is the size in the name, or 1x1 where it is a reduction."""
        size = "1x1" if part.endswith(("reduce", "proj")) else part.split("_")[0]
        height, width = map(int, size.split("x"))
        kernel = height if height == width else (height, width)
        pad = 0 if stride > 1 else None
        return _conv(self.net, f"{self.block}_{part}", source, outputs, kernel, stride=stride, pad=pad)

    def pool(self, part: str, method: Word, stride: int) -> str:
        pad = 1 if stride == 1 else 0
        return self.net.pool(f"{self.block}_{part}", self.bottom, method, 3, stride=stride, pad=pad)

    def chain(self, *steps: tuple[str, int], stride: int = 1) -> str:
        """Convolutions in a row from the block's bottom, each (part, outputs); the last one has the stride."""
        blob = self.bottom
        for index, (part, outputs) in enumerate(steps):
            blob = self.conv(part, blob, outputs, stride if index == len(steps) - 1 else 1)
        return blob

    def concat(self, *parts: str, name: str = "concat") -> str:
        return self.net.concat(f"{self.block}_{name}", parts)

    def a(self, projection: int) -> str:
        """35 x 35, Figure 5 of the paper, with 5x5 kept as one convolution."""
        one = self.chain(("1x1", 64))
        five = self.chain(("5x5_reduce", 48), ("5x5", 64))
        three = self.chain(("3x3_reduce", 64), ("3x3_1", 96), ("3x3_2", 96))
        pooled = self.conv("pool_proj", self.pool("pool", AVE, 1), projection)
        return self.concat(one, five, three, pooled, name="output")

    def reduction_a(self) -> str:
        """35 x 35 to 17 x 17."""
        three = self.chain(("3x3", 384), stride=2)
        double = self.chain(("3x3_2_reduce", 64), ("3x3_2", 96), ("3x3_3", 96), stride=2)
        return self.concat(three, double, self.pool("pool", MAX, 2))

    def b(self, channels: int) -> str:
        """17 x 17, Figure 6: 7x7 as 1x7 and 7x1, once and twice."""
        one = self.chain(("1x1_2", 192))
        seven = self.chain(("1x7_reduce", channels), ("1x7", channels), ("7x1", 192))
        double = self.chain(
            ("7x1_reduce", channels), ("7x1_2", channels), ("1x7_2", channels), ("7x1_3", channels), ("1x7_3", 192)
        )
        pooled = self.conv("1x1", self.pool("pool_ave", AVE, 1), 192)
        return self.concat(one, seven, double, pooled)

    def reduction_b(self) -> str:
        """17 x 17 to 8 x 8."""
        three = self.chain(("3x3_reduce", 192), ("3x3", 320), stride=2)
        seven = self.chain(("1x7_reduce", 192), ("1x7", 192), ("7x1", 192), ("3x3_2", 192), stride=2)
        return self.concat(three, seven, self.pool("pool", MAX, 2))

    def c(self) -> str:
        """8 x 8, Figure 7: 3x3 as 1x3 beside 3x1."""
        one = self.chain(("1x1_2", 320))
        reduced = self.chain(("1x3_reduce", 384))
        single = [self.conv(part, reduced, 384) for part in ("1x3", "3x1")]
        three = self.chain(("3x3_reduce", 448), ("3x3", 384))
        double = [self.conv(part, three, 384) for part in ("1x3_2", "3x1_2")]
        pooled = self.conv("1x1", self.pool("pool", AVE, 1), 192)
        return self.concat(one, *single, *double, pooled)


def _auxiliary(net: Net, bottom: str) -> None:
    """The classifier on the last 17 x 17 blob, Figure 8 of the paper, in the training phase only."""
    blob = net.pool("aux_pool_5x5_s3", bottom, AVE, 5, stride=3, phase=TRAIN)
    blob = _conv(net, "aux_1x1", blob, 128, 1, phase=TRAIN)
    blob = _conv(net, "aux_5x5", blob, 768, 5, pad=0, phase=TRAIN)
    scores = net.fc("aux_classifier", blob, 1000, phase=TRAIN)
    net.loss("aux_loss", scores, weight=0.4, phase=TRAIN)

"""DenseNet-264."""

from __future__ import annotations

from collections.abc import Sequence

from .writer import AVE, MAX, MSRA, Net

BLOCKS = (6, 12, 64, 48)  # layers of each


def densenet264(
    deploy: bool,
    blocks: Sequence[int] = BLOCKS,
    growth: int = 32,
    classes: int = 1000,
    side: int = 224,
    batch: int = 32,
) -> Net:
    """Huang et al. 2017, with bottlenecks and compression: a layer reads all those before it in its block."""
    title = "DenseNet-264 (Huang et al. 2017)"
    net = Net("DenseNet-264", "densenet264", title, (3, side, side), deploy, bias_doubled=False)
    blob = net.data(train=batch, test=25, deploy=1, scale=0.017)
    channels = 2 * growth
    blob = net.conv("conv1", blob, channels, 7, stride=2, pad=3, weight=MSRA, bias=None)
    net.batch_norm("conv1/bn", "conv1/scale", blob)
    net.relu("relu1", blob)
    blob = net.pool("pool1", blob, MAX, 3, stride=2)
    for stage, depth in enumerate(blocks, 2):
        for index in range(1, depth + 1):
            inner = _activated_conv(net, f"conv{stage}_{index}/x1", blob, 4 * growth, 1)
            inner = _activated_conv(net, f"conv{stage}_{index}/x2", inner, growth, 3)
            blob = net.concat(f"concat_{stage}_{index}", [blob, inner])
        channels += depth * growth
        if stage <= len(blocks):  # to the next block with half the channels and half the plane
            channels //= 2
            blob = net.pool(
                f"pool{stage}", _activated_conv(net, f"conv{stage}_blk", blob, channels, 1), AVE, 2, stride=2
            )
    blob = net.pool("pool_last", _activated(net, "last", blob), AVE)
    net.head(net.fc("fc6", blob, classes, weight=MSRA), top5=classes > 5)
    return net


def _activated_conv(net: Net, name: str, bottom: str, outputs: int, kernel: int) -> str:
    bottom = _activated(net, name, bottom)
    return net.conv(name, bottom, outputs, kernel, pad=kernel // 2, weight=MSRA, bias=None)


def _activated(net: Net, name: str, bottom: str) -> str:
    """Batch norm, scale and rectifier of what others read, too."""
    return net.relu(f"{name}/relu", net.batch_norm(f"{name}/bn", f"{name}/scale", bottom, top=f"{name}/bn"))

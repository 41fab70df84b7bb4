"""V-Net, for volumes."""

from __future__ import annotations

from collections.abc import Sequence

from .writer import MSRA, Net

SHAPE = (1, 64, 128, 128)  # channels, depth, height, width
DEPTHS = (1, 2, 3, 3, 3)  # convolutions of each level on the way down; on the way up the same but for the last


def vnet(deploy: bool, shape: Sequence[int] = SHAPE, channels: int = 16, batch: int = 2) -> Net:
    """Milletari et al. 2016: residual levels of 5x5x5 convolutions, down by strides and up beside what was there."""
    net = Net(
        "V-Net", "vnet", "V-Net (Milletari et al. 2016)", tuple(shape), deploy, False, {"label": tuple(shape[1:])}
    )
    blob = net.hdf5(train=batch, test=1, deploy=1)
    beside = []
    for level, depth in enumerate(DEPTHS):
        outputs = channels << level
        if level:
            blob = net.conv(f"down{level}", blob, outputs, 2, stride=2, weight=MSRA)
            blob = net.prelu(f"down{level}_relu", blob)
            shortcut = blob
        else:  # the volume once for each channel
            tile = {"axis": 1, "tiles": outputs // shape[0]}
            shortcut = net.layer("tile", "Tile", blob, "tile", tile_param=tile)
        blob = _level(net, f"left{level}", blob, shortcut, outputs, depth)
        beside.append(blob)
    for level in reversed(range(len(DEPTHS) - 1)):
        blob = net.prelu(f"up{level}_relu", net.deconv(f"up{level}", blob, channels << level, 2, stride=2, weight=MSRA))
        blob = net.concat(f"concat{level}", [beside[level], blob])
        blob = _level(net, f"right{level}", blob, blob, channels << (level + 1), DEPTHS[level])
    net.head(net.conv("scores", blob, 2, 1, weight=MSRA), top5=False)
    return net


def _level(net: Net, name: str, bottom: str, shortcut: str, outputs: int, depth: int) -> str:
    """Convolutions with a learned rectifier behind each, the last one behind the sum with the shortcut."""
    blob = bottom
    for index in range(1, depth + 1):
        blob = net.conv(f"{name}_conv{index}", blob, outputs, 5, pad=2, weight=MSRA)
        if index < depth:
            blob = net.prelu(f"{name}_relu{index}", blob)
    return net.prelu(f"{name}_relu{depth}", net.layer(name, "Eltwise", [shortcut, blob], name))

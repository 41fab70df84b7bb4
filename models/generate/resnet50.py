"""ResNet-50."""

from __future__ import annotations

from .writer import AVE, MAX, MSRA, Net, gaussian

STAGES = ((2, 3, 64), (3, 4, 128), (4, 6, 256), (5, 3, 512))  # number of the stage, its blocks, its narrow channels


def resnet50(deploy: bool) -> Net:
    """He et al. 2015. As in the authors' files the first 1x1 convolution of a stage has the stride, conv1 a bias."""
    net = Net("ResNet-50", "resnet50", "ResNet-50 (He et al. 2015)", (3, 224, 224), deploy, bias_doubled=False)
    blob = net.data(train=32, test=25, deploy=1)
    blob = net.conv("conv1", blob, 64, 7, stride=2, pad=3, weight=MSRA)
    net.batch_norm("bn_conv1", "scale_conv1", blob)
    net.relu("conv1_relu", blob)
    blob = net.pool("pool1", blob, MAX, 3, stride=2)
    for stage, depth, channels in STAGES:
        for index in range(depth):
            block = f"{stage}{'abcdef'[index]}"
            stride = 2 if index == 0 and stage > 2 else 1
            blob = _block(net, block, blob, channels, stride, project=index == 0)
    blob = net.pool("pool5", blob, AVE, 7)
    net.head(net.fc("fc1000", blob, 1000, weight=gaussian(0.01)))
    return net


def _block(net: Net, block: str, bottom: str, channels: int, stride: int, project: bool) -> str:
    """A bottleneck: 1x1, 3x3, 1x1 with four times the channels, added to its input or a projection of it."""

    def conv(branch: str, source: str, outputs: int, kernel: int, stride: int = 1) -> str:
        name = f"res{block}_branch{branch}"
        net.conv(name, source, outputs, kernel, stride=stride, pad=kernel // 2, weight=MSRA, bias=None)
        return net.batch_norm(f"bn{block}_branch{branch}", f"scale{block}_branch{branch}", name)

    shortcut = conv("1", bottom, 4 * channels, 1, stride) if project else bottom
    blob = conv("2a", bottom, channels, 1, stride)
    net.relu(f"{blob}_relu", blob)
    blob = conv("2b", blob, channels, 3)
    net.relu(f"{blob}_relu", blob)
    blob = conv("2c", blob, 4 * channels, 1)
    blob = net.layer(f"res{block}", "Eltwise", [shortcut, blob], f"res{block}")
    return net.relu(f"res{block}_relu", blob)
